#![no_main]
//! Arrays in .npz files.

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let root = meristem_fuzz::file("arrays.npz", bytes);
    meristem_fuzz::read_dataset(meristem_data::Source::Arrays, root);
});

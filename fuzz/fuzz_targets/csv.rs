#![no_main]
//! Tables of images.

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let root = meristem_fuzz::file("table.csv", bytes);
    meristem_fuzz::read_dataset(meristem_data::Source::Csv, root);
});

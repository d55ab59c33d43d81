#![no_main]
//! Files of CIFAR-100, with class names as lines.

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let at = bytes.iter().position(|byte| *byte == 0xff).unwrap_or(bytes.len());
    let (names, images) = bytes.split_at(at);
    meristem_fuzz::file("cifar/fine_label_names.txt", names);
    meristem_fuzz::file("cifar/train.bin", images);
    let root = meristem_fuzz::file("cifar/test.bin", images);
    meristem_fuzz::read_dataset(meristem_data::Source::Cifar100, root.with_file_name(""));
});

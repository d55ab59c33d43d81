#![no_main]
//! IDX files: the first two bytes are the length of the images, the rest are images and labels.

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((length, rest)) = bytes.split_first_chunk() else { return };
    let at = usize::from(u16::from_le_bytes(*length)).min(rest.len());
    let (images, labels) = rest.split_at(at);
    for split in ["train", "t10k"] {
        meristem_fuzz::file(&format!("idx/{split}-images-idx3-ubyte"), images);
        meristem_fuzz::file(&format!("idx/{split}-labels-idx1-ubyte"), labels);
    }
    let root = meristem_fuzz::file("idx/other", b"");
    meristem_fuzz::read_dataset(meristem_data::Source::FashionMnist, root.with_file_name(""));
});

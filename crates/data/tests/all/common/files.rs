//! Small dataset files of every format, written into a folder.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use meristem_data::{DatasetSpec, Source};

/// Images (NHWC bytes) and labels.
pub(crate) type Samples = (Vec<u8>, Vec<u32>);

pub(crate) fn spec_of(source: Source, root: &Path) -> DatasetSpec {
    DatasetSpec { root: Some(root.to_path_buf()), ..DatasetSpec::new(source) }
}

pub(crate) fn gzipped(bytes: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(vec![], flate2::Compression::default());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

/// An IDX file of 5×6 images, with `count` in its header.
pub(crate) fn idx_images(count: u32, pixels: &[u8]) -> Vec<u8> {
    let header = [0x803_u32, count, 5, 6].map(u32::to_be_bytes).concat();
    [header, pixels.to_vec()].concat()
}

/// A pair of IDX files with `stem` `train` or `t10k`.
pub(crate) fn write_idx(root: &Path, stem: &str, count: usize, gzip: bool) -> Samples {
    let pixels: Vec<u8> = (0..count * 30).map(|i| (i * 37 % 251) as u8).collect();
    let labels: Vec<u8> = (0..count).map(|i| (i * 3 % 10) as u8).collect();
    let header = [0x801_u32, count as u32].map(u32::to_be_bytes).concat();
    let files = [
        (format!("{stem}-images-idx3-ubyte"), idx_images(count as u32, &pixels)),
        (format!("{stem}-labels-idx1-ubyte"), [header, labels.clone()].concat()),
    ];
    for (name, bytes) in files {
        let (name, bytes) =
            if gzip { (format!("{name}.gz"), gzipped(&bytes)) } else { (name, bytes) };
        fs::write(root.join(name), bytes).unwrap();
    }
    (pixels, labels.into_iter().map(u32::from).collect())
}

/// The six files of CIFAR-10, with `each` records per file.
pub(crate) fn write_cifar10(root: &Path, each: usize) -> (Samples, Samples) {
    fs::create_dir_all(root).unwrap();
    let names = (1..6).map(|i| format!("data_batch_{i}.bin")).chain(["test_batch.bin".into()]);
    let mut samples = vec![];
    for (file, name) in names.enumerate() {
        let (mut bytes, mut images, mut labels) = (vec![], vec![], vec![]);
        for i in 0..each {
            let value =
                |channel: usize, pixel: usize| (file * 71 + i * 13 + channel * 5 + pixel * 3) as u8;
            labels.push(((file + i) % 10) as u32);
            bytes.push(((file + i) % 10) as u8);
            for channel in 0..3 {
                bytes.extend((0..1024).map(|pixel| value(channel, pixel)));
            }
            for pixel in 0..1024 {
                images.extend((0..3).map(|channel| value(channel, pixel)));
            }
        }
        fs::write(root.join(name), bytes).unwrap();
        samples.push((images, labels));
    }
    let test = samples.pop().unwrap();
    let (images, labels): (Vec<_>, Vec<_>) = samples.into_iter().unzip();
    ((images.concat(), labels.concat()), test)
}

/// A gradient, so that JPEG has something to encode.
pub(crate) fn save_rgb(path: &Path, width: u32, height: u32, value: u8) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    rgb(width, height, value).save(path).unwrap();
}

fn rgb(width: u32, height: u32, value: u8) -> image::RgbImage {
    image::RgbImage::from_fn(width, height, |x, y| {
        image::Rgb([
            value.wrapping_add((x * 9) as u8),
            value.wrapping_mul(3),
            (y * 7) as u8 ^ value,
        ])
    })
}

/// 6×5.
pub(crate) fn save_grey(path: &Path, value: u8) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    image::GrayImage::from_pixel(6, 5, image::Luma([value])).save(path).unwrap();
}

/// Classes ant, bee and cat of 6×5 PNGs in `train` and `test`, written out of order.
pub(crate) fn write_folder(root: &Path, train: usize, test: usize) -> (Samples, Samples) {
    let write = |split: &str, count: usize| {
        let (mut images, mut labels) = (vec![], vec![]);
        for (label, class) in ["ant", "bee", "cat"].iter().enumerate() {
            let value = |i: usize| (label * 80 + i * 7 + split.len()) as u8;
            for i in (0..count).rev() {
                save_rgb(&root.join(split).join(class).join(format!("{i:03}.png")), 6, 5, value(i));
            }
            for i in 0..count {
                images.extend(rgb(6, 5, value(i)).into_raw());
                labels.push(label as u32);
            }
        }
        (images, labels)
    };
    (write("train", train), write("test", test))
}

/// Contents of a file of arrays: 2×3 images.
#[derive(Clone, Debug)]
pub(crate) struct Arrays {
    pub(crate) channels: usize,
    pub(crate) train_images: Vec<u8>,
    pub(crate) train_labels: Vec<i64>,
    pub(crate) test_images: Vec<u8>,
    pub(crate) test_labels: Vec<i64>,
    /// Prefix of the names of arrays that are left out.
    pub(crate) leave_out: Option<&'static str>,
}

impl Arrays {
    /// Three and two images with two channels.
    pub(crate) fn small() -> Self {
        Self {
            channels: 2,
            train_images: (0..36).collect(),
            train_labels: vec![2, 0, 1],
            test_images: (100..124).collect(),
            test_labels: vec![1, 2],
            leave_out: None,
        }
    }

    /// Name, numpy's type, shape and bytes of each array.
    fn named(&self) -> Vec<(&'static str, &'static str, Vec<usize>, Vec<u8>)> {
        let images = |bytes: &[u8]| {
            let n = bytes.len() / (6 * self.channels.max(1));
            (vec![n, 2, 3, self.channels], bytes[..n * 6 * self.channels].to_vec())
        };
        let labels = |labels: &[i64]| {
            (vec![labels.len()], labels.iter().flat_map(|l| l.to_le_bytes()).collect())
        };
        let all = [
            ("train_images", "|u1", images(&self.train_images)),
            ("train_labels", "<i8", labels(&self.train_labels)),
            ("test_images", "|u1", images(&self.test_images)),
            ("test_labels", "<i8", labels(&self.test_labels)),
        ];
        all.into_iter()
            .filter(|(name, ..)| !self.leave_out.is_some_and(|out| name.starts_with(out)))
            .map(|(name, dtype, (shape, bytes))| (name, dtype, shape, bytes))
            .collect()
    }
}

/// `kind`: `npz`, `npz-deflated` or `safetensors`.
pub(crate) fn write_arrays(root: &Path, kind: &str, arrays: &Arrays) -> PathBuf {
    if kind == "safetensors" {
        let path = root.join("data.safetensors");
        fs::write(&path, safetensors_bytes(arrays)).unwrap();
        return path;
    }
    let path = root.join("data.npz");
    fs::write(&path, npz_bytes(arrays, kind == "npz-deflated")).unwrap();
    path
}

pub(crate) fn safetensors_bytes(arrays: &Arrays) -> Vec<u8> {
    use safetensors::{Dtype, tensor::TensorView};
    let named = arrays.named();
    let views = named.iter().map(|(name, dtype, shape, bytes)| {
        let dtype = if *dtype == "|u1" { Dtype::U8 } else { Dtype::I64 };
        (*name, TensorView::new(dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap()
}

pub(crate) fn npz_bytes(arrays: &Arrays, deflated: bool) -> Vec<u8> {
    let mut archive = zip::ZipWriter::new(std::io::Cursor::new(vec![]));
    let method =
        if deflated { zip::CompressionMethod::Deflated } else { zip::CompressionMethod::Stored };
    for (name, dtype, shape, bytes) in arrays.named() {
        let options = zip::write::SimpleFileOptions::default().compression_method(method);
        archive.start_file(format!("{name}.npy"), options).unwrap();
        let shape: Vec<String> = shape.iter().map(|dim| format!("{dim},")).collect();
        let shape = shape.join(" ");
        let header =
            format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({shape}), }}\n");
        archive.write_all(b"\x93NUMPY\x01\x00").unwrap();
        archive.write_all(&(header.len() as u16).to_le_bytes()).unwrap();
        archive.write_all(header.as_bytes()).unwrap();
        archive.write_all(&bytes).unwrap();
    }
    archive.finish().unwrap().into_inner()
}

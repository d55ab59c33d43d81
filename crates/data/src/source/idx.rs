//! IDX files (Y. LeCun's format of MNIST): big-endian header, then bytes.
//!
//! Images: magic 0x00000803, count, rows, columns, then one byte a pixel. Labels: magic 0x00000801,
//! count, then one byte a label.

use std::path::Path;

use super::identity::WatchedFiles;
use super::input::{Bytes, Input};
use super::{Layout, OnBad, Reader, SIDE_MAX, Sink, Source, Split, TestSplit, missing_files};
use crate::error::{Error, Result, damaged};
use crate::targets::TargetChunk;

const IMAGES_MAGIC: u32 = 0x0000_0803;
const LABELS_MAGIC: u32 = 0x0000_0801;
const IMAGES_HEADER: u64 = 16;
const LABELS_HEADER: u64 = 8;

const FASHION_MNIST_CLASSES: [&str; 10] = [
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
];

/// Images and labels of train, then of test.
const FILES: [[&str; 2]; 2] = [
    ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"],
    ["t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"],
];

macro_rules! embedded {
    ($name:literal) => {
        Bytes::Embedded(
            concat!("embedded/", $name),
            include_bytes!(concat!("../../assets/fashion-mnist-subset/", $name)),
        )
    };
}

/// A pair of IDX files for each split.
pub(crate) struct Idx {
    layout: Layout,
    images: [Bytes; 2],
    labels: [Vec<u32>; 2],
}

/// Count, rows, columns.
type IdxHeader = [usize; 3];

impl Idx {
    /// Opens the subset in the binary.
    pub(crate) fn embedded() -> Result<Self> {
        Self::open([
            [embedded!("train-images-idx3-ubyte.gz"), embedded!("train-labels-idx1-ubyte.gz")],
            [embedded!("t10k-images-idx3-ubyte.gz"), embedded!("t10k-labels-idx1-ubyte.gz")],
        ])
    }

    /// Opens the files of Fashion-MNIST in `root`, or in `root/FashionMNIST/raw` where torchvision
    /// puts them. A plain file is preferred to its `.gz`.
    pub(crate) fn fashion_mnist(root: &Path, watch: &WatchedFiles) -> Result<Self> {
        let nested = root.join("FashionMNIST").join("raw");
        let folder = if nested.is_dir() { nested.as_path() } else { root };
        let mut absent = vec![];
        let mut find = |name: &str| {
            let plain = folder.join(name);
            let gzip = folder.join(format!("{name}.gz"));
            if !plain.is_file() && !gzip.is_file() {
                absent.push(format!("{name}[.gz]"));
            }
            Bytes::File(if plain.is_file() { plain } else { gzip })
        };
        let files = FILES.map(|pair| pair.map(&mut find));
        if !absent.is_empty() {
            return Err(missing_files(Source::FashionMnist, folder, absent));
        }
        files.iter().flatten().try_for_each(|file| match file {
            Bytes::File(path) => watch.add(path),
            Bytes::Embedded(..) => Ok(()),
        })?;
        Self::open(files)
    }

    fn open(files: [[Bytes; 2]; 2]) -> Result<Self> {
        let classes: Vec<String> = FASHION_MNIST_CLASSES.map(String::from).into();
        let [[train_images, train_labels], [test_images, test_labels]] = files;
        let train = read_images_header(&mut Input::open(&train_images)?)?;
        let test_input = &mut Input::open(&test_images)?;
        let test = read_images_header(test_input)?;
        if train[1..] != test[1..] {
            let expected = format!("{}×{} as in training", train[1], train[2]);
            let got = format!("{}×{}", test[1], test[2]);
            return Err(damaged(test_input.path(), 8, "the size of the images", expected, got));
        }
        let labels = [
            read_labels(&mut Input::open(&train_labels)?, train[0], classes.len())?,
            read_labels(&mut Input::open(&test_labels)?, test[0], classes.len())?,
        ];
        let [_, height, width] = train;
        let test = TestSplit::Samples(test[0]);
        let layout = Layout::of_images([1, height, width], classes, train[0], test);
        Ok(Self { layout, images: [train_images, test_images], labels })
    }
}

impl Reader for Idx {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, split: Split, _on_bad: OnBad<'_>, sink: Sink<'_>) -> Result<()> {
        let mut input = Input::open(&self.images[split as usize])?;
        let header = read_images_header(&mut input)?;
        let labels = &self.labels[split as usize];
        let shape = self.layout.shape;
        let expected = [labels.len(), shape.height, shape.width];
        if header != expected {
            let (expected, got) = (format!("still {expected:?}"), format!("{header:?}"));
            return Err(damaged(input.path(), 4, "count, rows, columns", expected, got));
        }
        let size = self.layout.sample_bytes();
        let mut chunk = vec![0; size * self.layout.chunk_samples().min(labels.len())];
        for labels in labels.chunks(self.layout.chunk_samples()) {
            let images = &mut chunk[..size * labels.len()];
            input.read_exact(images, "pixels")?;
            sink(images, TargetChunk::Classes(labels))?;
        }
        input.expect_end()
    }
}

fn read_magic(input: &mut Input<'_>, expected: u32, kind: &str) -> Result<()> {
    let magic = input.read_u32("the magic number")?;
    if magic == expected {
        return Ok(());
    }
    let got = match magic {
        IMAGES_MAGIC => "0x00000803 (images)".into(),
        LABELS_MAGIC => "0x00000801 (labels)".into(),
        other => format!("{other:#010x}"),
    };
    let expected = format!("{expected:#010x} ({kind} as unsigned bytes)");
    Err(damaged(input.path(), 0, "the magic number", expected, got))
}

fn read_images_header(input: &mut Input<'_>) -> Result<IdxHeader> {
    read_magic(input, IMAGES_MAGIC, "images")?;
    let count = input.read_u32("the number of images")?;
    let rows = input.read_u32("the number of rows")?;
    let columns = input.read_u32("the number of columns")?;
    for (offset, what, value) in [(8, "rows", rows), (12, "columns", columns)] {
        if !(1..=SIDE_MAX).contains(&value) {
            let (what, expected) = (format!("the number of {what}"), format!("1..={SIDE_MAX}"));
            return Err(damaged(input.path(), offset, what, expected, value.to_string()));
        }
    }
    let image = u64::from(rows) * u64::from(columns);
    let total = image.checked_mul(u64::from(count)).and_then(|n| n.checked_add(IMAGES_HEADER));
    input.check_claim(4, total)?;
    Ok([count as usize, rows as usize, columns as usize])
}

fn read_labels(input: &mut Input<'_>, images: usize, classes: usize) -> Result<Vec<u32>> {
    read_magic(input, LABELS_MAGIC, "labels")?;
    let count = input.read_u32("the number of labels")?;
    input.check_claim(4, Some(u64::from(count) + LABELS_HEADER))?;
    if count as usize != images {
        let expected = format!("{images}, the number of images");
        return Err(damaged(input.path(), 4, "the number of labels", expected, count.to_string()));
    }
    let mut bytes = vec![0; images];
    input.read_exact(&mut bytes, "labels")?;
    input.expect_end()?;
    let check = |(i, label): (usize, u8)| {
        if usize::from(label) < classes {
            return Ok(u32::from(label));
        }
        let expected = format!("below {classes}");
        let offset = LABELS_HEADER + i as u64;
        Err::<u32, Error>(damaged(input.path(), offset, "a label", expected, label.to_string()))
    };
    bytes.into_iter().enumerate().map(check).collect()
}

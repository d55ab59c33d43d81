//! Kinds of dataset: their names, files and settings.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Serialize;

use super::DatasetFiles;
use super::generated::Generated;
use super::table_rules::TableOptions;
use crate::error::{Error, Result};

/// Kinds of dataset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// The class-balanced subset of Fashion-MNIST inside the binary: 10,000 and 2,500 images.
    Embedded,
    /// The four IDX files of Fashion-MNIST, plain or gzip.
    FashionMnist,
    /// CIFAR-10, binary version.
    Cifar10,
    /// CIFAR-100, binary version; the fine labels.
    Cifar100,
    /// `train/CLASS/*` and `test/CLASS/*` with PNG and JPEG files.
    Folder,
    /// A CSV file with the columns `path` and `label`, and `split` for a test split.
    Csv,
    /// `.npz` or `.safetensors` with `train_images` or `train_inputs`, and `train_labels` or
    /// `train_targets`; arrays of a test split have `test` in their names.
    Arrays,
    /// A CSV, Parquet or Arrow file of numbers and categories, with target columns; rows are
    /// vectors.
    Table,
    /// Signals of ten classes, generated.
    Mnist1d,
    /// Five clouds of points in the plane, generated.
    Blobs,
    /// Three spirals in the plane, generated.
    Spirals,
    /// Vectors of ten features with a number, generated.
    Friedman,
}

impl Source {
    /// Every source, in the order of the documentation.
    pub const ALL: [Self; 12] = [
        Self::Embedded,
        Self::FashionMnist,
        Self::Cifar10,
        Self::Cifar100,
        Self::Folder,
        Self::Csv,
        Self::Arrays,
        Self::Table,
        Self::Mnist1d,
        Self::Blobs,
        Self::Spirals,
        Self::Friedman,
    ];

    /// Whether its images are PNG and JPEG files.
    pub const fn is_of_image_files(self) -> bool {
        matches!(self, Self::Folder | Self::Csv)
    }

    /// Whether it has files; other sources are part of the program, or generated.
    pub const fn has_files(self) -> bool {
        !matches!(
            self,
            Self::Embedded | Self::Mnist1d | Self::Blobs | Self::Spirals | Self::Friedman
        )
    }

    /// Names of the options of a generated dataset; none for any other.
    pub const fn options(self) -> &'static [&'static str] {
        match self {
            Self::Mnist1d => &["seed", "train", "test", "noise", "label_noise"],
            Self::Blobs => &["seed", "train", "test", "noise", "label_noise", "classes"],
            Self::Spirals => &Generated::OPTIONS,
            Self::Friedman => &["seed", "train", "test", "noise"],
            _ => &[],
        }
    }

    /// Sources whose files are in `root`. Opens them, and decodes no image.
    pub fn found_in(root: &Path) -> Vec<Self> {
        let found = |source: &Self| {
            let root = Some(root.into());
            let spec = DatasetSpec { root, skip_bad: true, ..DatasetSpec::new(*source) };
            source.has_files() && DatasetFiles::open(&spec).is_ok()
        };
        Self::ALL.into_iter().filter(found).collect()
    }

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embedded => "embedded",
            Self::FashionMnist => "fashion-mnist",
            Self::Cifar10 => "cifar10",
            Self::Cifar100 => "cifar100",
            Self::Folder => "folder",
            Self::Csv => "csv",
            Self::Arrays => "arrays",
            Self::Table => "table",
            Self::Mnist1d => "mnist1d",
            Self::Blobs => "blobs",
            Self::Spirals => "spirals",
            Self::Friedman => "friedman",
        }
    }

    /// Files expected in its `data_root`, for messages; empty without files.
    pub fn expected_files(self) -> Vec<String> {
        let names: &[&str] = match self {
            Self::Embedded | Self::Mnist1d | Self::Blobs | Self::Spirals | Self::Friedman => &[],
            Self::FashionMnist => &[
                "train-images-idx3-ubyte[.gz]",
                "train-labels-idx1-ubyte[.gz]",
                "t10k-images-idx3-ubyte[.gz]",
                "t10k-labels-idx1-ubyte[.gz]",
            ],
            Self::Cifar10 => &["data_batch_1.bin .. data_batch_5.bin", "test_batch.bin"],
            Self::Cifar100 => &["train.bin", "test.bin"],
            Self::Folder => {
                &["train/CLASS/*.{png,jpg,jpeg}", "test/CLASS/*.{png,jpg,jpeg} for a test split"]
            }
            Self::Csv => {
                &["a CSV file whose first line has the columns path and label, and split (train \
                 or test) for a test split"]
            }
            Self::Arrays => {
                &["one .npz or .safetensors file with train_images (N×H×W or N×H×W×C) or \
                 train_inputs (N×F, N×C×L or N×C×H×W), train_labels (integers N, or labels N×K \
                 from 0 to 1) or train_targets (numbers, N or N×K), and arrays of the same names \
                 with test for a test split"]
            }
            Self::Table => &[
                "a CSV file whose first line has the names of the columns, or a Parquet or Arrow \
                 file: --target names the columns of targets, split (train or test) makes a test \
                 split, all others are features",
            ],
        };
        names.iter().map(|name| name.to_string()).collect()
    }

    /// Download location of its files, for messages.
    pub const fn where_to_get(self) -> &'static str {
        match self {
            Self::Embedded => "it is part of the program",
            Self::Mnist1d | Self::Blobs | Self::Spirals | Self::Friedman => {
                "the program generates it"
            }
            Self::FashionMnist => {
                "get them from https://github.com/zalandoresearch/fashion-mnist, or from Debian's \
                 package dataset-fashion-mnist (in /usr/share/datasets/fashion-mnist)"
            }
            Self::Cifar10 => {
                "get the binary version from https://www.cs.toronto.edu/~kriz/cifar.html and \
                 unpack it, or convert class folders with `meristem data import`"
            }
            Self::Cifar100 => {
                "get the binary version from https://www.cs.toronto.edu/~kriz/cifar.html and \
                 unpack it"
            }
            Self::Folder => "put each image into the folder of its class",
            Self::Csv => "write a line for each image; paths are relative to the file",
            Self::Arrays => {
                "write them with numpy.savez(\"data.npz\", train_inputs=…) or \
                 safetensors.numpy.save_file"
            }
            Self::Table => "write a line for each sample, such as with pandas.DataFrame.to_csv",
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Source {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|source| source.name() == name).ok_or_else(|| Error::Argument {
            operation: "dataset",
            argument: "dataset",
            expected: format!("one of {}", Self::ALL.map(Self::name).join(", ")),
            got: format!("`{name}`"),
            remedy: "`embedded` needs no files".into(),
        })
    }
}

/// A dataset and its location, with the treatment of damaged files.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DatasetSpec {
    /// The kind of dataset.
    pub source: Source,
    /// Location of its files: a folder, or the file of [`Source::Csv`], [`Source::Arrays`] or
    /// [`Source::Table`]. Ignored for sources without files.
    pub root: Option<PathBuf>,
    /// Whether to count damage and continue, instead of stopping at the first: undecodable image
    /// files of [`Source::Folder`] and [`Source::Csv`], missing ones of [`Source::Csv`], CIFAR
    /// records with an invalid label.
    pub skip_bad: bool,
    /// Rows and columns to which images of [`Source::Folder`] and [`Source::Csv`] are scaled, after
    /// a cut to their central square. Without it all images must have the same size.
    pub resize: Option<u32>,
    /// Whether to decode image files even if decoded images are on disk, and to write none there.
    pub no_cache: bool,
    /// Targets, missing values and rules of [`Source::Table`].
    pub table: TableOptions,
    /// Options of a generated dataset.
    pub generated: Generated,
}

impl DatasetSpec {
    /// The dataset inside the binary.
    pub fn embedded() -> Self {
        Self::new(Source::Embedded)
    }

    /// A dataset without a root, with default options: damage is an error, images are not scaled.
    pub fn new(source: Source) -> Self {
        let (table, generated) = (TableOptions::default(), Generated::default());
        Self {
            source,
            root: None,
            skip_bad: false,
            resize: None,
            no_cache: false,
            table,
            generated,
        }
    }
}

//! Dataset formats on disk (D9): one [`Reader`] for each format, and their common parts.
//!
//! A reader's `open` checks names, headers, sizes and targets; its `read` decodes a split in chunks
//! of at most [`CHUNK_BYTES`] (or one sample, if that is larger), always in the same order. No
//! reader allocates by a length from a header before it is compared with the file.

pub(crate) mod array_file;
mod array_folds;
pub(crate) mod array_samples;
mod array_targets;
pub(crate) mod arrays;
pub(crate) mod cifar;
mod csv_file;
pub mod decoded;
pub(crate) mod folder;
mod generated;
pub(crate) mod identity;
pub(crate) mod idx;
pub(crate) mod image_file;
mod image_list;
pub(crate) mod images;
pub(crate) mod input;
mod kind;
pub(crate) mod listing;
mod metadata;
pub(crate) mod npy;
mod split;
mod synthetic;
mod table;
pub mod table_rules;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde::Serialize;

pub use self::generated::{Generated, OptionNumber};
pub use self::kind::{DatasetSpec, Source};
pub use self::split::Split;
use crate::error::{Error, Result};
use crate::normalization::{ChannelStatistics, Normalization};
use crate::parts::Fold;
use crate::shape::{InputKind, SampleShape, StoredType};
use crate::targets::{self, Standardization, TargetChunk, TargetForm, TargetKind};
use identity::WatchedFiles;
use synthetic::Synthetic;
use table_rules::TableRules;

/// Largest piece, in bytes, in which samples are decoded, copied to a device or spooled (or one
/// sample, if that is larger). At most four such pieces exist at once: as read, as decoded, as
/// converted to f32, and as staged.
pub const CHUNK_BYTES: usize = 1 << 20;

/// The longest side of an image, in pixels: bounds the allocation for one image.
pub(crate) const SIDE_MAX: u32 = 16_384;

/// Description of a dataset, without its samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DatasetInfo {
    /// Name of its source.
    pub name: String,
    /// Kind of its samples.
    pub kind: InputKind,
    /// Type of a stored value.
    pub stored: StoredType,
    /// As in [`SampleShape`]: 1 (grey) or 3 (RGB) for image files, and any number for arrays.
    pub channels: usize,
    /// Rows of an image, else 1.
    pub height: usize,
    /// Columns of an image or points of a signal, else 1.
    pub width: usize,
    /// Kind of its targets.
    pub targets: TargetKind,
    /// Names of the outputs: of classes (class c is `classes[c]`), of labels, or of numbers.
    pub classes: Vec<String>,
    /// Training samples.
    pub train_len: usize,
    /// Training samples of each class, or those in which each label is present (above ½); empty
    /// for numbers.
    pub per_class: Vec<usize>,
    /// Mean of each number of the targets of the training split, with which the numbers of both
    /// splits are standardised; empty for classes and labels.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub target_mean: Vec<f64>,
    /// Population standard deviation of each number, as [`Self::target_mean`]; 1 for a number that
    /// is constant.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub target_std: Vec<f64>,
    /// Test samples; `None` where the dataset has no test split.
    pub test_len: Option<usize>,
    /// Mean per channel of the training samples, of bytes as b / 255, exact for bytes.
    pub mean: Vec<f32>,
    /// Population standard deviation per channel of the training samples, as the mean; 1 for a
    /// channel that is constant.
    pub std: Vec<f32>,
    /// Number of samples left out under `skip_bad`, both splits together.
    pub skipped: usize,
    /// Rules by which the rows of a table became samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub table: Option<TableRules>,
}

impl DatasetInfo {
    /// Shape of a sample.
    pub fn shape(&self) -> SampleShape {
        SampleShape { channels: self.channels, height: self.height, width: self.width }
    }
}

/// The test split, before decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TestSplit {
    /// Number of samples, damaged ones included.
    Samples(usize),
    /// None in the files; the text describes the expected files.
    Missing(&'static str),
}

/// Facts about a dataset that are known before decoding.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Layout {
    pub(crate) kind: InputKind,
    pub(crate) shape: SampleShape,
    pub(crate) stored: StoredType,
    pub(crate) targets: TargetKind,
    /// Names of the outputs.
    pub(crate) classes: Vec<String>,
    /// Constants of numbers, with which the reader standardises them.
    pub(crate) standardization: Standardization,
    /// Number of training samples, damaged ones included.
    pub(crate) train: usize,
    pub(crate) test: TestSplit,
}

impl Layout {
    /// Images of bytes with classes.
    pub(crate) fn of_images(
        [channels, height, width]: [usize; 3],
        classes: Vec<String>,
        train: usize,
        test: TestSplit,
    ) -> Self {
        let shape = SampleShape { channels, height, width };
        let (kind, stored, targets) = (InputKind::Image, StoredType::U8, TargetKind::Classes);
        let standardization = Standardization::default();
        Self { kind, shape, stored, targets, classes, standardization, train, test }
    }

    /// Form of the targets.
    pub(crate) fn target_form(&self) -> TargetForm {
        TargetForm::new(self.targets, self.classes.len())
    }

    /// Number of samples of a split, damaged ones included; 0 where there is no such split.
    pub(crate) fn len(&self, split: Split) -> usize {
        match (split, self.test) {
            (Split::Train, _) => self.train,
            (Split::Test, TestSplit::Samples(len)) => len,
            (Split::Test, TestSplit::Missing(_)) => 0,
        }
    }

    /// Bytes of one stored sample.
    pub(crate) fn sample_bytes(&self) -> usize {
        self.shape.numel() * self.stored.size()
    }

    /// Number of samples in a chunk, at least one.
    pub(crate) fn chunk_samples(&self) -> usize {
        (CHUNK_BYTES / self.sample_bytes()).max(1)
    }
}

/// Receiver of decoded samples (the bytes of whole samples, NHWC, in the order of this processor)
/// and their targets.
pub(crate) type Sink<'a> = &'a mut dyn FnMut(&[u8], TargetChunk<'_>) -> Result<()>;

/// Handler of one bad file or record of many; an error that it returns stops the reading.
pub(crate) type OnBad<'a> = &'a mut dyn FnMut(Error) -> Result<()>;

/// Handler of an image file that has no pixels in the cache of decoded images.
pub(crate) type OnBadFile<'a> = &'a mut dyn FnMut(&listing::ImageFile) -> Result<()>;

/// A reader of one format.
pub(crate) trait Reader: Send + Sync {
    /// Facts that are known without decoding.
    fn layout(&self) -> &Layout;

    /// Rules by which the rows of a table become samples.
    fn table_rules(&self) -> Option<&TableRules> {
        None
    }

    /// Folds of the training samples, if the files list them.
    fn folds(&self) -> Option<&Arc<[Fold]>> {
        None
    }

    /// Decodes a split in order. Targets have the form of the layout: classes are below the number
    /// of classes, numbers are standardised.
    fn read(&self, split: Split, on_bad: OnBad<'_>, sink: Sink<'_>) -> Result<()>;
}

/// Facts about a split that are known after decoding.
#[derive(Clone, Debug)]
pub(crate) struct SplitFacts {
    /// Number of decoded samples.
    pub(crate) len: usize,
    /// Number of samples left out under `skip_bad`.
    pub(crate) skipped: usize,
    /// As [`DatasetInfo::per_class`].
    pub(crate) per_class: Vec<usize>,
    pub(crate) statistics: ChannelStatistics,
    /// CRC-32 of the samples and of the targets.
    pub(crate) crcs: [u32; 2],
}

/// A dataset on disk: its files found, its headers and targets checked, its samples not decoded.
pub struct DatasetFiles {
    spec: DatasetSpec,
    reader: Box<dyn Reader>,
    /// The files with their identities before they were opened.
    watch: WatchedFiles,
    facts: [OnceLock<SplitFacts>; 2],
}

impl DatasetFiles {
    /// Finds and checks the files of `spec`. Does not decode samples.
    ///
    /// # Errors
    /// [`Error::RootNotGiven`] and [`Error::Missing`] name the expected files and their source;
    /// [`Error::Damaged`], [`Error::Absent`], [`Error::Listed`], [`Error::Layout`] and
    /// [`Error::Io`] name the file; [`Error::EmptySplit`]; [`Error::Changed`] for a file that is
    /// being written; [`Error::Argument`] for options that do not fit a table.
    pub fn open(spec: &DatasetSpec) -> Result<Arc<Self>> {
        let root = canonical_root(spec)?;
        let spec = DatasetSpec { root, ..spec.clone() };
        // A second attempt, because a change of metadata, such as of permissions, also counts as a
        // change of the file.
        let files = Self::open_once(&spec).or_else(|error| match error {
            Error::Changed { .. } => Self::open_once(&spec),
            error => Err(error),
        })?;
        for split in Split::ALL.into_iter().filter(|split| files.has(*split)) {
            files.check_not_empty(split, files.layout().len(split))?;
        }
        Ok(Arc::new(files))
    }

    /// Opens files of a spec whose root is canonical.
    fn open_once(spec: &DatasetSpec) -> Result<Self> {
        let watch = WatchedFiles::default();
        let reader = watch.unless_changed(open_reader(spec, &watch))?;
        let facts = [const { OnceLock::new() }; 2];
        Ok(Self { spec: spec.clone(), reader, watch, facts })
    }

    /// Whether the files are unchanged since they were opened. Queries the system for each file,
    /// and reads only files that were changed just before they were opened.
    pub(crate) fn are_current(&self) -> bool {
        self.watch.changed().is_none()
    }

    /// Whether the dataset has this split. Every dataset has a training split.
    pub fn has(&self, split: Split) -> bool {
        self.check_has(split).is_ok()
    }

    /// Checks that the dataset has this split.
    ///
    /// # Errors
    /// [`Error::NoTestSplit`] names the missing files.
    pub fn check_has(&self, split: Split) -> Result<()> {
        match (split, self.layout().test) {
            (Split::Test, TestSplit::Missing(expected)) => Err(Error::NoTestSplit {
                dataset: self.spec.source.name(),
                path: self.spec.root.clone().unwrap_or_default(),
                expected,
            }),
            _ => Ok(()),
        }
    }

    fn check_not_empty(&self, split: Split, len: usize) -> Result<()> {
        if len > 0 {
            return Ok(());
        }
        let path = self.spec.root.clone().unwrap_or_default();
        let remedy = self.spec.source.where_to_get().into();
        Err(Error::EmptySplit { path, split: split.name(), remedy })
    }

    /// The spec of these files, its root canonical.
    pub fn spec(&self) -> &DatasetSpec {
        &self.spec
    }

    /// Outputs, sizes and normalisation constants. Decodes the training samples unless they have
    /// been decoded before, and with `skip_bad` the test samples too.
    ///
    /// # Errors
    /// Any error of reading the samples: [`Error::Damaged`], [`Error::Absent`], [`Error::Listed`],
    /// [`Error::Layout`], [`Error::EmptySplit`], [`Error::Changed`], [`Error::Io`].
    pub fn info(&self) -> Result<DatasetInfo> {
        let Layout { kind, shape, stored, targets, test, .. } = *self.layout();
        let Layout { classes, standardization, .. } = self.layout();
        let train = self.facts(Split::Train)?;
        let (test_len, test_skipped) = match (self.facts[Split::Test as usize].get(), test) {
            (_, TestSplit::Missing(_)) => (None, 0),
            (Some(test), _) => (Some(test.len), test.skipped),
            (None, _) if self.spec.skip_bad => {
                let test = self.facts(Split::Test)?;
                (Some(test.len), test.skipped)
            }
            (None, TestSplit::Samples(len)) => (Some(len), 0),
        };
        let Normalization { mean, std } = train.statistics.normalization();
        Ok(DatasetInfo {
            name: self.spec.source.name().to_string(),
            kind,
            stored,
            channels: shape.channels,
            height: shape.height,
            width: shape.width,
            targets,
            classes: classes.clone(),
            train_len: train.len,
            per_class: train.per_class.clone(),
            target_mean: standardization.mean.clone(),
            target_std: standardization.std.clone(),
            test_len,
            mean,
            std,
            skipped: train.skipped + test_skipped,
            table: self.reader.table_rules().cloned(),
        })
    }

    /// Facts that are known without decoding.
    pub(crate) fn layout(&self) -> &Layout {
        self.reader.layout()
    }

    /// Folds of the training samples, if the files list them.
    pub(crate) fn folds(&self) -> Option<&Arc<[Fold]>> {
        self.reader.folds()
    }

    /// Number, classes and statistics of a split; decodes it on the first call.
    pub(crate) fn facts(&self, split: Split) -> Result<&SplitFacts> {
        if let Some(facts) = self.facts[split as usize].get() {
            return Ok(facts);
        }
        self.read(split, &mut |_, _| Ok(()))
    }

    /// Decodes a split into `sink`, in order; with `skip_bad` without damaged files.
    pub(crate) fn read(&self, split: Split, sink: Sink<'_>) -> Result<&SplitFacts> {
        let skip_bad = self.spec.skip_bad;
        let mut skipped = 0;
        let mut on_bad = |error: Error| {
            if !(skip_bad && error.is_damage()) {
                return Err(error);
            }
            tracing::warn!(%error, "left out");
            skipped += 1;
            Ok(())
        };
        let mut facts = self.read_with(split, &mut on_bad, sink)?;
        facts.skipped = skipped;
        self.check_not_empty(split, facts.len)?;
        Ok(self.facts[split as usize].get_or_init(|| facts))
    }

    /// Decodes a split into `sink`; `on_bad` handles damaged files.
    pub(crate) fn read_with(
        &self,
        split: Split,
        on_bad: OnBad<'_>,
        sink: Sink<'_>,
    ) -> Result<SplitFacts> {
        self.check_has(split)?;
        let read = self.read_once(split, on_bad, sink);
        let Some(path) = self.watch.changed() else { return read };
        // The identity of a file has changed: its contents decide.
        match read {
            Ok(facts) if self.is_as_read(split, &facts).unwrap_or(false) => Ok(facts),
            _ => Err(Error::Changed { path }),
        }
    }

    fn read_once(&self, split: Split, on_bad: OnBad<'_>, sink: Sink<'_>) -> Result<SplitFacts> {
        let layout = self.layout();
        let mut facts = SplitFacts {
            len: 0,
            skipped: 0,
            per_class: targets::empty_counts(layout.targets, layout.classes.len()),
            statistics: ChannelStatistics::new(layout.stored, layout.shape.channels),
            crcs: [0; 2],
        };
        let [mut of_samples, mut of_targets] = [(); 2].map(|()| crc32fast::Hasher::new());
        self.reader.read(split, on_bad, &mut |samples, targets| {
            facts.len += targets.len();
            of_samples.update(samples);
            targets.count(&mut facts.per_class);
            targets.add_to(&mut of_targets);
            facts.statistics.add(samples);
            sink(samples, targets)
        })?;
        facts.crcs = [of_samples, of_targets].map(crc32fast::Hasher::finalize);
        Ok(facts)
    }

    /// Whether the files still have the contents that were read: `facts` of `split`, and the facts
    /// of the other split if it was read. Ignores changes of permissions, links to a file and names
    /// that begin with a dot.
    fn is_as_read(&self, split: Split, facts: &SplitFacts) -> Result<bool> {
        let now = Self::open_once(&self.spec)?;
        let known = Split::ALL.into_iter().zip(self.facts.each_ref().map(OnceLock::get));
        let known = known.filter_map(|(split, facts)| Some((split, facts?)));
        let mut is_same = now.layout() == self.layout() && now.folds() == self.folds();
        for (split, before) in known.chain([(split, facts)]) {
            let on_bad = &mut |error: Error| if error.is_damage() { Ok(()) } else { Err(error) };
            let again = now.read_once(split, on_bad, &mut |_, _| Ok(()))?;
            is_same &= again.crcs == before.crcs;
        }
        now.watch.unless_changed(Ok(is_same))
    }
}

fn open_reader(spec: &DatasetSpec, watch: &WatchedFiles) -> Result<Box<dyn Reader>> {
    Ok(match (spec.source, spec.root.as_deref()) {
        (Source::FashionMnist, Some(root)) => Box::new(idx::Idx::fashion_mnist(root, watch)?),
        (Source::Cifar10, Some(root)) => Box::new(cifar::Cifar::open_10(root, watch)?),
        (Source::Cifar100, Some(root)) => Box::new(cifar::Cifar::open_100(root, watch)?),
        (Source::Folder | Source::Csv, Some(root)) => {
            Box::new(images::ImageFiles::open(spec, root, watch)?)
        }
        (Source::Arrays, Some(root)) => arrays::open(root, watch)?,
        (Source::Table, Some(root)) => Box::new(table::open(&spec.table, root, watch)?),
        (Source::Mnist1d, _) => Box::new(Synthetic::mnist1d(&spec.generated)),
        (Source::Blobs, _) => Box::new(Synthetic::blobs(&spec.generated)),
        (Source::Spirals, _) => Box::new(Synthetic::spirals(&spec.generated)),
        (Source::Friedman, _) => Box::new(Synthetic::friedman(&spec.generated)),
        // `canonical_root` has refused other sources without a root.
        (Source::Embedded, _) | (_, None) => Box::new(idx::Idx::embedded()?),
    })
}

impl fmt::Debug for DatasetFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatasetFiles").field("spec", &self.spec).finish_non_exhaustive()
    }
}

/// The canonical root, as in the cache's keys; `None` for a source without files.
pub(crate) fn canonical_root(spec: &DatasetSpec) -> Result<Option<PathBuf>> {
    let source = spec.source;
    if !source.has_files() {
        return Ok(None);
    }
    let Some(root) = &spec.root else {
        return Err(Error::RootNotGiven {
            dataset: source.name(),
            expected: source.expected_files(),
            remedy: source.where_to_get().into(),
        });
    };
    match root.canonicalize() {
        Ok(root) => Ok(Some(root)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(missing(source, root)),
        Err(error) => Err(Error::io("open", root)(error)),
    }
}

/// The error for a root without the files of `source`.
pub(crate) fn missing(source: Source, looked_in: &Path) -> Error {
    missing_files(source, looked_in, source.expected_files())
}

/// The error for a root without the files or arrays `expected`.
pub(crate) fn missing_files(source: Source, looked_in: &Path, expected: Vec<String>) -> Error {
    Error::Missing {
        dataset: source.name(),
        looked_in: looked_in.to_path_buf(),
        expected,
        remedy: source.where_to_get().into(),
    }
}

//! A dataset in named arrays.
//!
//! Samples are `train_images` and `test_images`, [N, H, W] (grey) or [N, H, W, C] with C from 1 to
//! 4; or `train_inputs` and `test_inputs`: vectors [N, F], signals [N, C, L], images [N, C, H, W].
//! Unsigned bytes stay bytes, of the value b / 255. Signed integers of 8 or 16 bits are stored as
//! i16, numbers of type float16 as f16, and all others as f32.
//!
//! | targets | shape | values |
//! |---|---|---|
//! | `train_labels`, `test_labels` | [N] | classes: integers of any width |
//! | | [N, K] | labels: booleans, integers 0 and 1 (K > 1), or floats from 0 to 1 |
//! | `train_targets`, `test_targets` | [N] or [N, K] | numbers: integers or floats |
//!
//! Classes, labels and numbers have the names in `classes`; without them they have their number as
//! a name, and the classes are 0 to the largest training label. A file without test arrays has no
//! test split. `train_folds` [K, N] has the folds of a cross-validation: 1 for samples to train on,
//! 2 for samples to hold out, 0 for neither.

use std::collections::HashSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

use super::array_file::{ArrayFile, CLASSES, Npz, SafeTensors};
use super::array_folds::{self, FOLDS};
use super::array_samples::{ArrayForm, AxisOrder};
use super::array_targets::{self, ArrayTargets};
use super::identity::WatchedFiles;
use super::input;
use super::{Layout, OnBad, Reader, Sink, Source, Split, TestSplit, missing};
use crate::error::{Error, Mismatch, Result, damaged};
use crate::notes;
use crate::parts::Fold;
use crate::targets::{StoredTargets, TargetKind};

/// Opens the file at `root`, or the only file of arrays in the folder `root`.
pub(crate) fn open(root: &Path, watch: &WatchedFiles) -> Result<Box<dyn Reader>> {
    let path = find(root)?;
    watch.add(&path)?;
    let mut start = [0; 4];
    let mut file = input::open_file(&path)?;
    let zip = file.read_exact(&mut start).is_ok() && start.starts_with(b"PK");
    if !zip && path.extension().is_some_and(|extension| extension == "npz") {
        let expected = "a zip archive, as numpy.savez writes it";
        return Err(damaged(&path, 0, "the file", expected, format!("bytes {start:?}")));
    }
    let file: Box<dyn ArrayFile> = if zip {
        Box::new(Npz { path: path.clone() })
    } else {
        Box::new(SafeTensors::open(path.clone())?)
    };
    Ok(Box::new(ArraysReader::open(&path, file)?))
}

fn find(root: &Path) -> Result<PathBuf> {
    if root.is_file() {
        return Ok(root.to_path_buf());
    }
    // A pipe or a device.
    if root.exists() && !root.is_dir() {
        return Err(missing(Source::Arrays, root));
    }
    let mut found = vec![];
    for entry in fs::read_dir(root).map_err(Error::io("list", root))? {
        let path = entry.map_err(Error::io("list", root))?.path();
        // Opening a pipe would wait for its writer.
        if path.extension().is_some_and(|e| e == "npz" || e == "safetensors") && path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    match &found[..] {
        [] => Err(missing(Source::Arrays, root)),
        [one] => Ok(one.clone()),
        [first, second, ..] => {
            let got = format!("{} and {}", first.display(), second.display());
            Err(Mismatch::new("the folder", "one .npz or .safetensors file", got)
                .remedy("name the file itself as the data root")
                .in_layout(root))
        }
    }
}

/// Arrays of the samples of both splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SampleArrays {
    /// Names of the arrays, train then test.
    names: [&'static str; 2],
    order: AxisOrder,
}

/// The two ways to store samples; a file has one of them.
const SAMPLES: [SampleArrays; 2] = [
    SampleArrays { names: ["train_images", "test_images"], order: AxisOrder::ChannelsLast },
    SampleArrays { names: ["train_inputs", "test_inputs"], order: AxisOrder::ChannelsFirst },
];

/// A dataset in one file of arrays.
struct ArraysReader {
    file: Box<dyn ArrayFile>,
    samples: SampleArrays,
    layout: Layout,
    /// Train, then test.
    targets: [StoredTargets; 2],
    /// Folds of the training samples, if the file lists them.
    folds: Option<Arc<[Fold]>>,
    /// Number of the labels, if each training sample has exactly one of several.
    one_hot: Option<usize>,
    /// Names of arrays that are not read.
    unread: Vec<String>,
    /// Whether the notes about the file have been reported.
    reported: Once,
}

impl ArraysReader {
    fn open(path: &Path, file: Box<dyn ArrayFile>) -> Result<Self> {
        let names = file.names()?;
        let samples = sample_arrays(path, &names)?;
        let target_names = array_targets::target_arrays(path, &names)?;
        let named = file.class_names()?;
        check_names(path, named.as_deref().unwrap_or_default())?;
        let names = names.into_iter().filter(|name| named.is_none() || name != CLASSES);
        let known =
            |name: &String| samples.names.iter().chain(&target_names).any(|known| known == name);
        let (split_arrays, unread): (Vec<String>, Vec<String>) = names.partition(known);
        let has = |name: &str| split_arrays.iter().any(|known| known == name);
        let has_test = has(samples.names[1]) || has(target_names[1]);
        let mut forms = vec![];
        for name in &samples.names[..if has_test { 2 } else { 1 }] {
            file.visit(name, &mut |header, input| {
                forms.push(ArrayForm::of(name, samples.order, header, input)?);
                Ok(())
            })?;
        }
        if !has(target_names[0]) {
            return Err(array_targets::missing_targets(path));
        }
        let targets = ArrayTargets::read(&*file, target_names, &forms)?;
        // Values of another type in each split are stored as f32.
        if forms.iter().any(|form| form.stored != forms[0].stored) {
            forms.iter_mut().for_each(|form| form.stored = form.stored.of_inputs());
        }
        // The next errors are about an array that is opened again for the path in the error.
        let train = forms[0];
        if let Some(test) = forms.get(1).filter(|test| !test.is_alike(&train)) {
            file.visit(samples.names[1], &mut |_, input| {
                let what = format!("a sample of `{}`", samples.names[1]);
                let expected = format!("{train} as in training");
                Err(Mismatch::new(what, expected, test.to_string())
                    .remedy("give the samples of both splits one shape and type")
                    .in_layout(input.path()))
            })?;
        }
        let classes = match targets.kind {
            TargetKind::Classes => name_classes(&*file, target_names, &targets, named)?,
            _ => name_outputs(path, target_names, &targets, named)?,
        };
        let test = match (forms.get(1), samples.order, targets.kind) {
            (Some(test), ..) => TestSplit::Samples(test.len),
            (None, AxisOrder::ChannelsLast, TargetKind::Numbers) => {
                TestSplit::Missing("the arrays `test_images` and `test_targets`")
            }
            (None, AxisOrder::ChannelsLast, _) => {
                TestSplit::Missing("the arrays `test_images` and `test_labels`")
            }
            (None, AxisOrder::ChannelsFirst, TargetKind::Numbers) => {
                TestSplit::Missing("the arrays `test_inputs` and `test_targets`")
            }
            (None, AxisOrder::ChannelsFirst, _) => {
                TestSplit::Missing("the arrays `test_inputs` and `test_labels`")
            }
        };
        let ArrayForm { len, kind, shape, stored, .. } = train;
        let folds = array_folds::read(&*file, &unread, len)?;
        let unread = unread.into_iter().filter(|name| name != FOLDS).collect();
        let one_hot = targets.is_one_hot().then_some(targets.width);
        let ArrayTargets { kind: targets, splits, standardization, .. } = targets;
        let layout =
            Layout { kind, shape, stored, targets, classes, standardization, train: len, test };
        let reported = Once::new();
        Ok(Self { file, samples, layout, targets: splits, folds, one_hot, unread, reported })
    }

    /// Notes about the file, once.
    fn report(&self) {
        self.reported.call_once(|| {
            if !self.unread.is_empty() {
                let names = notes::some_of(self.unread.iter().cloned());
                notes::say(&format!(
                    "only the arrays of train and test are read; ignored: {names}"
                ));
            }
            if let Some(labels) = self.one_hot {
                notes::say(&format!(
                    "every sample of `train_labels` has exactly one label: they are trained as \
                     {labels} labels; for one class for each sample, store y.argmax(axis=1)"
                ));
            }
        });
    }
}

/// Names of the classes: those in the file, or the numbers from 0 to the largest training label.
///
/// # Errors
/// [`Error::Layout`] for a class without a name, or a test label above all training labels.
fn name_classes(
    file: &dyn ArrayFile,
    names: [&'static str; 2],
    targets: &ArrayTargets,
    named: Option<Vec<String>>,
) -> Result<Vec<String>> {
    let labels = targets.splits.each_ref().map(|split| match split {
        StoredTargets::Classes(labels) => &labels[..],
        StoredTargets::Values { .. } => &[],
    });
    let used = labels[0].iter().max().map_or(0, |max| max + 1);
    let classes = named.as_ref().map_or(used, |names| names.len() as u32);
    // Without training samples there are no classes; that is not an error of the test labels.
    let beyond = |label: &u32| !labels[0].is_empty() && *label >= classes;
    for (name, labels) in names.into_iter().zip(labels) {
        let Some(place) = labels.iter().position(beyond) else { continue };
        file.visit(name, &mut |_, input| {
            let what = format!("label {place} of `{name}`");
            let (limit, remedy) = match named {
                Some(_) => ("the number of names in `classes`", "name its class in `classes`"),
                None => ("as in training", "add training samples of its class"),
            };
            let expected = format!("below {classes}, {limit}");
            Err(Mismatch::new(what, expected, labels[place].to_string())
                .remedy(format!("leave the sample out, or {remedy}"))
                .in_layout(input.path()))
        })?;
    }
    Ok(named.unwrap_or_else(|| (0..classes).map(|c| c.to_string()).collect()))
}

/// Names of labels or numbers: those in the file, or their numbers.
///
/// # Errors
/// [`Error::Layout`] for more or fewer names than columns.
fn name_outputs(
    path: &Path,
    names: [&'static str; 2],
    &ArrayTargets { kind, width, .. }: &ArrayTargets,
    named: Option<Vec<String>>,
) -> Result<Vec<String>> {
    let named = named.unwrap_or_else(|| (0..width).map(|column| column.to_string()).collect());
    if named.len() == width {
        return Ok(named);
    }
    let expected = format!("the names of {width} {kind}, the columns of `{}`", names[0]);
    Err(Mismatch::new(format!("`{CLASSES}`"), expected, named.len().to_string())
        .remedy("name every column, or leave the names out")
        .in_layout(path))
}

/// Checks that no two classes, labels or numbers have one name.
fn check_names(path: &Path, names: &[String]) -> Result<()> {
    let mut seen = HashSet::new();
    let Some(place) = names.iter().position(|name| !seen.insert(name)) else { return Ok(()) };
    let (what, got) = (format!("name {place} of `{CLASSES}`"), format!("{:?} again", names[place]));
    Err(Mismatch::new(what, "another name for each class or column", got)
        .remedy("rename one of them")
        .in_layout(path))
}

/// The arrays that a file has for its samples; the arrays of images for a file without samples.
fn sample_arrays(path: &Path, names: &[String]) -> Result<SampleArrays> {
    let has = |name: &str| names.iter().any(|other| other == name);
    let [images, inputs] = SAMPLES;
    match SAMPLES.map(|arrays| arrays.names.into_iter().find(|name| has(name))) {
        [Some(image), Some(input)] => {
            let got = format!("`{image}` and `{input}`");
            Err(Mismatch::new("the samples", "in one pair of arrays", got)
                .remedy("keep the images, or the inputs")
                .in_layout(path))
        }
        [None, Some(_)] => Ok(inputs),
        _ => Ok(images),
    }
}

impl Reader for ArraysReader {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn folds(&self) -> Option<&Arc<[Fold]>> {
        self.folds.as_ref()
    }

    fn read(&self, split: Split, _on_bad: OnBad<'_>, sink: Sink<'_>) -> Result<()> {
        self.report();
        let targets = &self.targets[split as usize];
        let name = self.samples.names[split as usize];
        self.file.visit(name, &mut |header, input| {
            let mut form = ArrayForm::of(name, self.samples.order, header, input)?;
            let Layout { shape, stored, .. } = self.layout;
            let as_before = form.stored == stored || form.stored.of_inputs() == stored;
            if (form.len, form.shape) != (targets.len(), shape) || !as_before {
                let got = form.to_string();
                return Err(damaged(input.path(), 0, "the shape", "the same as before", got));
            }
            form.stored = stored;
            let mut samples = form.reader(name, self.layout.chunk_samples().min(targets.len()));
            for targets in targets.chunks(self.layout.chunk_samples()) {
                sink(samples.next(targets.len(), input)?, targets)?;
            }
            input.expect_end()
        })
    }
}

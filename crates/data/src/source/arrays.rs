//! A dataset in named arrays.
//!
//! Samples are `train_images` and `test_images`, [N, H, W] (grey) or [N, H, W, C] with C from 1 to
//! 4; or `train_inputs` and `test_inputs`: vectors [N, F], signals [N, C, L], images [N, C, H, W].
//! Unsigned bytes stay bytes, of the value b / 255; other numbers become f32. `train_labels` and
//! `test_labels` are integers of any width, [N]. The classes have the names in `classes`; without
//! them they are 0 to the largest training label, named by their number. A file without test arrays
//! has no test split.

use std::collections::HashSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Once;

use super::array_file::{ArrayFile, CLASSES, CLASSES_MAX, Npz, SafeTensors};
use super::array_samples::{ArrayForm, AxisOrder};
use super::identity::WatchedFiles;
use super::input::{self, Input};
use super::npy::{ElementType, NpyHeader};
use super::{CHUNK_BYTES, Layout, OnBad, Reader, Sink, Source, Split, TestSplit, missing};
use crate::error::{Error, Mismatch, Result, damaged};
use crate::notes;

/// Arrays of labels, train then test.
const LABELS: [&str; 2] = ["train_labels", "test_labels"];

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

/// Arrays of the samples of a split.
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
    labels: [Vec<u32>; 2],
    /// Names of arrays that are not read.
    unread: Vec<String>,
    /// Whether the unread arrays have been reported.
    reported: Once,
}

impl ArraysReader {
    fn open(path: &Path, file: Box<dyn ArrayFile>) -> Result<Self> {
        let mut labels = [vec![], vec![]];
        let names = file.names()?;
        let samples = sample_arrays(path, &names)?;
        let named = file.class_names()?;
        check_names(path, named.as_deref().unwrap_or_default())?;
        let names = names.into_iter().filter(|name| named.is_none() || name != CLASSES);
        let known = |name: &String| samples.names.iter().chain(&LABELS).any(|known| known == name);
        let (split_arrays, unread): (Vec<String>, _) = names.partition(known);
        let has_test =
            split_arrays.iter().any(|name| name == samples.names[1] || name == LABELS[1]);
        let mut forms = vec![];
        for split in if has_test { 0..2 } else { 0..1 } {
            let name = samples.names[split];
            file.visit(name, &mut |header, input| {
                forms.push(ArrayForm::of(name, samples.order, header, input)?);
                Ok(())
            })?;
            let (len, labels) = (forms[split].len, &mut labels[split]);
            file.visit(LABELS[split], &mut |header, input| {
                *labels = read_labels(LABELS[split], header, input, len)?;
                Ok(())
            })?;
        }
        let used = labels[0].iter().max().map_or(0, |max| max + 1);
        let classes = named.as_ref().map_or(used, |names| names.len() as u32);
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
        // Without training samples there are no classes; that is not an error of the test labels.
        let beyond = |label: &u32| train.len > 0 && *label >= classes;
        for (name, labels) in LABELS.into_iter().zip(&labels) {
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
        let classes = named.unwrap_or_else(|| (0..classes).map(|c| c.to_string()).collect());
        let test = match (forms.get(1), samples.order) {
            (Some(test), _) => TestSplit::Images(test.len),
            (None, AxisOrder::ChannelsLast) => {
                TestSplit::Missing("the arrays `test_images` and `test_labels`")
            }
            (None, AxisOrder::ChannelsFirst) => {
                TestSplit::Missing("the arrays `test_inputs` and `test_labels`")
            }
        };
        let ArrayForm { len, kind, shape, stored, .. } = train;
        let layout = Layout { kind, shape, stored, classes, train: len, test };
        Ok(Self { file, samples, layout, labels, unread, reported: Once::new() })
    }
}

/// Checks that no two classes have one name.
fn check_names(path: &Path, names: &[String]) -> Result<()> {
    let mut seen = HashSet::new();
    let Some(place) = names.iter().position(|name| !seen.insert(name)) else { return Ok(()) };
    let (what, got) = (format!("name {place} of `{CLASSES}`"), format!("{:?} again", names[place]));
    Err(Mismatch::new(what, "another name for each class", got)
        .remedy("rename one of the classes")
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

    fn read(&self, split: Split, _on_bad: OnBad<'_>, sink: Sink<'_>) -> Result<()> {
        self.reported.call_once(|| {
            if !self.unread.is_empty() {
                let names = notes::some_of(self.unread.iter().cloned());
                notes::say(&format!("only arrays of train and test are read, and not {names}"));
            }
        });
        let labels = &self.labels[split as usize];
        let name = self.samples.names[split as usize];
        self.file.visit(name, &mut |header, input| {
            let form = ArrayForm::of(name, self.samples.order, header, input)?;
            let Layout { shape, stored, .. } = self.layout;
            if (form.len, form.shape, form.stored) != (labels.len(), shape, stored) {
                let got = form.to_string();
                return Err(damaged(input.path(), 0, "the shape", "the same as before", got));
            }
            let mut samples = form.reader(name, self.layout.chunk_samples().min(labels.len()));
            for labels in labels.chunks(self.layout.chunk_samples()) {
                sink(samples.next(labels.len(), input)?, labels)?;
            }
            input.expect_end()
        })
    }
}

fn read_labels(
    name: &str,
    header: &NpyHeader,
    input: &mut Input<'_>,
    samples: usize,
) -> Result<Vec<u32>> {
    let wrong = |what: String, expected: String, got: String, remedy: &str, input: &Input<'_>| {
        Err(Mismatch::new(what, expected, got).remedy(remedy).in_layout(input.path()))
    };
    let int = match (&header.element, &header.shape[..]) {
        (&ElementType::Int(int), shape) if shape == [samples] => int,
        (element, shape) => {
            let remedy = match (element, shape) {
                (ElementType::Text(_), _) => {
                    "number the classes: classes, train_labels = numpy.unique(y, \
                     return_inverse=True); the file may have `classes`, too"
                }
                (ElementType::Float(_) | ElementType::Other(_), _) => {
                    "make them integers, such as with y.astype('i8')"
                }
                (_, [n, 1] | [1, n]) if *n == samples => {
                    "bring them to that shape with y.reshape(-1)"
                }
                (_, [n, _]) if *n == samples => "make one label of each row with y.argmax(axis=1)",
                _ => "give each sample one label",
            };
            let expected = format!("integers [{samples}], one for each sample");
            return wrong(format!("`{name}`"), expected, header.to_string(), remedy, input);
        }
    };
    let mut labels = vec![];
    let mut piece = vec![0; CHUNK_BYTES.min(samples * int.bytes)];
    while labels.len() < samples {
        let count = (samples - labels.len()).min(piece.len() / int.bytes);
        let piece = &mut piece[..count * int.bytes];
        input.read_exact(piece, "labels")?;
        for value in piece.chunks_exact(int.bytes).map(|element| int.value(element)) {
            match u32::try_from(value).ok().filter(|label| *label < CLASSES_MAX) {
                Some(label) => labels.push(label),
                None => {
                    let what = format!("label {} of `{name}`", labels.len());
                    let expected = format!("from 0 to {}", CLASSES_MAX - 1);
                    let remedy = "number the classes from 0, and leave out samples without one";
                    return wrong(what, expected, format!("{value} ({int})"), remedy, input);
                }
            }
        }
    }
    input.expect_end()?;
    Ok(labels)
}

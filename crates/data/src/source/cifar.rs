//! The binary version of CIFAR (A. Krizhevsky): records of label bytes, then 32×32 pixels as a red,
//! a green and a blue plane. CIFAR-10 has one label byte; CIFAR-100 a coarse, then a fine one.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::identity::WatchedFiles;
use super::input::{self, Input, read_small};
use super::{Layout, OnBad, Reader, Sink, Source, Split, TestSplit, missing_files};
use crate::error::{Error, Mismatch, Result, damaged};
use crate::targets::TargetChunk;

/// Rows and columns.
pub(crate) const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;
/// Bytes of one image.
pub(crate) const IMAGE: usize = 3 * PLANE;

/// Differences between the two datasets.
struct Variant {
    source: Source,
    /// The folder in the official archive.
    folder: &'static str,
    /// File names, train then test.
    files: [&'static [&'static str]; 2],
    /// The file with one class name per line.
    names_file: &'static str,
    /// Default class names if `names_file` is missing, one per word.
    names: &'static str,
    /// Number of values of each label byte; the last byte is the label.
    label_values: &'static [u8],
    /// Records in each file of the published set, train then test.
    published: [usize; 2],
}

/// File names of CIFAR-10, train then test.
pub(crate) const CIFAR_10_FILES: [&[&str]; 2] = [
    &[
        "data_batch_1.bin",
        "data_batch_2.bin",
        "data_batch_3.bin",
        "data_batch_4.bin",
        "data_batch_5.bin",
    ],
    &["test_batch.bin"],
];
/// The folder in CIFAR-10's archive.
pub(crate) const CIFAR_10_FOLDER: &str = "cifar-10-batches-bin";
/// The file with one class name per line.
pub(crate) const CIFAR_10_NAMES: &str = "batches.meta.txt";
/// The file with the number of records of each file, `NAME COUNT` per line; an import writes it.
pub(crate) const RECORDS: &str = "records.txt";

const CIFAR_10: Variant = Variant {
    source: Source::Cifar10,
    folder: CIFAR_10_FOLDER,
    files: CIFAR_10_FILES,
    names_file: CIFAR_10_NAMES,
    names: "airplane automobile bird cat deer dog frog horse ship truck",
    label_values: &[10],
    published: [10_000, 10_000],
};

const CIFAR_100: Variant = Variant {
    source: Source::Cifar100,
    folder: "cifar-100-binary",
    files: [&["train.bin"], &["test.bin"]],
    names_file: "fine_label_names.txt",
    names: "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus \
            butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach \
            couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster \
            house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree \
            motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear \
            pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road \
            rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel \
            streetcar sunflower sweet_pepper table tank telephone television tiger tractor train \
            trout tulip turtle wardrobe whale willow_tree wolf woman worm",
    label_values: &[20, 100],
    published: [50_000, 10_000],
};

/// A CIFAR-10 or CIFAR-100 dataset.
pub(crate) struct Cifar {
    variant: &'static Variant,
    layout: Layout,
    files: [Vec<PathBuf>; 2],
}

impl Cifar {
    /// Opens CIFAR-10 in `root`, or in the folder of the official archive below it.
    pub(crate) fn open_10(root: &Path, watch: &WatchedFiles) -> Result<Self> {
        Self::open(root, &CIFAR_10, watch)
    }

    /// Opens CIFAR-100 in `root`, or in the folder of the official archive below it.
    pub(crate) fn open_100(root: &Path, watch: &WatchedFiles) -> Result<Self> {
        Self::open(root, &CIFAR_100, watch)
    }

    fn open(root: &Path, variant: &'static Variant, watch: &WatchedFiles) -> Result<Self> {
        let nested = root.join(variant.folder);
        let folder = if nested.is_dir() { nested.as_path() } else { root };
        let files = variant.files.map(|names| names.iter().map(|name| folder.join(name)).collect());
        let files: [Vec<PathBuf>; 2] = files;
        let absent: Vec<String> = files
            .iter()
            .flatten()
            .filter(|path| !path.is_file())
            .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
            .collect();
        if !absent.is_empty() {
            return Err(missing_files(variant.source, folder, absent));
        }
        let names_path = folder.join(variant.names_file);
        files.iter().flatten().try_for_each(|path| watch.add(path))?;
        [&names_path, &folder.join(RECORDS)].into_iter().try_for_each(|path| watch.add(path))?;
        let classes = if names_path.is_file() {
            read_names(&names_path, variant)?
        } else {
            variant.names.split_whitespace().map(String::from).collect()
        };
        let count = |path: &PathBuf| count_records(path, variant);
        let counts = [0, 1].map(|split: usize| files[split].iter().map(count).collect());
        let [train, test]: [Result<Vec<usize>>; 2] = counts;
        let counts = [train?, test?];
        check_records(folder, variant, &files, &counts)?;
        let [train, test] = counts.map(|counts| counts.iter().sum());
        let test = TestSplit::Samples(test);
        let layout = Layout::of_images([3, SIDE, SIDE], classes, train, test);
        Ok(Self { variant, layout, files })
    }

    fn read_file(&self, path: &Path, on_bad: OnBad<'_>, sink: Sink<'_>) -> Result<()> {
        let record = self.variant.record();
        let label_bytes = self.variant.label_values.len();
        let mut input = Input::open_plain(path)?;
        let mut left = count_records(path, self.variant)?;
        let chunk = self.layout.chunk_samples().min(left);
        let mut records = vec![0; chunk * record];
        let mut images = vec![0; chunk * IMAGE];
        let mut labels = Vec::with_capacity(chunk);
        while left > 0 {
            let count = chunk.min(left);
            left -= count;
            let start = input.offset();
            let records = &mut records[..count * record];
            input.read_exact(records, "records")?;
            labels.clear();
            for (i, record_bytes) in records.chunks_exact(record).enumerate() {
                let (label, planes) = record_bytes.split_at(label_bytes);
                match self.label(path, start + (i * record) as u64, label) {
                    Ok(label) => {
                        interleave(planes, &mut images[labels.len() * IMAGE..][..IMAGE]);
                        labels.push(label);
                    }
                    Err(error) => on_bad(error)?,
                }
            }
            sink(&images[..labels.len() * IMAGE], TargetChunk::Classes(&labels))?;
        }
        input.expect_end()
    }

    fn label(&self, path: &Path, offset: u64, bytes: &[u8]) -> Result<u32> {
        for (i, (byte, values)) in bytes.iter().zip(self.variant.label_values).enumerate() {
            if byte >= values {
                let (offset, expected) = (offset + i as u64, format!("below {values}"));
                let remedy = "download or copy the file again, or skip the record with `skip_bad` \
                              (--skip-bad)";
                let mismatch = Mismatch::new("a label", expected, byte.to_string());
                return Err(mismatch.remedy(remedy).at(path, offset));
            }
        }
        Ok(bytes.last().map_or(0, |label| u32::from(*label)))
    }
}

impl Variant {
    /// Bytes of one record.
    fn record(&self) -> usize {
        self.label_values.len() + IMAGE
    }

    fn classes(&self) -> usize {
        self.label_values.last().map_or(0, |values| usize::from(*values))
    }
}

impl Reader for Cifar {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, split: Split, on_bad: OnBad<'_>, sink: Sink<'_>) -> Result<()> {
        self.files[split as usize].iter().try_for_each(|path| self.read_file(path, on_bad, sink))
    }
}

/// The number of records of a file; a partial record is an error.
fn count_records(path: &Path, variant: &Variant) -> Result<usize> {
    let len = fs::metadata(path).map_err(Error::io("read", path))?.len();
    let record = variant.record() as u64;
    if len.is_multiple_of(record) {
        return Ok((len / record) as usize);
    }
    input::open_file(path)?;
    let whole = len / record;
    let expected = format!("a multiple of {record} bytes, the size of a record");
    let got = format!("{len} bytes: {whole} records and {} bytes", len % record);
    Err(Mismatch::new("the length of the file", expected, got)
        .remedy("it is truncated or has another format; download or copy it again")
        .at(path, len))
}

/// Checks the number of records in each file, because an interrupted copy may end between two
/// records. The file [`RECORDS`] lists the expected numbers. Without this file they are the numbers
/// of the published set, if at least one file has its number; other sets are not checked.
fn check_records(
    folder: &Path,
    variant: &Variant,
    files: &[Vec<PathBuf>; 2],
    counts: &[Vec<usize>; 2],
) -> Result<()> {
    let listed = read_records(&folder.join(RECORDS))?;
    let is_published = listed.is_none()
        && counts.iter().zip(variant.published).any(|(counts, n)| counts.contains(&n));
    for (split, (files, counts)) in files.iter().zip(counts).enumerate() {
        for (path, &got) in files.iter().zip(counts) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let (expected, by) = match &listed {
                Some(listed) => (listed.get(&*name).copied(), RECORDS),
                None => (is_published.then_some(variant.published[split]), "the published set"),
            };
            if expected.is_some_and(|expected| expected != got) {
                let offset = (got * variant.record()) as u64;
                let expected = format!("{} as in {by}", expected.unwrap_or_default());
                let what = "the number of records";
                return Err(Mismatch::new(what, expected, got.to_string())
                    .remedy("the copy may have been interrupted; download or copy the file again")
                    .at(path, offset));
            }
        }
    }
    Ok(())
}

/// Records of each file by its name; `None` without a list.
fn read_records(path: &Path) -> Result<Option<HashMap<String, usize>>> {
    if !path.is_file() {
        return Ok(None);
    }
    let bytes = read_small(path)?;
    let text = String::from_utf8_lossy(&bytes);
    let line = |line: &str| {
        let entry = line.split_once(' ').and_then(|(name, n)| Some((name.into(), n.parse().ok()?)));
        let line: String = line.chars().take(80).collect();
        entry.ok_or_else(|| damaged(path, 0, "a line", "`NAME COUNT`", format!("`{line}`")))
    };
    text.lines().filter(|text| !text.trim().is_empty()).map(line).collect::<Result<_>>().map(Some)
}

/// Reads one class name per line; the official files end in empty lines.
fn read_names(path: &Path, variant: &Variant) -> Result<Vec<String>> {
    let bytes = read_small(path)?;
    let text = std::str::from_utf8(&bytes).map_err(|error| {
        let offset = error.valid_up_to() as u64;
        damaged(path, offset, "the class names", "UTF-8 text", "other bytes")
    })?;
    let names: Vec<String> =
        text.lines().map(str::trim).filter(|line| !line.is_empty()).map(String::from).collect();
    if names.len() == variant.classes() {
        return Ok(names);
    }
    let (expected, got) = (format!("{} names", variant.classes()), format!("{}", names.len()));
    Err(damaged(path, bytes.len() as u64, "the class names", expected, got))
}

/// Converts three planes to NHWC.
fn interleave(planes: &[u8], image: &mut [u8]) {
    let (red, rest) = planes.split_at(PLANE);
    let (green, blue) = rest.split_at(PLANE);
    for (((pixel, r), g), b) in image.chunks_exact_mut(3).zip(red).zip(green).zip(blue) {
        pixel.copy_from_slice(&[*r, *g, *b]);
    }
}

/// Converts NHWC to three planes: the inverse of [`interleave`].
pub(crate) fn planes_of(image: &[u8], planes: &mut [u8]) {
    let (red, rest) = planes.split_at_mut(PLANE);
    let (green, blue) = rest.split_at_mut(PLANE);
    for (((pixel, r), g), b) in image.chunks_exact(3).zip(red).zip(green).zip(blue) {
        (*r, *g, *b) = (pixel[0], pixel[1], pixel[2]);
    }
}

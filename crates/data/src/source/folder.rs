//! A folder of class folders: `train/CLASS/*` and `test/CLASS/*`.
//!
//! Classes are sorted by name, and so are the files of a class; both by the bytes of the name. The
//! order of a split is class by class. Names that begin with a dot are skipped; everything else
//! must be an image. The first training file determines the size of all.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirEntry};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::thread;

use super::image_file::{self, Size};
use super::{Layout, OnBad, Reader, Sink, Source, Split, TestSplit, missing};
use crate::error::{Error, Mismatch, Result};

/// Largest number of decoding threads; more would only wait for the disk.
const DECODE_THREADS_MAX: usize = 16;

/// One class of one split.
struct ClassFolder {
    path: PathBuf,
    label: u32,
    /// File names, sorted.
    files: Vec<OsString>,
}

/// A folder of class folders.
pub(crate) struct Folder {
    layout: Layout,
    size: Size,
    /// The file that determined the size.
    first: PathBuf,
    splits: [Vec<ClassFolder>; 2],
}

impl Folder {
    /// Lists `root` and reads the header of the first training image that has one. Without a folder
    /// `test` there is no test split.
    pub(crate) fn open(root: &Path) -> Result<Self> {
        let [train, test] = Split::ALL.map(|split| root.join(split.name()));
        let has_test = has_entry(&test)?;
        if !train.is_dir() || (has_test && !test.is_dir()) {
            return Err(missing(Source::Folder, root));
        }
        let classes = list(&train)?;
        if classes.is_empty() {
            return Err(missing(Source::Folder, root));
        }
        let test = has_test.then(|| list_split(&test, &classes)).transpose()?;
        let splits = [list_split(&train, &classes)?, test.unwrap_or_default()];
        let (first, size) = first_size(&splits[0])?.ok_or_else(|| missing(Source::Folder, root))?;
        let classes = classes.iter().map(|name| name.to_string_lossy().into_owned()).collect();
        let [train, test] =
            splits.each_ref().map(|split| split.iter().map(|class| class.files.len()).sum());
        let test = match has_test {
            true => TestSplit::Images(test),
            false => TestSplit::Missing("test/CLASS/*.{png,jpg,jpeg}"),
        };
        let Size { channels, height, width } = size;
        let layout = Layout { channels, height, width, classes, train, test };
        Ok(Self { layout, size, first, splits })
    }

    /// The files of a split in order, with their labels.
    pub(crate) fn files(&self, split: Split) -> impl Iterator<Item = (PathBuf, u32)> + '_ {
        self.splits[split as usize]
            .iter()
            .flat_map(|class| class.files.iter().map(|file| (class.path.join(file), class.label)))
    }

    /// Decodes one file to `pixels` (H, W, C).
    pub(crate) fn decode(&self, path: &Path, pixels: &mut [u8]) -> Result<()> {
        image_file::decode(path, self.size, &self.first, pixels)
    }

    /// Decodes `files` in parallel; the result does not depend on the number of threads.
    fn decode_all(&self, files: &[(PathBuf, u32)], pixels: &mut [u8]) -> Vec<Result<()>> {
        let image = self.layout.image_bytes();
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let each = files.len().div_ceil(cores.min(DECODE_THREADS_MAX)).max(1);
        let mut results: Vec<Result<()>> = files.iter().map(|_| Ok(())).collect();
        thread::scope(|scope| {
            let parts = files.chunks(each).zip(results.chunks_mut(each));
            for ((files, results), pixels) in parts.zip(pixels.chunks_mut(each * image)) {
                scope.spawn(move || {
                    let work = files.iter().zip(results).zip(pixels.chunks_exact_mut(image));
                    for (((path, _), result), pixels) in work {
                        *result = self.decode(path, pixels);
                    }
                });
            }
        });
        results
    }
}

impl Reader for Folder {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, split: Split, on_bad: OnBad<'_>, sink: Sink<'_>) -> Result<()> {
        let image = self.layout.image_bytes();
        let chunk = self.layout.chunk_images().min(self.layout.len(split));
        let mut pixels = vec![0; chunk * image];
        let mut files = self.files(split);
        loop {
            let batch: Vec<(PathBuf, u32)> = files.by_ref().take(chunk).collect();
            if batch.is_empty() {
                return Ok(());
            }
            let mut labels = Vec::with_capacity(batch.len());
            let results = self.decode_all(&batch, &mut pixels[..batch.len() * image]);
            for (i, (result, (_, label))) in results.into_iter().zip(&batch).enumerate() {
                match result {
                    Ok(()) => {
                        // Close the gaps that bad files left.
                        pixels.copy_within(i * image..(i + 1) * image, labels.len() * image);
                        labels.push(*label);
                    }
                    Err(error) => on_bad(error)?,
                }
            }
            sink(&pixels[..labels.len() * image], &labels)?;
        }
    }
}

/// Whether anything has this name, a link that leads nowhere included.
fn has_entry(path: &Path) -> Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::io("open", path)(error)),
    }
}

/// The names in a folder, sorted, without those that begin with a dot.
fn list(folder: &Path) -> Result<Vec<OsString>> {
    let name = |entry: std::io::Result<DirEntry>| entry.map(|entry| entry.file_name());
    let mut names = fs::read_dir(folder)
        .and_then(|entries| entries.map(name).collect::<std::io::Result<Vec<_>>>())
        .map_err(Error::io("list", folder))?;
    names.retain(|name| !name.as_encoded_bytes().starts_with(b"."));
    names.sort_unstable();
    Ok(names)
}

fn list_split(split: &Path, classes: &[OsString]) -> Result<Vec<ClassFolder>> {
    let known = |name: &OsStr| classes.iter().position(|class| class == name);
    let listed = list(split)?.into_iter().map(|name| {
        let path = split.join(&name);
        let layout = |what: &str, expected: String, got: &str, remedy: &str| {
            Mismatch::new(what, expected, got).remedy(remedy).of(&path)
        };
        if !path.is_dir() {
            let (expected, remedy) =
                ("a class folder".into(), "move it into the folder of its class");
            return Err(layout("every entry", expected, "a file", remedy));
        }
        let label = known(&name).ok_or_else(|| {
            let names: Vec<_> = classes.iter().map(|name| name.to_string_lossy()).collect();
            let expected = format!("one of the training classes {}", names.join(", "));
            let remedy = "give it the training class's name, or add training images";
            layout("the class folder", expected, "a class without training images", remedy)
        })? as u32;
        let files = list(&path)?;
        if files.is_empty() {
            let remedy = "add images or remove the folder";
            return Err(layout("the class folder", "at least one image".into(), "none", remedy));
        }
        Ok(ClassFolder { path, label, files })
    });
    listed.collect()
}

/// Size of the first file whose header can be read; damaged ones before it are reported when the
/// split is read. If there is none, the first one's error.
fn first_size(train: &[ClassFolder]) -> Result<Option<(PathBuf, Size)>> {
    let mut first_error = None;
    for class in train {
        for file in &class.files {
            let path = class.path.join(file);
            match image_file::probe(&path) {
                Ok(size) => return Ok(Some((path, size))),
                Err(error) => first_error.get_or_insert(error),
            };
        }
    }
    first_error.map_or(Ok(None), Err)
}

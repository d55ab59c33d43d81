//! Conversion of a folder of class folders to the binary layout of CIFAR-10: `meristem data
//! import`.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use tempfile::TempDir;

use crate::error::{Error, Mismatch, Result};
use crate::path_text;
use crate::shape::SampleShape;
use crate::source::cifar::{
    CIFAR_10_FILES, CIFAR_10_FOLDER, CIFAR_10_NAMES, IMAGE, RECORDS, SIDE, planes_of,
};
use crate::source::identity::WatchedFiles;
use crate::source::images::ImageFiles;
use crate::source::listing::ImageFile;
use crate::source::{DatasetSpec, Layout, Reader, Source, Split, TestSplit, canonical_root};

/// Result of an import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ImportReport {
    /// The folder with the binary files: a `data_root` of [`Source::Cifar10`].
    #[serde(serialize_with = "path_text::serialize")]
    pub folder: PathBuf,
    /// Whether the path is not UTF-8, so that `folder` in JSON is not exactly the path.
    #[serde(skip_serializing_if = "path_text::is_exact")]
    pub path_is_lossy: bool,
    /// Training images written.
    pub train_len: usize,
    /// Test images written.
    pub test_len: usize,
    /// Damaged files left out under `skip_bad`.
    pub skipped: usize,
}

/// Converts the class folders in `from` (`train/CLASS/*`, `test/CLASS/*`; 32×32, ten classes, at
/// least one training image in colour) to `to/cifar-10-batches-bin`: `data_batch_1.bin` to `_5`,
/// `test_batch.bin` and `batches.meta.txt`, and `records.txt` with the number of records of each.
/// Labels are the classes sorted by name.
///
/// Images are dealt round-robin over the classes — the first of each class, the second of each, … —
/// so that every file has every class. The training images are cut into five files as equal as
/// possible, the first ones longer. With `skip_bad` undecodable files are left out.
///
/// The files are written to a temporary folder beside the target. At the end this folder is renamed
/// to the target, so that an interrupted import leaves no partial result.
///
/// # Errors
/// [`Error::Layout`] if the images are not 32×32 or all training images are grey, the classes are
/// not ten, the name of a class is not one line of text, there is no test split, or the target
/// exists; [`Error::Damaged`] without `skip_bad`; [`Error::Missing`]; [`Error::Changed`];
/// [`Error::Io`] if reading or writing fails.
pub fn import_cifar10(from: &Path, to: &Path, skip_bad: bool) -> Result<ImportReport> {
    let root = Some(from.to_path_buf());
    let spec = DatasetSpec { root, skip_bad, ..DatasetSpec::new(Source::Folder) };
    let root = canonical_root(&spec)?.unwrap_or_default();
    let watch = WatchedFiles::default();
    let folder = watch.unless_changed(ImageFiles::open(&spec, &root, &watch))?;
    check(&root, folder.layout())?;
    let target = to.join(CIFAR_10_FOLDER);
    if target.exists() {
        let expected = "a folder that does not exist yet";
        return Err(Mismatch::new("the target", expected, "an existing one")
            .remedy("remove it or choose another")
            .in_layout(&target));
    }
    let partial = partial_folder(to)?;
    let written = watch.unless_changed(write_all(&folder, partial.path(), skip_bad));
    let ([train_len, test_len], skipped) = written?;
    fs::rename(partial.path(), &target).map_err(Error::io("create", &target))?;
    let _ = partial.keep();
    let path_is_lossy = path_text::is_lossy(&target);
    Ok(ImportReport { folder: target, path_is_lossy, train_len, test_len, skipped })
}

/// Creates `to`, and a temporary folder in it, which is removed when the value is dropped. Its name
/// is random, so that nobody can put a link to another place under that name beforehand.
fn partial_folder(to: &Path) -> Result<TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".import-").suffix(".part");
    let made = fs::create_dir_all(to).and_then(|()| builder.tempdir_in(to));
    made.map_err(Error::io("create", to))
}

fn check(root: &Path, layout: &Layout) -> Result<()> {
    let wrong = |what: &str, expected: &str, got: String, remedy: &str| {
        Err(Mismatch::new(what, expected, got).remedy(remedy).in_layout(root))
    };
    let SampleShape { channels, height, width } = layout.shape;
    let classes = &layout.classes;
    if (channels, height, width) != (3, SIDE, SIDE) {
        let got = format!("{width}×{height} with {channels} channels");
        let remedy = "CIFAR-10 has no other shape; read these images with `--dataset folder`";
        return wrong("the images", "32×32 RGB", got, remedy);
    }
    if classes.len() != 10 {
        let got = format!("{}: {}", classes.len(), classes.join(", "));
        let remedy = "CIFAR-10 has 10 classes; read these images with `--dataset folder`";
        return wrong("the number of class folders in train", "10", got, remedy);
    }
    // Names are written as lines, and read without surrounding white space.
    let is_line = |name: &&String| !name.contains(char::is_control) && name.trim() == *name;
    if let Some(name) = classes.iter().find(|name| !is_line(name)) {
        let expected = "one line of text without space around it";
        let remedy = "rename the folder: CIFAR-10 has its class names in a text file";
        return wrong("the name of a class folder", expected, format!("{name:?}"), remedy);
    }
    if let TestSplit::Missing(expected) = layout.test {
        let remedy = "put some images aside for it: the layout has a file of test images";
        return wrong("the test split", expected, "none".into(), remedy);
    }
    Ok(())
}

/// Writes both splits and the names. Returns the number of images of each split, and the number of
/// files left out.
fn write_all(folder: &ImageFiles, target: &Path, skip_bad: bool) -> Result<([usize; 2], usize)> {
    let mut lens = [0; 2];
    let mut skipped = 0;
    let mut records = String::new();
    for split in Split::ALL {
        let files = round_robin(folder.files(split), folder.layout().classes.len());
        let names = CIFAR_10_FILES[split as usize];
        let (each, longer) = (files.len() / names.len(), files.len() % names.len());
        let mut files = files.into_iter();
        for (i, name) in names.iter().enumerate() {
            let batch = files.by_ref().take(each + usize::from(i < longer));
            let on_bad =
                |error: Error| if skip_bad && error.is_damage() { Ok(()) } else { Err(error) };
            let (written, bad) = write_batch(folder, &target.join(name), batch, on_bad)?;
            lens[split as usize] += written;
            records += &format!("{name} {written}\n");
            skipped += bad;
        }
    }
    let names = target.join(CIFAR_10_NAMES);
    let text = folder.layout().classes.join("\n") + "\n";
    fs::write(&names, text).map_err(Error::io("write", &names))?;
    let counts = target.join(RECORDS);
    fs::write(&counts, records).map_err(Error::io("write", &counts))?;
    Ok((lens, skipped))
}

/// Writes one file of records; returns the numbers of images written and left out.
fn write_batch<'a>(
    folder: &ImageFiles,
    path: &Path,
    files: impl Iterator<Item = &'a ImageFile>,
    on_bad: impl Fn(Error) -> Result<()>,
) -> Result<(usize, usize)> {
    let failed = || Error::io("write", path);
    let mut out = BufWriter::new(File::create(path).map_err(failed())?);
    let (mut written, mut bad) = (0, 0);
    let mut image = vec![0; IMAGE];
    let mut planes = vec![0; IMAGE];
    for file in files {
        if let Err(error) = folder.decode(&file.path, &mut image) {
            on_bad(error)?;
            bad += 1;
            continue;
        }
        planes_of(&image, &mut planes);
        out.write_all(&[file.label as u8]).map_err(failed())?;
        out.write_all(&planes).map_err(failed())?;
        written += 1;
    }
    out.flush().map_err(failed())?;
    out.get_ref().sync_all().map_err(failed())?;
    Ok((written, bad))
}

/// The files in round-robin order: the first of each class, then the second of each, ….
fn round_robin(files: &[ImageFile], classes: usize) -> Vec<&ImageFile> {
    let mut seen = vec![0_usize; classes];
    let rank = |file| {
        let &ImageFile { label, .. } = file;
        let rank = &mut seen[label as usize];
        *rank += 1;
        (*rank, label, file)
    };
    let mut ranked: Vec<(usize, u32, &ImageFile)> = files.iter().map(rank).collect();
    ranked.sort_by_key(|(rank, label, _)| (*rank, *label));
    ranked.into_iter().map(|(_, _, file)| file).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A link that is planted in advance would have to guess the name.
    #[test]
    fn every_partial_folder_has_another_name() {
        let to = tempfile::tempdir().unwrap();
        let name = || partial_folder(to.path()).unwrap().path().to_path_buf();
        let names: BTreeSet<PathBuf> = (0..8).map(|_| name()).collect();
        assert_eq!(names.len(), 8, "{names:?}");
        assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0, "each is removed");
    }
}

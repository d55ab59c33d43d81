//! Class folders: `train/CLASS/*` and `test/CLASS/*`.
//!
//! Classes are sorted by name, and so are the files of a folder; both by the bytes of the name. The
//! order of a split is class by class; in a class, the files of a folder come before the files of
//! its subfolders, which belong to the class as well. Names that begin with a dot are skipped.
//! Files that are no images are left out and reported.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use super::identity::WatchedFiles;
use super::listing::{ImageFile, Listing, is_image, names_in};
use super::{Source, Split, missing};
use crate::error::{Error, Mismatch, Result};

/// Levels of folders in a class folder; a deeper path is a cyclic link.
const DEPTH_MAX: usize = 16;

/// Lists `root`. Without a folder `test` there is no test split.
pub(super) fn list(root: &Path, watch: &WatchedFiles) -> Result<Listing> {
    if !root.is_dir() {
        return Err(missing(Source::Folder, root));
    }
    let [train, test] = Split::ALL.map(|split| root.join(split.name()));
    // Folders change when names are added to them or removed.
    [&train, &test].into_iter().try_for_each(|folder| watch.add(folder))?;
    let has_test = has_entry(&test)?;
    if !train.is_dir() || (has_test && !test.is_dir()) {
        return Err(missing(Source::Folder, root));
    }
    let mut listing = Listing::default();
    let mut classes = names_in(&train)?;
    classes.retain(|name| train.join(name).is_dir());
    if classes.is_empty() {
        return Err(missing(Source::Folder, root));
    }
    let mut found = FoundFiles { files: vec![], stray: vec![], watch };
    listing.train = list_split(&train, &classes, &mut found)?;
    listing.test = has_test.then(|| list_split(&test, &classes, &mut found)).transpose()?;
    listing.stray = found.stray;
    let mut beside: Vec<PathBuf> = names_in(root)?.iter().map(|name| root.join(name)).collect();
    beside.retain(|path| path != &train && path != &test && path.is_dir());
    listing.beside = beside;
    listing.classes = classes.iter().map(|name| name.to_string_lossy().into_owned()).collect();
    Ok(listing)
}

/// Whether the path has an entry, including a dangling link.
fn has_entry(path: &Path) -> Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::io("open", path)(error)),
    }
}

/// Files found in a split.
struct FoundFiles<'a> {
    files: Vec<ImageFile>,
    /// Files of both splits that are no images.
    stray: Vec<PathBuf>,
    watch: &'a WatchedFiles,
}

fn list_split(
    split: &Path,
    classes: &[OsString],
    found: &mut FoundFiles<'_>,
) -> Result<Vec<ImageFile>> {
    let known = |name: &OsStr| classes.iter().position(|class| class == name);
    for name in names_in(split)? {
        let path = split.join(&name);
        let wrong = |what: &str, expected: &str, got: &str, remedy: &str| {
            Err(Mismatch::new(what, expected, got).remedy(remedy).in_layout(&path))
        };
        if !path.is_dir() {
            if is_image(&path)? {
                let remedy = "move it into the folder of its class";
                return wrong("an image", "in a class folder", "one beside them", remedy);
            }
            found.stray.push(path);
            continue;
        }
        let Some(label) = known(&name) else {
            let names: Vec<_> = classes.iter().map(|name| name.to_string_lossy()).collect();
            let expected = format!("one of the training classes {}", names.join(", "));
            let remedy = "give it the training class's name, or add training images";
            return wrong("the class folder", &expected, "a class without training images", remedy);
        };
        let before = found.files.len();
        list_class(&path, label as u32, 0, found)?;
        if found.files.len() == before {
            let remedy = "add images or remove the folder";
            return wrong("the class folder", "at least one image", "none", remedy);
        }
    }
    Ok(std::mem::take(&mut found.files))
}

/// Adds the images in `folder` and in the folders below to `found`, and other files to the strays.
fn list_class(folder: &Path, label: u32, depth: usize, found: &mut FoundFiles<'_>) -> Result<()> {
    if depth > DEPTH_MAX {
        let expected = format!("at most {DEPTH_MAX} folders deep");
        return Err(Mismatch::new("the class folder", expected, "more")
            .remedy("remove the link that leads back, or the innermost folders")
            .in_layout(folder));
    }
    found.watch.add(folder)?;
    let paths = names_in(folder)?.into_iter().map(|name| folder.join(name));
    let (folders, files): (Vec<_>, Vec<_>) = paths.partition(|path| path.is_dir());
    for path in files {
        if is_image(&path)? {
            found.files.push(ImageFile { path, label, line: None })
        } else {
            found.stray.push(path)
        }
    }
    folders.iter().try_for_each(|folder| list_class(folder, label, depth + 1, found))
}

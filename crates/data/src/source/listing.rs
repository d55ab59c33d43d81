//! Image files and their labels, as class folders or a CSV file list them.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Extensions of image files; a file with another extension is an image if its first bytes are
/// those of PNG or JPEG.
const EXTENSIONS: [&str; 3] = ["png", "jpg", "jpeg"];
/// First bytes of PNG and JPEG files.
const MAGICS: [&[u8]; 2] = [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"];

/// An image file of a split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImageFile {
    pub(crate) path: PathBuf,
    pub(crate) label: u32,
    /// Line of the CSV file that names the image, from 1; `None` in a class folder.
    pub(crate) line: Option<u64>,
}

/// The image files of a dataset, in order.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    pub(crate) classes: Vec<String>,
    pub(crate) train: Vec<ImageFile>,
    /// `None` without a test split.
    pub(crate) test: Option<Vec<ImageFile>>,
    /// Files that are left out because they are no images.
    pub(crate) stray: Vec<PathBuf>,
    /// Folders next to the folders of the splits, which are not read.
    pub(crate) beside: Vec<PathBuf>,
}

/// Whether a file is an image, by its extension or by its first bytes.
pub(crate) fn is_image(path: &Path) -> Result<bool> {
    // Opening a pipe would wait for its writer.
    if !fs::metadata(path).map_err(Error::io("open", path))?.is_file() {
        return Ok(false);
    }
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    if EXTENSIONS.iter().any(|known| known.eq_ignore_ascii_case(extension)) {
        return Ok(true);
    }
    let mut start = vec![];
    let file = File::open(path).map_err(Error::io("open", path))?;
    file.take(8).read_to_end(&mut start).map_err(Error::io("read", path))?;
    Ok(MAGICS.iter().any(|magic| start.starts_with(magic)))
}

/// The names in a folder, sorted by their bytes; names that begin with a dot are left out.
pub(crate) fn names_in(folder: &Path) -> Result<Vec<OsString>> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.map(|entry| entry.file_name());
    let mut names = fs::read_dir(folder)
        .and_then(|entries| entries.map(name).collect::<std::io::Result<Vec<_>>>())
        .map_err(Error::io("list", folder))?;
    names.retain(|name| !name.as_encoded_bytes().starts_with(b"."));
    names.sort_unstable();
    Ok(names)
}

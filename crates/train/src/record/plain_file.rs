//! Untrusted files of a run folder, opened by path.

use std::fs::File;
use std::io;
use std::path::Path;

use crate::record::directory::Directory;

/// Opens a plain file. `None` if there is none.
///
/// # Errors
/// It is something else, such as a link or a pipe, which would block the reader, or cannot be
/// opened.
pub(crate) fn open(path: &Path) -> io::Result<Option<File>> {
    match Directory::parent_of(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        found => {
            let (directory, name) = found?;
            directory.open_file(name)
        }
    }
}

/// The text of a plain file of at most `bytes_max` bytes. `None` if there is none.
///
/// # Errors
/// As [`open`]; it is larger, or not UTF-8.
pub(crate) fn text(path: &Path, bytes_max: u64) -> io::Result<Option<String>> {
    let read = match Directory::parent_of(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        found => {
            let (directory, name) = found?;
            directory.read(name, bytes_max)?
        }
    };
    let text = read.map(|bytes| String::from_utf8(bytes).map_err(io::Error::other));
    text.transpose()
}

//! Files of a run folder that somebody else may have written.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Opens a plain file. `None` if there is none.
///
/// # Errors
/// It is something else, such as a pipe, which would block the reader, or cannot be opened.
pub(crate) fn open(path: &Path) -> io::Result<Option<File>> {
    let there = match path.metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        there => there?,
    };
    if !there.is_file() {
        return Err(io::Error::other("it is not a plain file"));
    }
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        file => file.map(Some),
    }
}

/// The text of a plain file of at most `bytes_max` bytes. `None` if there is none.
///
/// # Errors
/// As [`open`]; it is larger, or not UTF-8.
pub(crate) fn text(path: &Path, bytes_max: u64) -> io::Result<Option<String>> {
    let Some(file) = open(path)? else { return Ok(None) };
    let mut text = String::new();
    file.take(bytes_max + 1).read_to_string(&mut text)?;
    if text.len() as u64 > bytes_max {
        return Err(io::Error::other(format!("it is larger than {} MB", bytes_max / 1_000_000)));
    }
    Ok(Some(text))
}

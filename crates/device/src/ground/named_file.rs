//! Files that a user names, for reading.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// Opens a plain file. Links are followed, because the user has named them.
///
/// # Errors
/// The file does not exist or cannot be opened. [`ErrorKind::InvalidInput`] if it is not a plain
/// file: a pipe would block the reader until another program writes to it, and a device may have no
/// end.
pub fn open(path: &Path) -> Result<File> {
    let kind = path.metadata()?.file_type();
    if kind.is_file() {
        return File::open(path);
    }
    let found = if kind.is_dir() { "a folder" } else { "a pipe or a device" };
    Err(Error::new(ErrorKind::InvalidInput, format!("expected a plain file, got {found}")))
}

/// The contents of a plain file.
///
/// # Errors
/// The errors of [`open`]; the file cannot be read.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = vec![];
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The text of a plain file.
///
/// # Errors
/// The errors of [`read`]; the contents are not UTF-8.
pub fn text(path: &Path) -> Result<String> {
    let mut text = String::new();
    open(path)?.read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn only_a_plain_file_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("file"), "text").unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        std::os::unix::fs::symlink("pipe", path("link-to-pipe")).unwrap();
        std::process::Command::new("mkfifo").arg(path("pipe")).status().unwrap();
        for name in ["file", "link"] {
            assert_eq!(text(&path(name)).unwrap(), "text");
            assert_eq!(read(&path(name)).unwrap(), b"text");
        }
        for (other, found) in [
            // Pipes last: to open one would wait without end.
            (path(""), "a folder"),
            ("/dev/zero".into(), "a pipe or a device"),
            (path("pipe"), "a pipe or a device"),
            (path("link-to-pipe"), "a pipe or a device"),
        ] {
            let error = open(&other).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert_eq!(error.to_string(), format!("expected a plain file, got {found}"));
        }
        assert_eq!(open(&path("none")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}

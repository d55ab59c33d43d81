//! Checks for every result file that a user names. Existing files, unless empty, are not
//! overwritten, except the export of a resumed run; an unwritable file is found before the work,
//! not after it.

use std::io;
use std::path::Path;

use crate::error::{Error, Result};

/// Checks that the result of the setting `key` can be written to `path`. Leaves nothing there.
///
/// # Errors
/// [`Error::Value`]: there is a non-empty file already, or no file can be created there.
pub fn check_output(key: &str, path: &Path) -> Result<()> {
    let refuse = |expected: &str| Err(Error::value(key, path.display(), expected));
    match path.metadata() {
        Ok(there) if there.is_dir() || there.is_file() && there.len() == 0 => {}
        Ok(_) => return refuse("a new file; this one exists and would be overwritten"),
        Err(_) => {}
    }
    if path.file_name().is_none() {
        return refuse("the name of a file");
    }
    check_folder(key, path)
}

/// Checks that files can be created in the folder of `path`.
///
/// # Errors
/// [`Error::Value`] if not.
pub(crate) fn check_folder(key: &str, path: &Path) -> Result<()> {
    if path.is_dir() {
        return Err(Error::value(key, path.display(), "a file, not a folder"));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    // The file has no name and disappears with its handle.
    tempfile::tempfile_in(folder.unwrap_or(Path::new("."))).map(drop).map_err(|error| {
        let expected = match error.kind() {
            io::ErrorKind::NotFound => "a file in an existing folder".into(),
            _ => format!("a writable file ({error})"),
        };
        Error::value(key, path.display(), expected)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_new_file_where_files_can_be_is_right() {
        let base = tempfile::tempdir().unwrap();
        let path = |name: &str| base.path().join(name);
        std::fs::write(path("empty"), "").unwrap();
        std::fs::write(path("full"), "x").unwrap();
        std::fs::create_dir(path("folder")).unwrap();
        let check = |name: &str| check_output("plot", &path(name));
        check("new").unwrap();
        check("empty").unwrap();
        for (name, words) in [
            ("full", "would be overwritten"),
            ("folder", "not a folder"),
            ("none/file", "existing folder"),
            ("full/file", "a writable file"),
            ("none/..", "name of a file"),
        ] {
            let error = check(name).unwrap_err();
            assert!(matches!(&error, Error::Value { key, .. } if key == "plot"), "{error:?}");
            let text = error.to_string();
            assert!(text.contains("`plot`") && text.contains(words), "{name}: {text}");
        }
        assert!(
            check_folder("export", &path("full")).is_ok(),
            "a resumed run writes its own again"
        );
        assert_eq!(std::fs::read_dir(base.path()).unwrap().count(), 3);
    }
}

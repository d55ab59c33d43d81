//! File-backed host memory.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::{Error, Result, named_file};

/// A file mapped read-only into memory: its pages are loaded and evicted as needed, so that a
/// dataset larger than memory can be read (D7).
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    /// `None` for an empty file: there is nothing to map.
    map: Option<memmap2::Mmap>,
}

impl MappedFile {
    /// Maps a file. It must not be changed or truncated while it is mapped: reads then return
    /// unspecified bytes, and reading past a new end ends the process.
    ///
    /// # Errors
    /// [`Error::MapFile`] if it cannot be opened, is no regular file, or cannot be mapped.
    pub fn open(path: impl AsRef<Path>) -> Result<MappedFile> {
        let path = path.as_ref();
        let file = named_file::open(path);
        let file = file.map_err(|source| Error::MapFile { path: path.to_owned(), source })?;
        MappedFile::from_file(&file, path)
    }

    /// Maps a file that is open for reading, like [`open`](MappedFile::open); `path` names the file
    /// in errors. The file may have been removed from its folder: its contents live as long as the
    /// mapping.
    ///
    /// # Errors
    /// The errors of [`open`](MappedFile::open).
    pub fn from_file(file: &File, path: impl AsRef<Path>) -> Result<MappedFile> {
        let path = path.as_ref();
        let failed = |source| Error::MapFile { path: path.to_owned(), source };
        let about = file.metadata().map_err(failed)?;
        if !about.is_file() {
            let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "no regular file");
            return Err(failed(source));
        }
        let map = if about.len() == 0 {
            None
        } else {
            // SAFETY: the map is read-only. The documented condition of this call, which cannot be
            // checked, is that the file is not changed meanwhile.
            Some(unsafe { memmap2::Mmap::map(file) }.map_err(failed)?)
        };
        Ok(MappedFile { path: path.to_owned(), map })
    }

    /// The file's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_what_is_there_and_names_what_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, b"abc").unwrap();
        assert_eq!(MappedFile::open(&path).unwrap().as_bytes(), b"abc");
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mapped = MappedFile::from_file(&file, &path).unwrap();
        drop(file);
        assert_eq!((mapped.as_bytes(), mapped.path()), (&b"abc"[..], path.as_path()));
        std::fs::write(&path, b"").unwrap();
        assert_eq!(MappedFile::open(&path).unwrap().as_bytes(), b"");
        for bad in [folder.path().join("missing"), folder.path().to_owned()] {
            let error = MappedFile::open(&bad).unwrap_err();
            assert!(matches!(error, Error::MapFile { .. }), "{error:?}");
            assert!(error.to_string().contains(bad.to_str().unwrap()), "{error}");
        }
    }
}

//! Identity of files: whether a path still has the contents that were read before.
//!
//! Size and modification time do not suffice: archives restore the time, and two files that are
//! swapped keep both. The system itself sets the change time of the status (ctime), which no
//! program can choose. Where it is unknown, or so close to the reading that a second change may
//! share it, a checksum of the contents decides.

use std::fs::{self, Metadata};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Resolution of file times, with a margin: a file changed within this time before a moment may
/// change again without a new time.
const CLOCK_NS: i64 = 2_000_000_000;

/// Identity of a file or folder in the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(from = "IdFields", into = "IdFields")]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
    pub(crate) bytes: u64,
    /// Time of the last change of the contents, in nanoseconds since 1970.
    modified_ns: i64,
    /// Time of the last change of the status, in nanoseconds since 1970. A program cannot set it.
    changed_ns: i64,
}

/// The fields in order: a short form for files.
type IdFields = (u64, u64, u64, i64, i64);

impl From<IdFields> for FileId {
    fn from((device, inode, bytes, modified_ns, changed_ns): IdFields) -> Self {
        Self { device, inode, bytes, modified_ns, changed_ns }
    }
}

impl From<FileId> for IdFields {
    fn from(id: FileId) -> Self {
        (id.device, id.inode, id.bytes, id.modified_ns, id.changed_ns)
    }
}

impl FileId {
    #[cfg(unix)]
    pub(crate) fn from_metadata(metadata: &Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;
        let ns = |seconds: i64, ns: i64| seconds.saturating_mul(1_000_000_000).saturating_add(ns);
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified_ns: ns(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: ns(metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    #[cfg(not(unix))]
    pub(crate) fn from_metadata(metadata: &Metadata) -> Self {
        let modified_ns = metadata.modified().map_or(0, ns_since_1970);
        Self { device: 0, inode: 0, bytes: metadata.len(), modified_ns, changed_ns: 0 }
    }

    /// Whether every change of the file after `at_ns`, the moment at which this identity was taken,
    /// gives the file another identity. False where the system does not report the change of
    /// status.
    pub(crate) fn is_settled(&self, at_ns: i64) -> bool {
        cfg!(unix) && self.changed_ns.saturating_add(CLOCK_NS) < at_ns
    }
}

/// The present moment, in nanoseconds since 1970.
pub(crate) fn now_ns() -> i64 {
    ns_since_1970(SystemTime::now())
}

fn ns_since_1970(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// A file or folder that a dataset was read from.
#[derive(Debug)]
struct WatchedPath {
    path: PathBuf,
    /// `None` if there is no entry.
    id: Option<FileId>,
    /// Checksum of the contents, as long as the identity alone may not detect a change.
    crc: Option<u32>,
}

impl WatchedPath {
    fn new(path: &Path) -> io::Result<Self> {
        let (id, at_ns) = (id_at(path)?, now_ns());
        let crc = match id {
            Some(id) if !id.is_settled(at_ns) => Some(checksum(path)?),
            _ => None,
        };
        Ok(Self { path: path.to_path_buf(), id, crc })
    }

    fn is_current(&mut self) -> bool {
        let at_ns = now_ns();
        let Ok(now) = id_at(&self.path) else { return false };
        if now != self.id {
            return false;
        }
        let Some(crc) = self.crc else { return true };
        let same = checksum(&self.path).is_ok_and(|now| now == crc);
        if same && self.id.is_some_and(|id| id.is_settled(at_ns)) {
            self.crc = None;
        }
        same
    }
}

fn id_at(path: &Path) -> io::Result<Option<FileId>> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(Some(FileId::from_metadata(&metadata))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// CRC-32 of a file's contents, or of the names in a folder.
fn checksum(path: &Path) -> io::Result<u32> {
    let mut crc = crc32fast::Hasher::new();
    let kind = fs::metadata(path)?;
    if kind.is_dir() {
        let names = fs::read_dir(path)?.map(|entry| entry.map(|entry| entry.file_name()));
        let mut names = names.collect::<io::Result<Vec<_>>>()?;
        names.sort_unstable();
        names.iter().for_each(|name| crc.update(&[name.as_encoded_bytes(), b"\0"].concat()));
    } else if kind.is_file() {
        let mut file = fs::File::open(path)?;
        let mut piece = vec![0; 1 << 16];
        loop {
            match file.read(&mut piece)? {
                0 => break,
                count => crc.update(&piece[..count]),
            }
        }
    }
    Ok(crc.finalize())
}

/// The files and folders that a dataset is read from, with their identities before the reading.
#[derive(Debug, Default)]
pub(crate) struct WatchedFiles {
    seen: Mutex<Vec<WatchedPath>>,
}

impl WatchedFiles {
    /// Notes the identity of `path`; to be called before it is read.
    pub(crate) fn add(&self, path: &Path) -> Result<()> {
        let seen = WatchedPath::new(path).map_err(Error::io("open", path))?;
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
        Ok(())
    }

    /// `result` if no path has changed since it was noted. Otherwise the error for the changed
    /// path, which may have caused an error in `result`.
    pub(crate) fn unless_changed<T>(&self, result: Result<T>) -> Result<T> {
        self.changed().map_or(result, |path| Err(Error::Changed { path }))
    }

    /// The first path that has changed since it was noted.
    pub(crate) fn changed(&self) -> Option<PathBuf> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter_mut().find_map(|seen| (!seen.is_current()).then(|| seen.path.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The identity of a file that was written just now may stay the same over another change.
    #[test]
    fn recent_contents_are_compared() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "contents").unwrap();
        for path in [folder.path(), &file] {
            let mut seen = WatchedPath::new(path).unwrap();
            assert!(seen.is_current());
            let crc = seen.crc.unwrap();
            seen.crc = Some(!crc);
            assert!(!seen.is_current());
            let before = checksum(path).unwrap();
            fs::write(folder.path().join("other"), "x").unwrap();
            fs::write(&file, before.to_string()).unwrap();
            assert!(!seen.is_current() && checksum(path).unwrap() != before);
        }
        let mut nothing = WatchedPath::new(&folder.path().join("nothing")).unwrap();
        assert!(nothing.is_current() && nothing.crc.is_none());
        fs::write(folder.path().join("nothing"), "").unwrap();
        assert!(!nothing.is_current());
    }

    /// A read between two writes may have seen either content.
    #[test]
    #[cfg(unix)]
    fn contents_that_changed_and_changed_back_are_a_change() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "first").unwrap();
        let mut seen = WatchedPath::new(&file).unwrap();
        let began = std::time::Instant::now();
        // The clock of the file system has large steps.
        while id_at(&file).unwrap() == seen.id {
            assert!(began.elapsed().as_secs() < 60, "the time of a change stays the same");
            fs::write(&file, "other").unwrap();
            fs::write(&file, "first").unwrap();
        }
        assert_eq!(seen.crc, Some(checksum(&file).unwrap()));
        assert!(!seen.is_current());
    }

    #[test]
    fn an_identity_settles_some_seconds_after_a_change() {
        let id = FileId::from((1, 2, 3, 0, 10_000_000_000));
        for (at_ns, is_settled) in
            [(10_000_000_000, false), (11_900_000_000, false), (12_100_000_000, cfg!(unix))]
        {
            assert_eq!(id.is_settled(at_ns), is_settled, "{at_ns}");
        }
    }
}

//! A directory whose files are opened below it, and never through a link.
//!
//! Run folders are copied between machines and people. A link in one could point to any file of the
//! user who resumes the run. So every file of a run is opened relative to an open directory, with
//! `O_NOFOLLOW` where the system has it. The open directory also detects that the folder was
//! removed and another one was created at the same path: no file can be created in a removed
//! directory.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cap_fs_ext::{DirExt, FollowSymlinks, MetadataExt, OpenOptionsFollowExt};
use cap_std::ambient_authority;
use cap_std::fs::{Dir, FileType, OpenOptions};

/// End of the names of files that are being written.
const PART: &str = ".part";
/// Age from which an unfinished and unlocked file counts as abandoned.
const ABANDONED: Duration = Duration::from_secs(60);

/// An open directory.
#[derive(Debug)]
pub(crate) struct Directory {
    dir: Dir,
    path: PathBuf,
}

/// Detector of the removal or replacement of a file. The writer must keep the file open, so that
/// the system gives its inode to no other file.
#[derive(Debug)]
pub(crate) struct Watched {
    directory: Directory,
    name: &'static str,
    id: Option<OpenFileId>,
}

impl Watched {
    /// Watches the file that has this name now.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(crate) fn new(directory: &Directory, name: &'static str) -> io::Result<Self> {
        Ok(Self { directory: directory.try_clone()?, name, id: directory.id_of(name)? })
    }

    /// Path of the file, as its directory was opened.
    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path.join(self.name)
    }

    /// Checks that the name still belongs to the same file.
    ///
    /// # Errors
    /// The file was removed, moved away or replaced.
    pub(crate) fn check(&self) -> io::Result<()> {
        match self.directory.id_of(self.name)? {
            now if now == self.id => Ok(()),
            _ => {
                Err(io::Error::other("it was removed or replaced while the run was writing to it"))
            }
        }
    }
}

/// Identity of a file; a new file of the same name has another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenFileId {
    device: u64,
    inode: u64,
}

impl Directory {
    /// Opens the directory at `path`, which may be a link: the user has named it.
    ///
    /// # Errors
    /// It does not exist, is no directory, or cannot be opened.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let named = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        Ok(Self { dir: Dir::open_ambient_dir(named, ambient_authority())?, path: path.into() })
    }

    /// The directory that a file at `path` is in, and the name of the file.
    ///
    /// # Errors
    /// As [`Directory::open`]; `path` does not end in a name.
    pub(crate) fn parent_of(path: &Path) -> io::Result<(Self, &OsStr)> {
        let name = path.file_name().ok_or_else(|| io::Error::other("it has no file name"))?;
        Ok((Self::open(path.parent().unwrap_or(Path::new("")))?, name))
    }

    /// Opens the same directory once more.
    ///
    /// # Errors
    /// The process has too many open files.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { dir: self.dir.try_clone()?, path: self.path.clone() })
    }

    /// Path of the directory, as it was opened.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a directory in this one; `None` if there is none.
    ///
    /// # Errors
    /// It is a link or a file, or cannot be opened.
    pub(crate) fn below(&self, name: &str) -> io::Result<Option<Self>> {
        match self.kind(name.as_ref())? {
            None => Ok(None),
            Some(kind) if kind.is_dir() => {
                let dir = self.dir.open_dir_nofollow(name)?;
                Ok(Some(Self { dir, path: self.path.join(name) }))
            }
            Some(kind) => Err(unexpected(kind, "folder")),
        }
    }

    /// Opens a directory in this one, which is created if there is none.
    ///
    /// # Errors
    /// As [`Directory::below`]; it cannot be created.
    pub(crate) fn create_below(&self, name: &str) -> io::Result<Self> {
        match self.dir.create_dir(name) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        self.below(name)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Opens a plain file for reading; `None` if there is none.
    ///
    /// # Errors
    /// It is something else, such as a link, or a pipe, which would block the reader; it cannot be
    /// opened.
    pub(crate) fn open_file(&self, name: impl AsRef<OsStr>) -> io::Result<Option<File>> {
        self.open_with(name.as_ref(), OpenOptions::new().read(true))
    }

    /// Opens a plain file for reading and writing; `None` if there is none.
    ///
    /// # Errors
    /// As [`Directory::open_file`].
    pub(crate) fn open_writable(&self, name: &str) -> io::Result<Option<File>> {
        self.open_with(name.as_ref(), OpenOptions::new().read(true).write(true))
    }

    /// Opens a plain file for writing; it is created if there is none. Its contents stay.
    ///
    /// # Errors
    /// As [`Directory::open_file`]; it cannot be created.
    pub(crate) fn open_or_create(&self, name: &str) -> io::Result<File> {
        let file = self.open_with(name.as_ref(), OpenOptions::new().write(true).create(true))?;
        file.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Creates a file, which must not exist.
    ///
    /// # Errors
    /// There is something of this name, or the directory is not writable or was removed.
    pub(crate) fn create_new(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        Ok(self.dir.open_with(name.as_ref(), &options)?.into_std())
    }

    fn open_with(&self, name: &OsStr, options: &mut OpenOptions) -> io::Result<Option<File>> {
        // Opening a pipe would wait for its other end.
        if let Some(kind) = self.kind(name)?.filter(|kind| !kind.is_file()) {
            return Err(unexpected(kind, "plain file"));
        }
        match self.dir.open_with(name, options.follow(FollowSymlinks::No)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            file => Ok(Some(file?.into_std())),
        }
    }

    /// Kind of the entry with this name; `None` if there is none.
    pub(crate) fn kind(&self, name: &OsStr) -> io::Result<Option<FileType>> {
        match self.dir.symlink_metadata(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            there => Ok(Some(there?.file_type())),
        }
    }

    /// Identity of the file with this name; `None` if there is none.
    pub(crate) fn id_of(&self, name: &str) -> io::Result<Option<OpenFileId>> {
        match self.dir.symlink_metadata(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            there => {
                there.map(|there| Some(OpenFileId { device: there.dev(), inode: there.ino() }))
            }
        }
    }

    /// Contents of a plain file of at most `bytes_max` bytes; `None` if there is none.
    ///
    /// # Errors
    /// As [`Directory::open_file`]; it is larger.
    pub(crate) fn read(
        &self,
        name: impl AsRef<OsStr>,
        bytes_max: u64,
    ) -> io::Result<Option<Vec<u8>>> {
        let Some(file) = self.open_file(name)? else { return Ok(None) };
        let mut bytes = vec![];
        file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > bytes_max {
            let mb = bytes_max / 1_000_000;
            Err(io::Error::other(format!("it is larger than {mb} MB")))
        } else {
            Ok(Some(bytes))
        }
    }

    /// Writes a file that appears, or replaces another, only once it is whole and on the disk. A
    /// link of this name is replaced, not followed.
    ///
    /// # Errors
    /// There is a folder of this name, the directory is not writable or was removed, or the disk is
    /// full. No unfinished file is left behind.
    pub(crate) fn write_whole(&self, name: impl AsRef<OsStr>, bytes: &[u8]) -> io::Result<()> {
        let name = name.as_ref();
        let (part, file) = self.create_part(name)?;
        let written = write_and_sync(file, bytes);
        let written = written.and_then(|_held| self.finish_part(&part, name));
        // The failed write is the error to report, even if cleaning up fails, too.
        written.inspect_err(|_| _ = self.dir.remove_file(&part))
    }

    /// Gives the whole file `part` its name. A file or link of this name is replaced.
    ///
    /// # Errors
    /// There is a folder of this name, or the directory is not writable.
    pub(crate) fn finish_part(&self, part: &str, name: &OsStr) -> io::Result<()> {
        self.dir.rename(part, &self.dir, name)?;
        // The rename is on the disk once the directory is; not every system can sync one.
        let _ = self.dir.try_clone().map(|dir| dir.into_std_file().sync_all());
        Ok(())
    }

    /// Creates the temporary file that holds a new file until it is complete. Its name is unique,
    /// because several threads, or processes with equal ids in two containers, may write the same
    /// file at once.
    ///
    /// # Errors
    /// The directory is not writable or was removed.
    pub(crate) fn create_part(&self, name: &OsStr) -> io::Result<(String, File)> {
        static WRITES: AtomicU64 = AtomicU64::new(0);
        loop {
            let write = WRITES.fetch_add(1, Ordering::Relaxed);
            let process = std::process::id();
            let part = format!(".{}.{process}-{write}{PART}", name.to_string_lossy());
            match self.create_new(&part) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                file => return Ok((part, file?)),
            }
        }
    }

    /// Removes the unfinished versions of the files that `is_own` accepts. The caller makes sure
    /// that no other process writes them.
    ///
    /// # Errors
    /// The directory cannot be read, or a file cannot be removed.
    pub(crate) fn remove_parts(&self, is_own: impl Fn(&str) -> bool) -> io::Result<()> {
        let names = self.names()?;
        let mut parts = names.iter().filter(|name| part_of(name).is_some_and(&is_own));
        parts.try_for_each(|part| self.remove_file(part))
    }

    /// Removes unfinished versions of the file `name` that killed processes left behind. Versions
    /// that another process may still write stay.
    pub(crate) fn remove_abandoned_parts(&self, name: &OsStr) {
        let names = self.names().unwrap_or_default();
        let own = name.to_string_lossy();
        for part in names.iter().filter(|part| part_of(part) == Some(&own)) {
            let Ok(Some(file)) = self.open_file(part) else { continue };
            let written = file.metadata().and_then(|there| there.modified());
            let age = written.ok().and_then(|time| time.elapsed().ok()).unwrap_or_default();
            if age >= ABANDONED && file.try_lock().is_ok() {
                // Cleaning up is no reason to fail.
                let _ = self.dir.remove_file(part);
            }
        }
    }

    /// Removes a file, or a link itself. Does nothing if there is none.
    ///
    /// # Errors
    /// It cannot be removed.
    pub(crate) fn remove_file(&self, name: &str) -> io::Result<()> {
        self.dir.remove_file(name).or_else(absent)
    }

    /// Removes an empty directory in this one. Does nothing if there is none.
    ///
    /// # Errors
    /// It has files, or cannot be removed.
    pub(crate) fn remove_below(&self, name: &str) -> io::Result<()> {
        self.dir.remove_dir(name).or_else(absent)
    }

    /// Names in the directory, sorted. Names that are not UTF-8 are left out: no file of a run has
    /// one.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(crate) fn names(&self) -> io::Result<Vec<String>> {
        let mut names = vec![];
        for entry in self.dir.entries()? {
            names.extend(entry?.file_name().into_string().ok());
        }
        names.sort_unstable();
        Ok(names)
    }
}

/// Writes a new file to the disk. The file is locked while it is open, so that no other process
/// takes it for abandoned; file systems without locks give no such protection.
fn write_and_sync(mut file: File, bytes: &[u8]) -> io::Result<File> {
    let _ = file.try_lock();
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(file)
}

/// Final name of the unfinished file `name`, written by this program or an earlier build. `None`
/// for the name of any other file.
pub(crate) fn part_of(name: &str) -> Option<&str> {
    let is_process = |text: &str| {
        !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-')
    };
    let now = name.strip_suffix(PART).and_then(|rest| rest.rsplit_once('.'));
    let (rest, process) = now.or_else(|| name.rsplit_once(".tmp-"))?;
    rest.strip_prefix('.').filter(|_| is_process(process))
}

/// Error of kind `InvalidInput` for an entry of another kind than expected.
fn unexpected(kind: FileType, expected: &str) -> io::Error {
    let found = if kind.is_symlink() {
        "a link; files of a run are opened only in its own folder"
    } else if kind.is_dir() {
        "a folder"
    } else if kind.is_file() {
        "a file"
    } else {
        "a pipe or a device"
    };
    let problem = format!("expected a {expected}, got {found}");
    io::Error::new(io::ErrorKind::InvalidInput, problem)
}

/// Treats "not found" as success, for removals.
fn absent(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests;

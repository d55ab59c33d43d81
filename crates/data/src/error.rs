//! The errors of this crate: one enum, every variant with what was expected, what came, what to do.

use std::io;
use std::path::{Path, PathBuf};

use meristem_device::DeviceId;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong between a file on disk and a batch on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device refused: bad name, not compiled in, out of memory, a kernel that panicked.
    #[error(transparent)]
    Device(#[from] meristem_device::Error),

    /// An argument is out of its range (D4).
    #[error("{operation}: `{argument}` must be {expected}, got {got}; {remedy}")]
    Argument {
        /// The public operation that was called.
        operation: &'static str,
        /// The argument or field that is wrong.
        argument: &'static str,
        /// What it has to be.
        expected: String,
        /// What it was.
        got: String,
        /// What to do about it.
        remedy: String,
    },

    /// `next` was called before the first `start_epoch` (D4).
    #[error("gather: `next` was called before an epoch was started; call `start_epoch` first")]
    EpochNotStarted,

    /// In a partial last batch an env without data stands before an env with data (D2): leaving it
    /// out would shift every later env to the wrong place.
    #[error(
        "gather: in batch {batch} env {empty_env} on {empty_device} has no sample, but the later \
         env {later_env} on {later_device} has some; use another batch size or another number of envs, \
         name the devices with more envs last, or set `drop_last`"
    )]
    Hole {
        /// Which batch of the epoch, from 0.
        batch: usize,
        /// The first env that would get nothing.
        empty_env: usize,
        /// Its device.
        empty_device: DeviceId,
        /// The first env after it that would get samples.
        later_env: usize,
        /// Its device.
        later_device: DeviceId,
    },

    /// The files of a dataset are not where they were looked for.
    #[error("the {dataset} dataset is not in {}: expected {}; {remedy}", looked_in.display(), expected.join(", "))]
    Missing {
        /// Name of the dataset's source, as on the command line.
        dataset: &'static str,
        /// The folder (or file) that was looked at.
        looked_in: PathBuf,
        /// What should have been there.
        expected: Vec<String>,
        /// Where to get it.
        remedy: String,
    },

    /// A source that reads files was asked for without saying where they are.
    #[error("the {dataset} dataset needs `data_root` (`--data-root DIR`): expected there {}; {remedy}", expected.join(", "))]
    RootNotGiven {
        /// Name of the dataset's source, as on the command line.
        dataset: &'static str,
        /// What should be in the folder.
        expected: Vec<String>,
        /// Where to get it.
        remedy: String,
    },

    /// A file holds something else than it should: damaged, truncated or mislabelled (D9).
    #[error("{}: damaged at byte {offset}: {mismatch}", path.display())]
    Damaged {
        /// The file. A member of an archive is `archive.npz/member`.
        path: PathBuf,
        /// Offset of the first byte that is wrong or missing; in a compressed file or an archive's
        /// member, the offset in the decompressed bytes.
        offset: u64,
        /// What is wrong there.
        mismatch: Box<Mismatch>,
    },

    /// Files are each readable but do not fit together: a class folder too many, an image of
    /// another size, class names that contradict each other.
    #[error("{}: {mismatch}", path.display())]
    Layout {
        /// The file or folder that does not fit.
        path: PathBuf,
        /// What does not fit.
        mismatch: Box<Mismatch>,
    },

    /// The operating system refused to read or write.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// What was tried: "open", "read", "write", "list".
        operation: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

impl Error {
    /// True for a damaged file, which `skip_bad` may count and pass over if it is one of many.
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Damaged { .. })
    }

    pub(crate) fn io(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { operation, path, source }
    }
}

/// What was expected in a file, and what came.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} must be {expected}, got {got}; {remedy}")]
pub struct Mismatch {
    /// What stands there.
    pub what: String,
    /// What it has to be.
    pub expected: String,
    /// What it was.
    pub got: String,
    /// What to do about it.
    pub remedy: String,
}

impl Mismatch {
    /// With the remedy for files that should be equal to a published original.
    pub(crate) fn new(
        what: impl Into<String>,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Self {
        let remedy = "get the file again from where it came".into();
        Self { what: what.into(), expected: expected.into(), got: got.into(), remedy }
    }

    /// With another remedy.
    pub(crate) fn remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: remedy.into(), ..self }
    }

    /// As damage of a file.
    pub(crate) fn at(self, path: &Path, offset: u64) -> Error {
        Error::Damaged { path: path.to_path_buf(), offset, mismatch: Box::new(self) }
    }

    /// As something that does not fit.
    pub(crate) fn of(self, path: &Path) -> Error {
        Error::Layout { path: path.to_path_buf(), mismatch: Box::new(self) }
    }
}

/// Shorthand for the many places that find damage.
pub(crate) fn damaged(
    path: &Path,
    offset: u64,
    what: impl Into<String>,
    expected: impl Into<String>,
    got: impl Into<String>,
) -> Error {
    Mismatch::new(what, expected, got).at(path, offset)
}

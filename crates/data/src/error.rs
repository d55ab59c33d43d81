//! Errors of this crate: one enum, every variant with the expected value, the actual one and a
//! remedy.

use std::io;
use std::path::{Path, PathBuf};

use meristem_device::DeviceId;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error between a file on disk and a batch on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device refused: bad name, not compiled in, out of memory, or a kernel panicked.
    #[error(transparent)]
    Device(#[from] meristem_device::Error),

    /// An argument is out of its range.
    #[error("{operation}: `{argument}` must be {expected}, got {got}; {remedy}")]
    Argument {
        /// The public operation.
        operation: &'static str,
        /// The wrong argument or field.
        argument: &'static str,
        /// Allowed values.
        expected: String,
        /// Actual value.
        got: String,
        /// The remedy.
        remedy: String,
    },

    /// `next` was called while no epoch is in progress: before the first `start_epoch`, or after a
    /// call or an error that ended the epoch.
    #[error("gather: `next` was called before an epoch was started; call `start_epoch` first")]
    EpochNotStarted,

    /// The thread that loads streamed samples could not be started, or panicked.
    #[error("the thread that loads streamed samples {problem}")]
    Loader {
        /// The cause, and a remedy.
        problem: String,
    },

    /// A partial last batch has no sample for an env, but has some for a later env. Leaving
    /// out the empty env would shift every later one.
    #[error(
        "gather: in batch {batch} env {empty_env} on {empty_device} has no sample, but the later \
         env {later_env} on {later_device} has some; use another batch size or another \
         number of envs, \
         name the devices with more envs last, or set `drop_last`"
    )]
    Hole {
        /// Index of the batch in the epoch, from 0.
        batch: usize,
        /// The first env without samples.
        empty_env: usize,
        /// Its device.
        empty_device: DeviceId,
        /// The first later env with samples.
        later_env: usize,
        /// Its device.
        later_device: DeviceId,
    },

    /// Files of a dataset are missing.
    #[error(
        "the {dataset} dataset is not in {}: expected {}; {remedy}",
        looked_in.display(),
        expected.join(", ")
    )]
    Missing {
        /// Name of the dataset's source, as on the command line.
        dataset: &'static str,
        /// The folder (or file) that was searched.
        looked_in: PathBuf,
        /// Files expected there.
        expected: Vec<String>,
        /// Where to get them.
        remedy: String,
    },

    /// A split has no samples: an interrupted copy, a table without rows, or every file left out by
    /// `skip_bad`.
    #[error(
        "{}: the {split} split is empty: expected at least one sample; {remedy}",
        path.display()
    )]
    EmptySplit {
        /// The data root.
        path: PathBuf,
        /// Name of the split, `train` or `test`.
        split: &'static str,
        /// Remedy.
        remedy: String,
    },

    /// The test split was requested, and the dataset has none. Training is possible without it.
    #[error(
        "{}: the {dataset} dataset has no test split: expected {expected}; put some samples aside \
         for it, or read the train split",
        path.display()
    )]
    NoTestSplit {
        /// Name of the dataset's source, as on the command line.
        dataset: &'static str,
        /// The data root.
        path: PathBuf,
        /// Files or arrays of a test split, for messages.
        expected: &'static str,
    },

    /// A source that reads files needs a folder, and none was given.
    #[error(
        "the {dataset} dataset needs a data root (`--data-root DIR`) with {}; {remedy}",
        expected.join(", ")
    )]
    RootNotGiven {
        /// Name of the dataset's source, as on the command line.
        dataset: &'static str,
        /// Files expected in the folder.
        expected: Vec<String>,
        /// Where to get them.
        remedy: String,
    },

    /// A file has unexpected contents: it is damaged, truncated or mislabelled.
    #[error("{}: damaged at byte {offset}: {mismatch}", path.display())]
    Damaged {
        /// The file. A member of an archive is `archive.npz/member`.
        path: PathBuf,
        /// Offset of the first byte that is wrong or missing; in a compressed file or an archive's
        /// member, the offset in the decompressed bytes.
        offset: u64,
        /// Description of the damage.
        mismatch: Box<Mismatch>,
    },

    /// An image named by a list does not exist.
    #[error(
        "{}: there is no such image; put it there, remove it from the list, or skip it with \
         `skip_bad` (--skip-bad)",
        path.display()
    )]
    Absent {
        /// The image file.
        path: PathBuf,
    },

    /// An error of an image file, with the line of the list that names the file.
    #[error("{}, line {line}: {error}", list.display())]
    Listed {
        /// The CSV file.
        list: PathBuf,
        /// Its line, from 1.
        line: u64,
        /// The error of the image file.
        error: Box<Error>,
    },

    /// Files that are readable on their own do not fit together: an additional class folder, an
    /// image of another size, contradictory class names.
    #[error("{}: {mismatch}", path.display())]
    Layout {
        /// The file or folder that does not fit.
        path: PathBuf,
        /// Description of the conflict.
        mismatch: Box<Mismatch>,
    },

    /// A file was changed while it was read: its parts do not belong together.
    #[error(
        "{} was changed while it was read; start again when no other program writes to it",
        path.display()
    )]
    Changed {
        /// The file or folder.
        path: PathBuf,
    },

    /// The operating system refused to read or write.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// The operation: "open", "read", "write", "list", "create".
        operation: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl Error {
    /// Whether a file or record is damaged or missing. Under `skip_bad` a reader of many files or
    /// records leaves it out.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Damaged { .. } | Self::Absent { .. } => true,
            Self::Listed { error, .. } => error.is_damage(),
            _ => false,
        }
    }

    pub(crate) fn io(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { operation, path, source }
    }
}

/// Expected and actual contents of a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} must be {expected}, got {got}; {remedy}")]
pub struct Mismatch {
    /// Name of the value.
    pub what: String,
    /// Allowed values.
    pub expected: String,
    /// Actual value.
    pub got: String,
    /// The remedy.
    pub remedy: String,
}

impl Mismatch {
    /// A mismatch whose remedy is another copy of the file; [`Self::remedy`] replaces the remedy.
    pub(crate) fn new(
        what: impl Into<String>,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Self {
        let remedy = "download or copy the file again".into();
        Self { what: what.into(), expected: expected.into(), got: got.into(), remedy }
    }

    /// Replaces the remedy.
    pub(crate) fn remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: remedy.into(), ..self }
    }

    /// Converts to an error about damage of a file.
    pub(crate) fn at(self, path: &Path, offset: u64) -> Error {
        Error::Damaged { path: path.to_path_buf(), offset, mismatch: Box::new(self) }
    }

    /// Converts to an error about a file that does not fit the others.
    pub(crate) fn in_layout(self, path: &Path) -> Error {
        Error::Layout { path: path.to_path_buf(), mismatch: Box::new(self) }
    }
}

/// A damage error in one call.
pub(crate) fn damaged(
    path: &Path,
    offset: u64,
    what: impl Into<String>,
    expected: impl Into<String>,
    got: impl Into<String>,
) -> Error {
    Mismatch::new(what, expected, got).at(path, offset)
}

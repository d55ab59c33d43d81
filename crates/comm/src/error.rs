//! Errors between ranks. An error caused by another rank names that rank.

use std::sync::Arc;

use meristem_device::CudaError;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of collectives. If a rank is gone, late or disagrees, all ranks of the communicator get
/// the same error, also from every later call. After an error of one rank alone, the other ranks
/// get [`RankFailed`](Error::RankFailed), and so does every rank from its later calls.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation failed on the device.
    #[error(transparent)]
    Device(Arc<meristem_device::Error>),
    /// A rank that makes no more calls: it left the group, panicked, lost its connection, vanished
    /// or sent invalid data. [`RankLate`](Error::RankLate) is a rank that may still come.
    #[error("`{operation}`: rank {rank} is gone: {reason}; the other ranks cannot continue")]
    RankGone {
        /// Operation that needed the rank.
        operation: &'static str,
        /// The rank.
        rank: usize,
        /// Reason.
        reason: &'static str,
    },
    /// A rank that failed alone in a collective.
    #[error("rank {rank} failed: {reason}; the other ranks cannot continue")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Text of the rank's error.
        reason: String,
    },
    /// A rank that did not arrive within the deadline.
    #[error(
        "`{operation}`: rank {rank} did not arrive within {seconds} s; it hangs, has died, or \
         makes other calls"
    )]
    RankLate {
        /// Operation that waited.
        operation: &'static str,
        /// The missing rank; if several are missing, a silent one or the one furthest behind, or
        /// else the lowest.
        rank: usize,
        /// Deadline in seconds.
        seconds: f64,
    },
    /// An exchange between devices that did not end within the deadline, for an unknown reason.
    #[error(
        "`{operation}`: the devices have waited for each other for {seconds} s, and the \
         responsible rank is unknown; look at the messages of every rank (NCCL_DEBUG=INFO)"
    )]
    Endless {
        /// Operation that waited.
        operation: &'static str,
        /// Deadline in seconds.
        seconds: f64,
    },
    /// A rank whose call differs from the calls of the other ranks.
    #[error(
        "`{operation}`: rank {rank} has {what} {got}, the others {expected}; all ranks must make \
         the same calls in the same order"
    )]
    Disagreement {
        /// Operation of the other ranks.
        operation: &'static str,
        /// The rank that disagrees.
        rank: usize,
        /// The property that differs.
        what: &'static str,
        /// Value of the other ranks.
        expected: String,
        /// Value of the rank.
        got: String,
    },
    /// A transport that is unavailable in this build, machine or process.
    #[error("transport `{transport}`: {reason}; {remedy}")]
    Unavailable {
        /// Name of the transport.
        transport: &'static str,
        /// Reason.
        reason: &'static str,
        /// Remedy.
        remedy: &'static str,
    },
    /// An invalid argument, a tensor or another value (V1). No work was enqueued.
    #[error("`{operation}`: `{argument}` must be {expected}, got {got}")]
    BadArgument {
        /// Operation.
        operation: &'static str,
        /// Argument.
        argument: String,
        /// Accepted values.
        expected: String,
        /// Actual value.
        got: String,
    },
}

impl Error {
    /// An error for an invalid argument.
    pub(crate) fn argument(
        operation: &'static str,
        argument: impl Into<String>,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Error {
        let (argument, expected) = (argument.into(), expected.into());
        Error::BadArgument { operation, argument, expected, got: got.to_string() }
    }

    /// Whether only this rank has the error, so that it must notify the other ranks.
    pub fn is_own(&self) -> bool {
        use Error::{BadArgument, Device, Unavailable};
        matches!(self, Device(_) | BadArgument { .. } | Unavailable { .. })
    }
}

impl Error {
    /// The same error with another operation's name.
    pub(crate) fn at(&self, operation: &'static str) -> Error {
        let mut error = self.clone();
        match &mut error {
            Error::RankGone { operation: old, .. }
            | Error::RankLate { operation: old, .. }
            | Error::Endless { operation: old, .. }
            | Error::Disagreement { operation: old, .. } => *old = operation,
            _ => {}
        }
        error
    }
}

/// The lost rank for which exchanges were aborted.
fn loss(cause: &CudaError) -> Option<Error> {
    match cause {
        CudaError::ExchangeAborted(loss) => loss.downcast_ref::<Error>().cloned(),
        _ => None,
    }
}

/// Argument errors of the device become [`Error::BadArgument`], so that callers see one form. An
/// aborted exchange becomes the error of the lost rank.
impl From<meristem_device::Error> for Error {
    fn from(error: meristem_device::Error) -> Self {
        use meristem_device::Error::{Cuda, DeviceFailed, Mismatch, Overlap};
        match error {
            DeviceFailed { ref cause, .. } => {
                loss(cause).unwrap_or_else(|| Error::Device(Arc::new(error)))
            }
            Cuda { ref source, .. } => {
                loss(source).unwrap_or_else(|| Error::Device(Arc::new(error)))
            }
            Mismatch { operation, argument, expected, got, .. } => {
                Error::BadArgument { operation, argument, expected, got }
            }
            Overlap { operation, argument, other } => {
                let got = format!("one that overlaps `{other}`");
                Error::argument(operation, argument, "separate memory", got)
            }
            error => Error::Device(Arc::new(error)),
        }
    }
}

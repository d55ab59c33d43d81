//! Errors between ranks. An error that another rank caused names it.

use meristem_device::CudaError;
use std::sync::Arc;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of collectives. All ranks of a communicator get the same one when a rank is gone, late or
/// disagrees; after an error of one rank alone, the others get [`RankFailed`](Error::RankFailed).
/// The communicator is unusable afterwards, and every later call returns the same error.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device refused an operation.
    #[error(transparent)]
    Device(Arc<meristem_device::Error>),
    /// A rank that cannot respond any more.
    #[error("`{operation}`: rank {rank} is gone: {reason}; the other ranks cannot continue")]
    RankGone {
        /// Operation that needed the rank.
        operation: &'static str,
        /// The rank.
        rank: usize,
        /// Reason.
        reason: &'static str,
    },
    /// A rank that failed with an error of its own, in an operation in which the others need it.
    #[error("rank {rank} failed: {reason}; the other ranks cannot continue")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// The rank's error, in words.
        reason: String,
    },
    /// A rank that did not join an operation within the deadline.
    #[error(
        "`{operation}`: rank {rank} did not arrive within {seconds} s; it hangs, has died, or \
         makes other calls"
    )]
    RankLate {
        /// Operation that waited.
        operation: &'static str,
        /// The rank, the lowest if several are missing.
        rank: usize,
        /// Deadline in seconds.
        seconds: f64,
    },
    /// An exchange of devices that did not end within the deadline, without a sign of which rank is
    /// the reason.
    #[error(
        "`{operation}`: the devices have waited for each other for {seconds} s, and it is not \
         known which rank is the reason; look at the messages of every rank (NCCL_DEBUG=INFO)"
    )]
    Endless {
        /// Operation that waited.
        operation: &'static str,
        /// Deadline in seconds.
        seconds: f64,
    },
    /// A rank whose call differs from that of the others.
    #[error(
        "`{operation}`: rank {rank} has {what} {got}, the others {expected}; all ranks must make \
         the same calls in the same order"
    )]
    Disagreement {
        /// Operation of the others.
        operation: &'static str,
        /// The rank that disagrees.
        rank: usize,
        /// Property in which the calls differ.
        what: &'static str,
        /// Value of the others.
        expected: String,
        /// Value of the rank.
        got: String,
    },
    /// A transport that is not available in this build, machine or process.
    #[error("transport `{transport}`: {reason}; {remedy}")]
    Unavailable {
        /// Name of the transport.
        transport: &'static str,
        /// Reason.
        reason: &'static str,
        /// Remedy.
        remedy: &'static str,
    },
    /// An argument that the operation does not accept, a tensor or any other (V1). Nothing has run.
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
    /// An error for an argument that does not fit.
    pub(crate) fn argument(
        operation: &'static str,
        argument: impl Into<String>,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Error {
        let (argument, expected) = (argument.into(), expected.into());
        Error::BadArgument { operation, argument, expected, got: got.to_string() }
    }

    /// Whether the error is this rank's own: the others only know of it if they are notified.
    pub fn is_own(&self) -> bool {
        use Error::{BadArgument, Device, Unavailable};
        matches!(self, Device(_) | BadArgument { .. } | Unavailable { .. })
    }
}

impl Error {
    /// The same error, returned by another operation.
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

/// The loss of a rank for which exchanges were aborted.
fn loss(cause: &CudaError) -> Option<Error> {
    match cause {
        CudaError::ExchangeAborted(loss) => loss.downcast_ref::<Error>().cloned(),
        _ => None,
    }
}

/// Argument errors of the device become this crate's, whichever of the two detects them. So does
/// the loss of a rank for which a device's exchanges were aborted.
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
                Error::argument(operation, argument, "memory of its own", got)
            }
            error => Error::Device(Arc::new(error)),
        }
    }
}

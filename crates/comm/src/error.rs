//! What can go wrong between ranks. An error that another rank caused names it.

use std::sync::Arc;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of collectives. All ranks of a communicator get the same one when a rank is gone, late or
/// disagrees; where a rank met an error of its own, the others get [`RankFailed`](Error::RankFailed). The
/// communicator is of no use afterwards, and says the same again.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device refused an operation.
    #[error(transparent)]
    Device(Arc<meristem_device::Error>),
    /// A rank that cannot answer any more.
    #[error("`{operation}`: rank {rank} is gone: {reason}; the other ranks cannot go on")]
    RankGone {
        /// Operation that needed it.
        operation: &'static str,
        /// The rank.
        rank: usize,
        /// What became of it.
        reason: &'static str,
    },
    /// A rank that met an error of its own, in an operation in which the others need it.
    #[error("rank {rank} failed: {reason}; the other ranks cannot go on")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Its error, in words.
        reason: String,
    },
    /// A rank that did not come to an operation within the deadline.
    #[error(
        "`{operation}`: rank {rank} did not come within {seconds} s; it hangs, died, or makes other calls (the deadline is an option)"
    )]
    RankLate {
        /// Operation that waited.
        operation: &'static str,
        /// The rank, the lowest if several are missing.
        rank: usize,
        /// Deadline in seconds.
        seconds: f64,
    },
    /// A rank that asked for something else than the others.
    #[error(
        "`{operation}`: rank {rank} has {what} {got}, the others {expected}; all ranks must make the same calls in the same order"
    )]
    Disagreement {
        /// Operation of the others.
        operation: &'static str,
        /// Who disagrees.
        rank: usize,
        /// About what.
        what: &'static str,
        /// What the others have.
        expected: String,
        /// What it has.
        got: String,
    },
    /// A transport that this build, machine or process cannot use.
    #[error("transport `{transport}`: {reason}; {remedy}")]
    Unavailable {
        /// Name of the transport.
        transport: &'static str,
        /// Why not.
        reason: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// An argument that the operation does not take, a tensor or any other (V1). Nothing has run.
    #[error("`{operation}`: `{argument}` must be {expected}, got {got}")]
    BadArgument {
        /// Operation.
        operation: &'static str,
        /// Argument.
        argument: String,
        /// What is possible.
        expected: String,
        /// What came.
        got: String,
    },
}

impl Error {
    /// An argument that does not fit.
    pub(crate) fn argument(
        operation: &'static str,
        argument: impl Into<String>,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Error {
        let (argument, expected) = (argument.into(), expected.into());
        Error::BadArgument { operation, argument, expected, got: got.to_string() }
    }

    /// Whether it is this rank's own: the others know of it only what they are told.
    pub fn is_own(&self) -> bool {
        use Error::{BadArgument, Device, Unavailable};
        matches!(self, Device(_) | BadArgument { .. } | Unavailable { .. })
    }
}

#[cfg(feature = "mpi")]
impl Error {
    /// The same, met again by another operation.
    pub(crate) fn at(&self, operation: &'static str) -> Error {
        let mut error = self.clone();
        match &mut error {
            Error::RankGone { operation: old, .. }
            | Error::RankLate { operation: old, .. }
            | Error::Disagreement { operation: old, .. } => *old = operation,
            _ => {}
        }
        error
    }
}

/// One kind of error for whatever does not fit, whoever found it.
impl From<meristem_device::Error> for Error {
    fn from(error: meristem_device::Error) -> Self {
        use meristem_device::Error::{Mismatch, Overlap};
        match error {
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

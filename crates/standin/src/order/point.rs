//! Points in streams.

/// A point in a stream. It is done when `at` commands of the stream are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamPoint {
    /// Handle of the stream.
    pub(crate) stream: u64,
    /// Number of commands.
    pub(crate) at: u64,
}

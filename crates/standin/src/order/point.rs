//! Places in streams.

/// A place in a stream: done when so many of its commands are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    /// Handle of the stream.
    pub(crate) stream: u64,
    /// Number of commands.
    pub(crate) at: u64,
}

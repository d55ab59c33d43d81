//! Kinds of access to memory.

/// Kind of access of a launch to a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
}

//! Kinds of access of a launch to memory.

/// Kind of access of a launch to a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AccessKind {
    Read,
    Write,
}

/// Number of arguments of a launch stored without an allocation.
pub(crate) const INLINE_ARGS: usize = 8;

//! Reports of races (S3).

use std::fmt;
use std::ops::Range;
use std::panic::Location;

use super::Owner;
use super::sync::Arc;

/// One of the two accesses of a [`Race`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RaceAccess {
    /// The operation.
    pub operation: &'static str,
    /// Call site of the operation.
    pub site: &'static Location<'static>,
    /// Its stream.
    pub stream: Arc<str>,
    /// Its number in its stream, from 1.
    pub seq: u64,
    /// Its number among all submissions of the device, from 1.
    pub order: u64,
    /// Whether it writes.
    pub writes: bool,
    /// Call site that allocated the tensor's memory.
    pub origin: &'static Location<'static>,
    /// Owner of the memory.
    pub owner: Owner,
}

/// Kind of a race.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RaceKind {
    /// Two accesses to one tensor's memory, one of which writes.
    Unordered,
    /// The second access is to memory that was reused while the first access may still be running.
    UseAfterFree {
        /// The last submission before the first tensor's memory was freed.
        freed_after: u64,
    },
    /// The host takes the result of a read-back whose copy, the first access, may not have ended.
    /// The second access is the host's: its stream is `host`, its number 0.
    HostRead,
}

/// Two accesses to the same bytes without an order between them (S3). The first was submitted; the
/// second was refused, and did not run.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Race {
    /// Kind of the race.
    pub kind: RaceKind,
    /// The access that was submitted earlier.
    pub first: RaceAccess,
    /// The access that was refused.
    pub second: RaceAccess,
    /// Bytes of the memory block that both touch.
    pub bytes: Range<usize>,
}

impl fmt::Display for RaceAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RaceAccess { operation, site, stream, seq, order, writes, .. } = self;
        let does = if *writes { "writes" } else { "reads" };
        write!(
            f,
            "`{operation}` at {site} {does} on stream `{stream}` (its #{seq}, submission {order})"
        )
    }
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Race { kind, first, second, bytes } = self;
        let (owner, origin) = (first.owner, first.origin);
        let Range { start, end } = bytes;
        match kind {
            RaceKind::Unordered => write!(
                f,
                "race: {second}, while {first}; both touch bytes {start}..{end} of memory made at \
                 {origin} ({owner})"
            )?,
            RaceKind::UseAfterFree { freed_after } => write!(
                f,
                "use after free: {second}, to bytes {start}..{end} of memory made at {} ({}), \
                 while {first} still uses them as memory made at {origin} ({owner}), freed after \
                 submission {freed_after}; it was handed out again too early",
                second.origin, second.owner
            )?,
            RaceKind::HostRead => {
                return write!(
                    f,
                    "race: the host takes the result of `{}` at {}, while {first}; the host does \
                     not wait for `{}` up to #{}; use event.synchronize() or \
                     stream.synchronize() before",
                    second.operation, second.site, first.stream, first.seq
                );
            }
        }
        write!(
            f,
            "; stream `{}` does not wait for `{}` up to #{}; use tensor.on(&stream) or \
             stream.wait(&event)",
            second.stream, first.stream, first.seq
        )
    }
}

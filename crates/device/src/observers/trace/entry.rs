//! Entries of the trace's lanes: recorded events.

use std::borrow::Cow;
use std::panic::Location;

use crate::ground::Owner;
use crate::ground::sync::Arc;
use crate::hooks::{Category, LaunchCall};

/// Process and thread of an event in the format.
#[derive(Clone, Copy)]
pub(super) struct TracePlace {
    pub(super) process: u64,
    pub(super) lane: u64,
}

/// A recorded event. Times are nanoseconds of the recorder's clock.
pub(super) enum TraceEntry {
    /// The lane's name.
    Name(Box<str>),
    /// The name of the lane's process.
    Process(Box<str>),
    /// A command of a stream that ran.
    Work(Worked),
    /// A stream's wait for another.
    Wait(Waited),
    /// A host span begins.
    Begin {
        at: u64,
        name: Cow<'static, str>,
        category: Category,
        site: Option<&'static Location<'static>>,
    },
    /// The last host span that began ends.
    End { at: u64 },
    /// The bytes of an owner changed.
    Memory { at: u64, owner: Owner, bytes: usize },
}

pub(super) struct Worked {
    /// Time of the call.
    pub(super) called: u64,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) operation: &'static str,
    pub(super) site: &'static Location<'static>,
    pub(super) call: Arc<LaunchCall>,
    /// Number of the command in its stream.
    pub(super) seq: u64,
    /// Whether it was dropped because a kernel before it panicked.
    pub(super) dropped: bool,
}

pub(super) struct Waited {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) seq: u64,
    /// Lane of the producer, if it is in this trace.
    pub(super) producer: Option<TracePlace>,
    pub(super) producer_name: Arc<str>,
    /// The producer's command that had to be done.
    pub(super) producer_seq: u64,
}

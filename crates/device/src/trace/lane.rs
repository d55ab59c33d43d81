//! Lanes: a bounded event buffer per stream and per host thread.

use super::Recorder;
use super::event::Place;
use super::span::Category;
use super::writer::Signal;
use crate::ground::sync::{Arc, AtomicU64, Mutex, Ordering, lock};
use crate::ground::{DType, MemoryFormat, Shape, Use};
use crate::hazard::Access;
use crate::tensor::Tensor;
use crate::work::Work;
use crate::{Owner, args};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::panic::Location;

/// Events that a lane holds between two visits of the writer.
const ENTRIES_MAX: usize = 1 << 16;

/// A recorded event. Times are nanoseconds of the recorder's clock.
pub(super) enum Entry {
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
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) operation: &'static str,
    pub(super) site: &'static Location<'static>,
    pub(super) detail: Box<Detail>,
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
    pub(super) producer: Option<Place>,
    pub(super) producer_name: Arc<str>,
    /// The producer's command that had to be done.
    pub(super) producer_seq: u64,
}

/// Details of a launch, recorded at its call; stored with it.
pub(crate) struct Detail {
    pub(super) category: Category,
    /// Time of the call.
    pub(super) asked: u64,
    pub(super) arguments: SmallVec<[Argument; args::INLINE_ARGS]>,
}

pub(super) struct Argument {
    pub(super) usage: Use,
    pub(super) dtype: DType,
    pub(super) shape: Shape,
    pub(super) format: MemoryFormat,
}

impl Detail {
    pub(crate) fn new(lane: &Lane, category: Category, tensors: &[(&Tensor, Use)]) -> Box<Detail> {
        let argument = |&(tensor, usage): &(&Tensor, Use)| {
            let (dtype, shape, format) = (tensor.dtype(), tensor.shape(), tensor.format());
            Argument { usage, dtype, shape, format }
        };
        let arguments = tensors.iter().map(argument).collect();
        Box::new(Detail { category, asked: lane.recorder.now(), arguments })
    }
}

/// A lane of the trace. Written by one thread at a time: the worker that has the stream, or the
/// host thread. The lock is for the writer, which takes it a few times a second.
pub(crate) struct Lane {
    pub(super) recorder: Arc<Recorder>,
    pub(super) process: u64,
    pub(super) id: u64,
    buffer: Mutex<Buffer>,
    /// Time at which the stream began to wait for another; 0 when it does not wait.
    waiting: AtomicU64,
}

#[derive(Default)]
pub(super) struct Buffer {
    pub(super) entries: Vec<Entry>,
    pub(super) dropped: u64,
}

impl Lane {
    pub(super) fn new(recorder: Arc<Recorder>, process: u64, id: u64) -> Self {
        Lane { recorder, process, id, buffer: Mutex::default(), waiting: AtomicU64::new(0) }
    }

    /// Adds an entry; returns whether there was room. The end of a recorded span always has room.
    pub(super) fn push(&self, entry: Entry) -> bool {
        if !self.recorder.is_on() {
            return false;
        }
        let mut buffer = lock(&self.buffer);
        let fits = buffer.entries.len() < ENTRIES_MAX || matches!(entry, Entry::End { .. });
        match fits {
            true => buffer.entries.push(entry),
            false => buffer.dropped += 1,
        }
        let hurry = buffer.entries.len() == ENTRIES_MAX / 2;
        drop(buffer);
        if hurry {
            // If there is no room, the writer has been notified already.
            let _ = self.recorder.signal.try_send(Signal::Flush);
        }
        fits
    }

    pub(super) fn place(&self) -> Place {
        Place { process: self.process, lane: self.id }
    }

    /// Takes all entries since the last call; `empty` replaces them.
    pub(super) fn take(&self, empty: Vec<Entry>) -> Buffer {
        let fresh = Buffer { entries: empty, dropped: 0 };
        std::mem::replace(&mut *lock(&self.buffer), fresh)
    }

    /// The stream has reached a wait; if it was parked, not for the first time.
    pub(crate) fn wait_begins(&self) {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            self.waiting.store(self.recorder.now().max(1), Ordering::Relaxed);
        }
    }

    /// The wait is over; it was command `seq`.
    pub(crate) fn wait_ends(&self, access: &Access, seq: u64) {
        let start = self.waiting.swap(0, Ordering::Relaxed);
        let stream = &access.stream;
        let same_trace = |lane: &&Arc<Lane>| Arc::ptr_eq(&lane.recorder, &self.recorder);
        self.push(Entry::Wait(Waited {
            start,
            end: self.recorder.now(),
            seq,
            producer: stream.lane().filter(same_trace).map(|lane| lane.place()),
            producer_name: stream.name.clone(),
            producer_seq: access.seq,
        }));
    }

    /// The bytes of an owner changed.
    pub(crate) fn memory(&self, owner: Owner, bytes: usize) {
        self.push(Entry::Memory { at: self.recorder.now(), owner, bytes });
    }
}

/// A command of a stream that is running.
pub(crate) struct Running<'a> {
    lane: &'a Lane,
    worked: Option<Worked>,
}

impl<'a> Running<'a> {
    /// Begins a command `seq`, before the work runs (`dropped`: is dropped).
    pub(crate) fn start(lane: &'a Lane, work: &mut Work, seq: u64, dropped: bool) -> Self {
        let (operation, site) = (work.operation(), work.site());
        let worked = work.take_detail().map(|detail| {
            let start = lane.recorder.now();
            Worked { start, end: start, operation, site, detail, seq, dropped }
        });
        Running { lane, worked }
    }

    /// Ends it after the work ran, and before any thread can know.
    pub(crate) fn end(self) {
        if let Some(worked) = self.worked {
            let end = self.lane.recorder.now();
            self.lane.push(Entry::Work(Worked { end, ..worked }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::sync_channel;

    #[test]
    fn a_full_lane_drops_and_counts_but_ends_what_it_began() {
        let (signal, signals) = sync_channel(1);
        let recorder = Arc::new(Recorder {
            id: 0,
            start: std::time::Instant::now(),
            on: AtomicBool::new(true),
            lanes: Mutex::default(),
            next_lane: AtomicU64::new(0),
            next_process: AtomicU64::new(0),
            signal,
        });
        let lane = Lane::new(recorder.clone(), 1, 1);
        let begin =
            || Entry::Begin { at: 0, name: "x".into(), category: Category::Scope, site: None };
        assert!(lane.push(begin()));
        for bytes in 1..ENTRIES_MAX {
            lane.memory(Owner::Other, bytes);
        }
        // The writer was notified when half was full, and once.
        assert!(matches!(signals.try_recv(), Ok(Signal::Flush)));
        assert!(signals.try_recv().is_err());
        assert!(!lane.push(begin()));
        assert!(lane.push(Entry::End { at: 1 }));
        let buffer = lane.take(Vec::new());
        assert_eq!((buffer.entries.len(), buffer.dropped), (ENTRIES_MAX + 1, 1));
        assert!(lane.push(begin()));
        recorder.on.store(false, Ordering::Relaxed);
        assert!(!lane.push(begin()));
        assert_eq!(lane.take(Vec::new()).entries.len(), 1);
    }
}

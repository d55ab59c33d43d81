//! The recorder of a trace and its lanes: a bounded event buffer per stream and per host thread.

use std::sync::mpsc::SyncSender;
use std::time::Instant;

use super::entry::{TraceEntry, TracePlace, Waited, Worked};
use crate::ground::Owner;
use crate::ground::sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering, lock};
use crate::hooks::{CommandPosition, FinishedLaunch};

/// Events that a lane holds between two visits of the writer.
const ENTRIES_MAX: usize = 1 << 16;
/// Number of the host's process in the file; devices follow.
pub(super) const HOST_PROCESS: u64 = 1;
/// Number of the first lane: beyond the numbers of processes, as a viewer takes a thread with its
/// process's number for the main thread.
pub(super) const FIRST_LANE: u64 = 1001;

/// A request to the writer.
pub(super) enum Signal {
    /// A lane is filling up.
    Flush,
    /// The trace ends.
    End,
}

/// State of a trace, shared by the lanes and the writer.
pub(super) struct Recorder {
    /// Unique in this process.
    pub(super) id: u64,
    pub(super) start: Instant,
    pub(super) on: AtomicBool,
    pub(super) lanes: Mutex<Vec<Arc<TraceLane>>>,
    pub(super) next_lane: AtomicU64,
    pub(super) next_process: AtomicU64,
    pub(super) signal: SyncSender<Signal>,
}

impl Recorder {
    /// Nanoseconds since the trace began.
    pub(super) fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Nanoseconds from the trace's beginning to this moment, 0 for an earlier one.
    fn moment(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.start).as_nanos() as u64
    }

    pub(super) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// A new lane of a process. Its name is its first entry.
    pub(super) fn lane(self: &Arc<Self>, process: u64, name: &str) -> Arc<TraceLane> {
        let id = self.next_lane.fetch_add(1, Ordering::Relaxed);
        let lane = Arc::new(TraceLane::new(self.clone(), process, id));
        lane.push(TraceEntry::Name(name.into()));
        lock(&self.lanes).push(lane.clone());
        lane
    }
}

/// A lane of the trace. Written by one thread at a time: the worker that has the stream (of a CUDA
/// stream, a thread that holds its lock), the host thread, or, for the memory in use, a thread that
/// holds the pool's lock. The lock here is for the writer, which takes it a few times a second.
pub(super) struct TraceLane {
    pub(super) recorder: Arc<Recorder>,
    pub(super) process: u64,
    pub(super) id: u64,
    buffer: Mutex<Buffer>,
    /// Time at which the stream began to wait for another; 0 when it does not wait.
    waiting: AtomicU64,
}

#[derive(Default)]
pub(super) struct Buffer {
    pub(super) entries: Vec<TraceEntry>,
    pub(super) dropped: u64,
}

impl TraceLane {
    pub(super) fn new(recorder: Arc<Recorder>, process: u64, id: u64) -> Self {
        TraceLane { recorder, process, id, buffer: Mutex::default(), waiting: AtomicU64::new(0) }
    }

    /// Adds an entry; returns whether there was room. The end of a recorded span always has room.
    pub(super) fn push(&self, entry: TraceEntry) -> bool {
        if !self.recorder.is_on() {
            return false;
        }
        let mut buffer = lock(&self.buffer);
        let fits = buffer.entries.len() < ENTRIES_MAX || matches!(entry, TraceEntry::End { .. });
        if fits {
            buffer.entries.push(entry)
        } else {
            buffer.dropped += 1
        }
        let hurry = buffer.entries.len() == ENTRIES_MAX / 2;
        drop(buffer);
        if hurry {
            // If there is no room, the writer has been notified already.
            let _ = self.recorder.signal.try_send(Signal::Flush);
        }
        fits
    }

    pub(super) fn place(&self) -> TracePlace {
        TracePlace { process: self.process, lane: self.id }
    }

    /// Takes all entries since the last call; `empty` replaces them.
    pub(super) fn take(&self, empty: Vec<TraceEntry>) -> Buffer {
        let fresh = Buffer { entries: empty, dropped: 0 };
        std::mem::replace(&mut *lock(&self.buffer), fresh)
    }

    /// The stream has reached a wait. Only the first call for a wait has an effect; a parked stream
    /// calls again when it continues.
    pub(super) fn wait_begins(&self) {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            self.waiting.store(self.recorder.now().max(1), Ordering::Relaxed);
        }
    }

    /// The wait is over; it was command `seq`.
    pub(super) fn wait_ends(&self, seq: u64, producer: CommandPosition<'_>) {
        let start = self.waiting.swap(0, Ordering::Relaxed);
        let same_trace = |lane: &&Arc<TraceLane>| Arc::ptr_eq(&lane.recorder, &self.recorder);
        let lane = producer.stream.state::<Arc<TraceLane>>().filter(same_trace);
        self.push(TraceEntry::Wait(Waited {
            start,
            end: self.recorder.now(),
            seq,
            producer: lane.map(|lane| lane.place()),
            producer_name: producer.stream.name.clone(),
            producer_seq: producer.seq,
        }));
    }

    /// Command `ran` has ended.
    pub(super) fn work_ends(&self, ran: &FinishedLaunch<'_>) {
        let &FinishedLaunch { at, operation, site, call, start, end, dropped } = ran;
        let moment = |at| self.recorder.moment(at);
        let (called, start, end) = (moment(call.at), moment(start), moment(end));
        let (call, seq) = (call.clone(), at.seq);
        let worked = Worked { called, start, end, operation, site, call, seq, dropped };
        self.push(TraceEntry::Work(worked));
    }

    /// The bytes of an owner changed.
    pub(super) fn memory(&self, owner: Owner, bytes: usize) {
        self.push(TraceEntry::Memory { at: self.recorder.now(), owner, bytes });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{TryRecvError, sync_channel};

    use super::*;
    use crate::hooks::Category;

    #[test]
    fn a_full_lane_drops_and_counts_but_ends_what_it_began() {
        let (signal, signals) = sync_channel(1);
        let recorder = Arc::new(Recorder {
            id: 0,
            start: Instant::now(),
            on: AtomicBool::new(true),
            lanes: Mutex::default(),
            next_lane: AtomicU64::new(0),
            next_process: AtomicU64::new(0),
            signal,
        });
        let lane = TraceLane::new(recorder.clone(), 1, 1);
        let begin =
            || TraceEntry::Begin { at: 0, name: "x".into(), category: Category::Scope, site: None };
        assert!(lane.push(begin()));
        for bytes in 1..ENTRIES_MAX {
            lane.memory(Owner::Other, bytes);
        }
        // The writer was notified when half was full, and once.
        assert!(matches!(signals.try_recv(), Ok(Signal::Flush)));
        assert!(matches!(signals.try_recv(), Err(TryRecvError::Empty)));
        assert!(!lane.push(begin()));
        assert!(lane.push(TraceEntry::End { at: 1 }));
        let buffer = lane.take(Vec::new());
        assert_eq!((buffer.entries.len(), buffer.dropped), (ENTRIES_MAX + 1, 1));
        assert!(lane.push(begin()));
        recorder.on.store(false, Ordering::Relaxed);
        assert!(!lane.push(begin()));
        assert_eq!(lane.take(Vec::new()).entries.len(), 1);
    }
}

//! Traces (H8): a timeline of events in the JSON trace event format that Perfetto and
//! `chrome://tracing` open.
//!
//! Each stream and each host thread has its own lane (`recorder`), a bounded buffer, so that
//! recording takes no contended lock; entries are values (`entry`). A writer thread empties the
//! lanes a few times a second into a file that is valid JSON after every write (`writer`, `file`,
//! `event`). Host spans are in `span`. Nothing here waits for the device; events without room are
//! dropped and counted.

mod entry;
mod event;
mod file;
mod recorder;
mod span;
mod writer;

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Instant;

use entry::TraceEntry;
use recorder::{FIRST_LANE, HOST_PROCESS, Recorder, Signal, TraceLane};
pub use span::TraceSpan;
use writer::TraceWriter;

use crate::ground::sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering, lock};
use crate::ground::{Error, Owner, Result};
use crate::hooks::{
    Category, CommandPosition, DeviceObserver, FinishedLaunch, HostActivity, ObservedStream,
    ObserverState,
};

/// Default limit of events in a file: about 250 MB, as much as a viewer can load.
const EVENTS_MAX: u64 = 1_000_000;
/// A trace being written; pass it to [`DeviceOptions::trace`](crate::DeviceOptions::trace). A
/// handle: clones are the same trace, and any number of devices may share one. It ends with
/// [`finish`](Trace::finish), or when the last handle is dropped.
///
/// A lane per stream shows launches (with operation, call site, arguments, and time in the queue),
/// copies, and, on a CPU device, waits for other streams, with an arrow from the awaited work. A
/// lane per host thread shows waits for the device, and [spans](Trace::span). Counters show the
/// bytes of each owner. All times are of one monotonic clock.
#[derive(Clone)]
pub struct Trace(Arc<TraceHandle>);

/// Summary of a finished trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TraceReport {
    /// Events in the file: slices, spans and samples of the memory in use.
    pub events: u64,
    /// Events that found no room: the file's limit was reached, or they came faster than they could
    /// be written.
    pub dropped: u64,
}

struct TraceHandle {
    path: PathBuf,
    recorder: Arc<Recorder>,
    writer: Mutex<WriterThread>,
}

enum WriterThread {
    Running(JoinHandle<(TraceReport, Result<()>)>),
    Ended(TraceReport),
}

impl Trace {
    /// Begins a trace in this file, which is overwritten, and is valid JSON from now on. It gets at
    /// most a million events.
    ///
    /// # Errors
    /// [`Error::Trace`] if the file cannot be written, or no thread can be started.
    pub fn create(path: impl AsRef<Path>) -> Result<Trace> {
        Trace::create_bounded(path, EVENTS_MAX)
    }

    /// Begins a trace like [`create`](Trace::create), with at most `events_max` events, not
    /// counting names of lanes, ends of spans, and arrows.
    ///
    /// # Errors
    /// The errors of [`create`](Trace::create).
    pub fn create_bounded(path: impl AsRef<Path>, events_max: u64) -> Result<Trace> {
        static NEXT_ID: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let path = path.as_ref();
        let failed = |source| Error::Trace { path: path.to_owned(), source };
        let (signal, signals) = sync_channel(1);
        let recorder = Arc::new(Recorder {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            start: Instant::now(),
            on: AtomicBool::new(true),
            lanes: Mutex::default(),
            next_lane: AtomicU64::new(FIRST_LANE),
            next_process: AtomicU64::new(HOST_PROCESS + 1),
            signal,
        });
        let writer = TraceWriter::new(recorder.clone(), path, events_max).map_err(failed)?;
        let thread = std::thread::Builder::new().name("trace".into());
        let thread = thread.spawn(move || writer.work(&signals)).map_err(failed)?;
        let writer = Mutex::new(WriterThread::Running(thread));
        Ok(Trace(Arc::new(TraceHandle { path: path.to_owned(), recorder, writer })))
    }

    /// Begins a span on the calling thread's lane, which ends when it is dropped. The spans of a
    /// thread must be dropped in the reverse order of their beginning, so that they nest.
    pub fn span(&self, name: impl Into<Cow<'static, str>>) -> TraceSpan {
        TraceSpan::begin(&self.0.recorder, name.into(), Category::Scope, None)
    }

    /// Ends the trace: events recorded so far are written, and later ones are ignored. Waits for
    /// the writer, not for a device. A second call returns the same report.
    ///
    /// # Errors
    /// [`Error::Trace`] if the file could not be written, at the first call only; the file then has
    /// the events written before.
    pub fn finish(&self) -> Result<TraceReport> {
        self.0.finish()
    }

    /// A new process of the trace: a device.
    pub(crate) fn process(&self, name: &str) -> Process {
        let recorder = self.0.recorder.clone();
        let id = recorder.next_process.fetch_add(1, Ordering::Relaxed);
        let memory = recorder.lane(id, "memory");
        memory.push(TraceEntry::Process(name.into()));
        Process { trace: self.clone(), id, memory }
    }
}

impl TraceHandle {
    fn finish(&self) -> Result<TraceReport> {
        let mut state = lock(&self.writer);
        let (report, result) =
            match std::mem::replace(&mut *state, WriterThread::Ended(TraceReport::default())) {
                WriterThread::Ended(report) => (report, Ok(())),
                WriterThread::Running(thread) => {
                    // The writer receives until it gets `End`.
                    let _ = self.recorder.signal.send(Signal::End);
                    thread.join().unwrap_or_else(|_| {
                        let (path, source) =
                            (self.path.clone(), io::Error::other("its writer panicked"));
                        (TraceReport::default(), Err(Error::Trace { path, source }))
                    })
                }
            };
        *state = WriterThread::Ended(report);
        result.map(|()| report)
    }
}

impl Drop for TraceHandle {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            tracing::warn!(%error, "the trace is incomplete");
        }
    }
}

impl PartialEq for Trace {
    /// Whether both are the same trace.
    fn eq(&self, other: &Trace) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Trace {}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trace({})", self.0.recorder.id)
    }
}

/// A device's part of a trace.
pub(crate) struct Process {
    trace: Trace,
    id: u64,
    /// Samples of the memory in use.
    memory: Arc<TraceLane>,
}

impl Process {
    /// The trace.
    pub(crate) fn trace(&self) -> &Trace {
        &self.trace
    }
}

impl DeviceObserver for Process {
    fn stream_opened(&self, name: &Arc<str>) -> Option<ObserverState> {
        Some(Box::new(self.trace.0.recorder.lane(self.id, name)))
    }

    fn memory_changed(&self, owner: Owner, bytes: usize) {
        self.memory.memory(owner, bytes);
    }

    fn wait_begins(&self, stream: &ObservedStream) {
        if let Some(lane) = stream.state::<Arc<TraceLane>>() {
            lane.wait_begins();
        }
    }

    fn wait_ended(&self, at: CommandPosition<'_>, producer: CommandPosition<'_>) {
        if let Some(lane) = at.stream.state::<Arc<TraceLane>>() {
            lane.wait_ends(at.seq, producer);
        }
    }

    fn watches_runs(&self) -> bool {
        true
    }

    fn launch_ran(&self, ran: &FinishedLaunch<'_>) {
        if let Some(lane) = ran.at.stream.state::<Arc<TraceLane>>() {
            lane.work_ends(ran);
        }
    }

    fn host_begins(&self, activity: HostActivity) -> Option<Box<dyn Any>> {
        let HostActivity { operation, category, site } = activity;
        Some(Box::new(TraceSpan::begin(&self.trace.0.recorder, operation.into(), category, site)))
    }
}

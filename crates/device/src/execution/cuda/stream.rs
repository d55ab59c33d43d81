//! CUDA streams: the streams of the driver, which carry out the streams of a device.
//!
//! A device has a few of them, and assigns its streams to them in turn. There is no thread that
//! waits for the device: progress is observed through events, on demand.
//!
//! ```text
//! issue(task):  sequence += 1; enqueue(task); if it has a completion, append it to `pending`
//! is_done(n):   completed >= n, or poll(n) and look again
//! poll(n):      unless a recorded event is at or after n, record one at the end of the stream;
//!               for each recorded event that is reached, from the oldest on:
//!                   complete the pending tasks up to its sequence number
//!                   completed = its sequence number
//! ```
//!
//! Recording events only on demand keeps the common path, thousands of launches between two waits,
//! free of calls of the driver other than the launches.
//!
//! Invariants
//! - Every issued task has a sequence number, in the order of issue. The device completes tasks in
//!   that order.
//! - Progress is observed only through events. An event is recorded when a thread queries a
//!   sequence number after the last recorded event. It covers everything issued until then.
//! - A task's [`Completion`] (its download is delivered, its staging memory is free again) is run
//!   under the stream's lock before `completed` reaches its sequence number. So a thread that sees
//!   a task completed sees its results on the host.
//! - Device memory outlives the work that uses it: a block returns to the system only when all
//!   accesses to it are done (`memory::pool`), and a pending task holds its staging memory until it
//!   is complete.
//! - A failed call, or a call that reports an earlier failure, fails the device. Every task then
//!   counts as completed, and every result as lost. Before that the device may be suspended: then
//!   no task completes.

use std::collections::VecDeque;
use std::fmt;
use std::panic::Location;
use std::time::{Duration, Instant};

use super::context::CudaContext;
use super::driver::{Called, CudaEvent, RawStream};
use super::enqueue::{Completion, Enqueue};
use super::graph::{Branch, CudaGraph};
use super::staging::{StagingBuffer, StagingRing};
use super::task::CudaTask;
use crate::execution::call::KernelSource;
use crate::ground::sync::{Arc, AtomicSeq, Mutex, MutexGuard, Ordering, lock};
use crate::ground::{DeviceId, Error, Result};

/// Number of pending tasks at which a stream polls the device, to complete the tasks that have run.
const POLL_AT: usize = 64;
/// Bytes of staging memory in flight above which an upload waits for the oldest task. Uploads from
/// a ring do not count.
const STAGED_MAX: usize = 256 << 20;

/// Largest number of graphs that a stream keeps: enough for some batch sizes, and for the phases of
/// a few fleet topologies.
const GRAPHS_MAX: usize = 64;

/// A callback for the completion of a task, with the times at which it began and ended.
pub(crate) type OnComplete = Box<dyn FnOnce(Instant, Instant) + Send>;

/// A stream of the driver.
pub(crate) struct CudaStream {
    context: Arc<CudaContext>,
    raw: RawStream,
    /// Sequence number of the latest task known to be completed.
    completed: AtomicSeq,
    state: Mutex<CudaStreamState>,
    /// Graphs that were built, the latest used last. A graph belongs to one stream, because
    /// launches of a graph must follow one another.
    graphs: Mutex<Vec<Arc<CudaGraph>>>,
}

#[derive(Default)]
struct CudaStreamState {
    /// Sequence number of the latest task.
    issued: u64,
    /// Recorded events that are not known to be reached, in order.
    recorded: VecDeque<RecordedEvent>,
    /// Tasks with a completion to run, in order.
    pending: VecDeque<PendingTask>,
    /// Bytes of staging memory of the pending tasks, without memory of rings.
    staged: usize,
    /// Events for reuse, without timing.
    spare: Vec<CudaEvent>,
}

/// A recorded event. It is reached when the task of this sequence number is completed.
struct RecordedEvent {
    sequence: u64,
    event: Arc<CudaEvent>,
}

/// An issued task, with the action to run at its completion.
struct PendingTask {
    sequence: u64,
    completion: Completion,
    /// Events before and after the work, and the callback that gets their times.
    timed: Option<(CudaEvent, Arc<CudaEvent>, OnComplete)>,
}

impl CudaStream {
    /// A new stream of a device.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`] if the driver gives no stream.
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>> {
        let open = || {
            context.bind()?;
            RawStream::new()
        };
        let device = context.id;
        let raw = open().map_err(|source| Error::Cuda { device, source })?;
        let (completed, state, graphs) = (AtomicSeq::new(0), Mutex::default(), Mutex::default());
        Ok(Arc::new(CudaStream { context: context.clone(), raw, completed, state, graphs }))
    }

    /// Compiles and loads kernels; returns at once if they are loaded.
    ///
    /// # Errors
    /// [`Error::Cuda`]; any error of `before`, which is called if some are not loaded yet.
    pub(crate) fn load(
        &self,
        sources: &[&'static KernelSource],
        before: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if sources.iter().all(|source| self.context.has_module(source)) {
            return Ok(());
        }
        before()?;
        let load = |source| self.context.module(source).map(drop);
        let loaded = sources.iter().copied().try_for_each(load);
        loaded.map_err(|source| Error::Cuda { device: self.context.id, source })
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The driver's handle.
    pub(super) fn handle(&self) -> u64 {
        self.raw.raw().expose_provenance() as u64
    }

    pub(super) fn device(&self) -> DeviceId {
        self.context.id
    }

    /// Staging memory for an upload of `bytes` bytes. Waits for earlier copies while more than
    /// [`STAGED_MAX`] bytes are in flight, and calls `before_wait` before each wait. The caller
    /// holds no lock.
    ///
    /// # Errors
    /// [`Error::Cuda`]; any error of `before_wait`.
    pub(super) fn staging(
        &self,
        bytes: usize,
        before_wait: impl Fn() -> Result<()>,
    ) -> Result<StagingBuffer> {
        while !self.context.has_failed() {
            let oldest = {
                let state = lock(&self.state);
                let over = state.staged > STAGED_MAX;
                state.pending.front().filter(|_| over).map(|task| task.sequence)
            };
            let Some(oldest) = oldest else { break };
            before_wait()?;
            let device = self.context.id;
            tracing::debug!(%device, limit = STAGED_MAX, "an upload waits for staging memory");
            self.wait(oldest);
        }
        let device = self.context.id;
        self.context.bind().map_err(|source| Error::Cuda { device, source })?;
        Ok(StagingBuffer::new(&self.context, bytes))
    }

    /// A buffer of a ring for an upload on this stream. If all buffers are in use, calls
    /// `before_wait`, waits for the oldest upload from the ring, and then drops the result of
    /// `before_wait`. If the host holds all buffers, calls `before_growth` and adds a buffer to the
    /// ring. The caller holds no lock.
    ///
    /// # Errors
    /// [`Error::DeviceFailed`]; the errors of [`StagingRing::grow`], `before_wait` and
    /// `before_growth`.
    pub(super) fn take_staging<G>(
        &self,
        ring: &Arc<StagingRing>,
        before_wait: impl Fn() -> Result<G>,
        before_growth: impl Fn() -> Result<()>,
    ) -> Result<StagingBuffer> {
        loop {
            self.context.check()?;
            if let Some(free) = ring.take() {
                return Ok(free);
            }
            let of_ring = |task: &&PendingTask| {
                task.completion.staging.as_ref().is_some_and(|staging| staging.is_of(ring))
            };
            let oldest = lock(&self.state).pending.iter().find(of_ring).map(|task| task.sequence);
            match oldest {
                // `is_done` completes the upload, which returns its buffer to the ring.
                Some(oldest) if self.is_done(oldest) => {}
                Some(oldest) => {
                    let _waiting = before_wait()?;
                    self.wait(oldest);
                }
                // A buffer whose upload was completed in between is free.
                None => {
                    if let Some(free) = ring.take() {
                        return Ok(free);
                    }
                    before_growth()?;
                    return ring.grow();
                }
            }
        }
    }

    /// The graph of these branches. Calls `before` if the graph must be built, and `reclaim`, which
    /// may free memory, if there is no memory for it.
    ///
    /// # Errors
    /// [`Error::Cuda`]; any error of `before`.
    pub(super) fn graph(
        &self,
        branches: Vec<Branch>,
        before: impl FnOnce() -> Result<()>,
        reclaim: &dyn Fn(),
    ) -> Result<Arc<CudaGraph>> {
        if let Some(known) = self.known_graph(&branches) {
            return Ok(known);
        }
        before()?;
        let build = || {
            self.context.bind()?;
            CudaGraph::build((&self.context, &self.raw), branches.clone())
        };
        let built = build().or_else(|cause| {
            if !cause.is_out_of_memory() {
                return Err(cause);
            }
            reclaim();
            build()
        });
        let device = self.context.id;
        let graph = Arc::new(built.map_err(|source| Error::Cuda { device, source })?);
        let mut graphs = lock(&self.graphs);
        graphs.push(graph.clone());
        let oldest = (graphs.len() > GRAPHS_MAX).then(|| graphs.remove(0));
        // After the lock is released, because freeing a graph's memory may stop the device.
        drop(graphs);
        drop(oldest);
        Ok(graph)
    }

    /// A known graph of these branches, which becomes the latest.
    fn known_graph(&self, branches: &[Branch]) -> Option<Arc<CudaGraph>> {
        let mut graphs = lock(&self.graphs);
        let known = graphs.iter().position(|graph| graph.runs(branches))?;
        let graph = graphs.remove(known);
        graphs.push(graph.clone());
        Some(graph)
    }

    /// Whether the tasks up to `sequence` are known to be done, or were lost with the device.
    pub(super) fn has_completed(&self, sequence: u64) -> bool {
        self.completed.load(Ordering::Acquire) >= sequence || self.context.has_failed()
    }

    /// Whether the tasks up to `sequence` are done, or were lost with the device. Polls the device
    /// if necessary.
    pub(super) fn is_done(&self, sequence: u64) -> bool {
        self.has_completed(sequence) || {
            self.poll(&mut lock(&self.state), sequence);
            self.has_completed(sequence)
        }
    }

    /// Blocks until the tasks up to `sequence` are done, or the device has failed. The device needs
    /// no thread of this process to make progress.
    pub(super) fn wait(&self, sequence: u64) {
        while !self.has_completed(sequence) {
            if self.context.is_suspended() {
                self.context.await_reason();
                continue;
            }
            let Some(event) = self.event_after(&mut lock(&self.state), sequence) else { continue };
            if let Err(cause) = self.context.bind().and_then(|()| event.synchronize()) {
                self.context.fail("wait", Location::caller(), cause);
            }
            drop(event);
            self.poll(&mut lock(&self.state), sequence);
        }
    }

    /// Blocks until all tasks issued so far are done, or the device has failed; then pending tasks
    /// are lost.
    pub(crate) fn drain(&self) {
        let issued = lock(&self.state).issued;
        self.wait(issued);
        if self.context.has_failed() {
            // A failed device may still access memory of the pending tasks. If CUDA has given up
            // the device, this returns at once.
            let _ = self.context.bind().and_then(|()| self.raw.synchronize());
            let mut state = lock(&self.state);
            let lost = (std::mem::take(&mut state.pending), std::mem::take(&mut state.recorded));
            drop(state);
            drop(lost);
        }
    }

    /// An event that is reached after the tasks up to `sequence`; `None` if they are done or the
    /// device has failed.
    pub(super) fn event(&self, sequence: u64) -> Option<Arc<CudaEvent>> {
        if self.has_completed(sequence) {
            return None;
        }
        self.event_after(&mut lock(&self.state), sequence)
    }

    /// Issues a task after all earlier ones and after `events`; returns its sequence number, or
    /// the number of the latest task if there is neither a task nor an event. Waits for the device
    /// only for a copy through pageable memory, and for the first timed task of a device
    /// (`set_anchor`). An exchange waits until NCCL has enqueued it.
    pub(super) fn issue(
        &self,
        events: &[Arc<CudaEvent>],
        task: Option<CudaTask>,
        on_complete: Option<OnComplete>,
    ) -> u64 {
        let mut state = lock(&self.state);
        if events.is_empty() && task.is_none() {
            return state.issued;
        }
        state.issued += 1;
        let (operation, site) = match &task {
            Some(task) => (task.record().operation, task.record().site),
            None => ("wait", Location::caller()),
        };
        if let Err(cause) = self.try_issue(&mut state, events, task, on_complete) {
            self.context.fail(operation, site, cause);
        }
        if state.pending.len() >= POLL_AT {
            let issued = state.issued;
            self.poll(&mut state, issued);
        }
        state.issued
    }

    fn try_issue(
        &self,
        state: &mut CudaStreamState,
        events: &[Arc<CudaEvent>],
        task: Option<CudaTask>,
        on_complete: Option<OnComplete>,
    ) -> Called {
        if self.context.has_failed() || self.context.is_suspended() {
            return Ok(());
        }
        self.context.bind()?;
        for event in events {
            self.raw.wait(event)?;
        }
        let Some(task) = task else { return Ok(()) };
        let before = match on_complete {
            Some(_) => {
                self.set_anchor()?;
                Some(self.recorded(true)?)
            }
            None => None,
        };
        let mut completion = Completion::default();
        let enqueue = Enqueue { context: &self.context, stream: &self.raw };
        let enqueued = enqueue.task(task, &mut completion).and_then(|()| {
            let timed = before.zip(on_complete);
            timed
                .map(|(before, on_complete)| {
                    Ok((before, Arc::new(self.recorded(true)?), on_complete))
                })
                .transpose()
        });
        // Kept even after an error: a part of the task may be running.
        let (timed, result) = match enqueued {
            Ok(timed) => (timed, Ok(())),
            Err(cause) => (None, Err(cause)),
        };
        let kept = completion.staging.is_some() || completion.graph.is_some();
        if kept || completion.member.is_some() || timed.is_some() {
            state.staged += completion.staging.as_ref().map_or(0, StagingBuffer::limited_bytes);
            state.pending.push_back(PendingTask { sequence: state.issued, completion, timed });
        }
        result
    }

    /// A new event, recorded at the end of the stream.
    fn recorded(&self, timed: bool) -> Called<CudaEvent> {
        let event = CudaEvent::new(timed)?;
        event.record(&self.raw)?;
        Ok(event)
    }

    /// Sets the device's anchor, from which times are measured, if it is not set. Waits for the
    /// earlier work of the stream then.
    fn set_anchor(&self) -> Called {
        let mut anchor = lock(&self.context.anchor);
        if anchor.is_none() {
            let event = self.recorded(true)?;
            event.synchronize()?;
            *anchor = Some((Arc::new(event), Instant::now()));
        }
        Ok(())
    }

    /// A recorded event at or after `sequence`; `None` if the device has failed.
    fn event_after(&self, state: &mut CudaStreamState, sequence: u64) -> Option<Arc<CudaEvent>> {
        if let Some(recorded) = state.recorded.iter().find(|event| event.sequence >= sequence) {
            return Some(recorded.event.clone());
        }
        let spare = state.spare.pop();
        let record = || {
            self.context.bind()?;
            let Some(event) = spare else { return self.recorded(false) };
            event.record(&self.raw)?;
            Ok(event)
        };
        match record() {
            Ok(event) => {
                let event = Arc::new(event);
                state
                    .recorded
                    .push_back(RecordedEvent { sequence: state.issued, event: event.clone() });
                Some(event)
            }
            Err(cause) => {
                self.context.fail("record an event", Location::caller(), cause);
                None
            }
        }
    }

    /// Polls the recorded events, with one at or after `sequence` among them, and completes the
    /// tasks before the events that are reached.
    fn poll(&self, state: &mut MutexGuard<'_, CudaStreamState>, sequence: u64) {
        let state = &mut **state;
        if self.context.is_suspended() {
            return; // the stream lacks the exchange that failed, so nothing after it is done
        }
        // This may be the first call of this thread that uses the device: bind its context.
        if self.event_after(state, sequence).is_none() || self.context.bind().is_err() {
            return;
        }
        while let Some(recorded) = state.recorded.front() {
            match recorded.event.is_done() {
                Ok(false) => break,
                Ok(true) => {
                    let sequence = recorded.sequence;
                    let reached = state.recorded.pop_front();
                    state.spare.extend(reached.and_then(|reached| Arc::into_inner(reached.event)));
                    self.complete(state, sequence);
                    self.completed.store(sequence, Ordering::Release);
                }
                Err(cause) => {
                    self.context.fail("poll an event", Location::caller(), cause);
                    break;
                }
            }
        }
    }

    /// Completes the pending tasks up to `sequence`, which have run.
    fn complete(&self, state: &mut CudaStreamState, sequence: u64) {
        while state.pending.front().is_some_and(|task| task.sequence <= sequence) {
            let Some(PendingTask { completion, timed, .. }) = state.pending.pop_front() else {
                break;
            };
            state.staged -= completion.staging.as_ref().map_or(0, StagingBuffer::limited_bytes);
            completion.complete();
            if let Some((before, after, on_complete)) = timed {
                match self.times(&before, &after) {
                    Ok((start, end)) => on_complete(start, end),
                    Err(cause) => self.context.fail("measure time", Location::caller(), cause),
                }
            }
        }
    }

    /// The times of two reached events on the host's clock.
    fn times(&self, before: &CudaEvent, after: &Arc<CudaEvent>) -> Called<(Instant, Instant)> {
        let mut anchor = lock(&self.context.anchor);
        let Some((event, at)) = &*anchor else {
            let now = Instant::now();
            return Ok((now, now));
        };
        let since = |other: &CudaEvent| other.seconds_since(event);
        // An event of another stream may be before an anchor that was set later.
        let time = |seconds: f64| match Duration::from_secs_f64(seconds.abs()) {
            before if seconds < 0.0 => at.checked_sub(before).unwrap_or(*at),
            after => *at + after,
        };
        let (start, end) = (time(since(before)?), time(since(after)?));
        // The driver gives differences as f32 milliseconds, which are exact for short ones only.
        if end.saturating_duration_since(*at) > Duration::from_secs(1) {
            *anchor = Some((after.clone(), end));
        }
        Ok((start, end.max(start)))
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // Pending tasks are completed, or lost with the device.
        self.drain();
        if self.context.bind().is_ok() {
            if let Err(cause) = self.raw.synchronize() {
                self.context.fail("close", Location::caller(), cause);
            }
            self.raw.destroy();
        }
        *lock(&self.state) = CudaStreamState::default();
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaStream of {}", self.context.id)
    }
}

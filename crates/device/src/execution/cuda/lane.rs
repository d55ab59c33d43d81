//! Lanes: the real streams of a CUDA device, onto which its streams are dealt.
//!
//! Invariants
//! - Everything that is issued to a lane has a number, its ticket, in the order of issue; the
//!   device completes them in that order.
//! - How far the device is is known by events alone. One is recorded when somebody asks about a
//!   ticket that no recorded event covers, at the end of the lane as it is then.
//! - A landing of a ticket (its download is handed over, its staging memory is free again) happens
//!   before `completed` says so, under the lane's lock. So whoever sees a ticket completed sees the
//!   results on the host.
//! - Device memory outlives the work that uses it: a block returns to the system only when the
//!   accesses to it are done (`memory::pool`), and staging memory is held by a flight until it has
//!   landed.
//! - A failed call, or one that reports an earlier failure, fails the device. Every ticket then
//!   counts as completed, and every result as lost. Before that the device may be suspended: then
//!   no ticket completes.

use super::context::CudaContext;
use super::driver::{Called, CudaEvent, RawStream};
use super::enqueue::{Enqueue, Completion};
use super::graph::{Branch, CudaGraph};
use super::staging::StagingBuffer;
use super::task::CudaTask;
use crate::execution::call::Source;
use crate::ground::sync::{Arc, AtomicSeq, Mutex, MutexGuard, Ordering, lock};
use crate::ground::{DeviceId, Error, Result};
use std::collections::VecDeque;
use std::fmt;
use std::panic::Location;
use std::time::{Duration, Instant};

/// Flights at which the lane looks which of them have landed.
const LOOK_AT: usize = 64;
/// Bytes of staging memory in flight at which an upload waits for the oldest to land.
const STAGED_MAX: usize = 256 << 20;

/// Graphs that a lane keeps: some sizes of batches, and phases of a few topologies of fleets.
const GRAPHS_MAX: usize = 64;

/// Called when a work has run, with the times of its beginning and its end.
pub(crate) type OnComplete = Box<dyn FnOnce(Instant, Instant) + Send>;

/// A real stream.
pub(crate) struct CudaStream {
    context: Arc<CudaContext>,
    stream: RawStream,
    /// The latest ticket known to be completed.
    completed: AtomicSeq,
    state: Mutex<CudaStreamState>,
    /// Graphs that were launched last, the latest at the end. Of this lane, as launches of a graph
    /// must follow one another.
    graphs: Mutex<Vec<Arc<CudaGraph>>>,
}

#[derive(Default)]
struct CudaStreamState {
    /// The latest ticket.
    issued: u64,
    /// Recorded events that are not known to be reached, in order.
    marks: VecDeque<RecordedEvent>,
    /// Works whose landing somebody waits for, in order.
    flights: VecDeque<PendingTask>,
    /// Bytes of staging memory of the flights.
    staged: usize,
    /// Events for reuse, without time.
    spare: Vec<CudaEvent>,
    /// A reached event and the host's time of it, from which other times are measured.
    anchor: Option<(Arc<CudaEvent>, Instant)>,
}

/// A recorded event: reached when the ticket is completed.
struct RecordedEvent {
    ticket: u64,
    event: Arc<CudaEvent>,
}

/// A work with something to do when its ticket is completed.
struct PendingTask {
    ticket: u64,
    landing: Completion,
    /// Events before and after the work, and whom to tell.
    timed: Option<(CudaEvent, Arc<CudaEvent>, OnComplete)>,
}

impl CudaStream {
    /// A lane of a device.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`] if the driver gives no stream.
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>> {
        let open = || {
            context.bind()?;
            RawStream::new()
        };
        let device = context.id;
        let stream = open().map_err(|source| Error::Cuda { device, source })?;
        let (completed, state, graphs) = (AtomicSeq::new(0), Mutex::default(), Mutex::default());
        Ok(Arc::new(CudaStream { context: context.clone(), stream, completed, state, graphs }))
    }

    /// Compiles and loads kernels; returns at once if they are loaded.
    ///
    /// # Errors
    /// [`Error::Cuda`]; any error of `before`, which is called if some are not loaded yet.
    pub(crate) fn load(
        &self,
        sources: &[&'static Source],
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

    pub(super) fn device(&self) -> DeviceId {
        self.context.id
    }

    /// Staging memory for an upload of so many bytes. Waits for earlier copies if very much of it
    /// is in flight; the caller holds no lock.
    pub(super) fn staging(&self, bytes: usize) -> Called<StagingBuffer> {
        while !self.context.has_failed() {
            let oldest = {
                let state = lock(&self.state);
                let over = state.staged > STAGED_MAX;
                state.flights.front().filter(|_| over).map(|flight| flight.ticket)
            };
            let Some(oldest) = oldest else { break };
            self.wait(oldest);
        }
        self.context.bind()?;
        Ok(StagingBuffer::new(&self.context, bytes))
    }

    /// The graph of these branches. `before` is called if it must be built, and `reclaim` if there
    /// is no memory for it, which it may free.
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
            CudaGraph::build((&self.context, &self.stream), branches.clone())
        };
        let built = build().or_else(|cause| match cause.is_out_of_memory() {
            true => {
                reclaim();
                build()
            }
            false => Err(cause),
        });
        let device = self.context.id;
        let graph = Arc::new(built.map_err(|source| Error::Cuda { device, source })?);
        let mut graphs = lock(&self.graphs);
        graphs.push(graph.clone());
        let oldest = (graphs.len() > GRAPHS_MAX).then(|| graphs.remove(0));
        // To free its memory may stop the device.
        drop(graphs);
        drop(oldest);
        Ok(graph)
    }

    /// A graph of these branches that was launched before, from now on the latest.
    fn known_graph(&self, branches: &[Branch]) -> Option<Arc<CudaGraph>> {
        let mut graphs = lock(&self.graphs);
        let known = graphs.iter().position(|graph| graph.runs(branches))?;
        let graph = graphs.remove(known);
        graphs.push(graph.clone());
        Some(graph)
    }

    /// Whether everything up to the ticket is known to be done, or was lost with the device.
    pub(super) fn has_completed(&self, ticket: u64) -> bool {
        self.completed.load(Ordering::Acquire) >= ticket || self.context.has_failed()
    }

    /// Whether everything up to the ticket is done, or was lost with the device. Asks the device if
    /// that is not known.
    pub(super) fn is_done(&self, ticket: u64) -> bool {
        self.has_completed(ticket) || {
            self.look(&mut lock(&self.state), ticket);
            self.has_completed(ticket)
        }
    }

    /// Blocks until everything up to the ticket is done, or the device has failed. The device needs
    /// no thread of this process to get there.
    pub(super) fn wait(&self, ticket: u64) {
        while !self.has_completed(ticket) {
            if self.context.is_suspended() {
                self.context.await_reason();
                continue;
            }
            let Some(event) = self.covering(&mut lock(&self.state), ticket) else { continue };
            if let Err(cause) = self.context.bind().and_then(|()| event.synchronize()) {
                self.context.fail("wait", Location::caller(), cause);
            }
            drop(event);
            self.look(&mut lock(&self.state), ticket);
        }
    }

    /// Blocks until everything is done that was issued so far, or the device has failed; then what
    /// was in flight is lost.
    pub(crate) fn drain(&self) {
        let issued = lock(&self.state).issued;
        self.wait(issued);
        if self.context.has_failed() {
            // A device whose results count as lost may still be at work, on memory of the flights.
            // One that CUDA gave up says so at once.
            let _ = self.context.bind().and_then(|()| self.stream.synchronize());
            let mut state = lock(&self.state);
            let lost = (std::mem::take(&mut state.flights), std::mem::take(&mut state.marks));
            drop(state);
            drop(lost);
        }
    }

    /// An event that is reached no earlier than the ticket; `None` if it is done or the device has
    /// failed.
    pub(super) fn event(&self, ticket: u64) -> Option<Arc<CudaEvent>> {
        if self.has_completed(ticket) {
            return None;
        }
        self.covering(&mut lock(&self.state), ticket)
    }

    /// Hands work to the device, after everything that was issued before and after the events;
    /// returns its ticket. Does not wait for the device.
    pub(super) fn issue(
        &self,
        events: &[Arc<CudaEvent>],
        task: Option<CudaTask>,
        told: Option<OnComplete>,
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
        if let Err(cause) = self.try_issue(&mut state, events, task, told) {
            self.context.fail(operation, site, cause);
        }
        if state.flights.len() >= LOOK_AT {
            let issued = state.issued;
            self.look(&mut state, issued);
        }
        state.issued
    }

    fn try_issue(
        &self,
        state: &mut CudaStreamState,
        events: &[Arc<CudaEvent>],
        task: Option<CudaTask>,
        told: Option<OnComplete>,
    ) -> Called {
        if self.context.has_failed() || self.context.is_suspended() {
            return Ok(());
        }
        self.context.bind()?;
        for event in events {
            self.stream.wait(event)?;
        }
        let Some(task) = task else { return Ok(()) };
        let before = match told {
            Some(_) => {
                self.set_anchor(state)?;
                Some(self.recorded(true)?)
            }
            None => None,
        };
        let mut landing = Completion::default();
        let enqueue = Enqueue { context: &self.context, stream: &self.stream };
        let enqueued = enqueue.task(task, &mut landing).and_then(|()| {
            let timed = before.zip(told);
            timed
                .map(|(before, told)| Ok((before, Arc::new(self.recorded(true)?), told)))
                .transpose()
        });
        // Kept even after an error: a part of the work may be running.
        let (timed, result) = match enqueued {
            Ok(timed) => (timed, Ok(())),
            Err(cause) => (None, Err(cause)),
        };
        let kept = landing.staging.is_some() || landing.graph.is_some();
        if kept || landing.member.is_some() || timed.is_some() {
            state.staged += landing.staging.as_ref().map_or(0, StagingBuffer::size);
            state.flights.push_back(PendingTask { ticket: state.issued, landing, timed });
        }
        result
    }

    /// A new event at the end of the lane.
    fn recorded(&self, timed: bool) -> Called<CudaEvent> {
        let event = CudaEvent::new(timed)?;
        event.record(&self.stream)?;
        Ok(event)
    }

    /// Makes sure that times can be measured.
    fn set_anchor(&self, state: &mut CudaStreamState) -> Called {
        if state.anchor.is_none() {
            let event = self.recorded(true)?;
            event.synchronize()?;
            state.anchor = Some((Arc::new(event), Instant::now()));
        }
        Ok(())
    }

    /// A recorded event at or after the ticket; `None` if the device has failed.
    fn covering(&self, state: &mut CudaStreamState, ticket: u64) -> Option<Arc<CudaEvent>> {
        if let Some(mark) = state.marks.iter().find(|mark| mark.ticket >= ticket) {
            return Some(mark.event.clone());
        }
        let spare = state.spare.pop();
        let record = || {
            self.context.bind()?;
            let Some(event) = spare else { return self.recorded(false) };
            event.record(&self.stream)?;
            Ok(event)
        };
        match record() {
            Ok(event) => {
                let event = Arc::new(event);
                state.marks.push_back(RecordedEvent { ticket: state.issued, event: event.clone() });
                Some(event)
            }
            Err(cause) => {
                self.context.fail("record an event", Location::caller(), cause);
                None
            }
        }
    }

    /// Looks how far the device is, with an event that covers the ticket.
    fn look(&self, state: &mut MutexGuard<'_, CudaStreamState>, ticket: u64) {
        let state = &mut **state;
        if self.context.is_suspended() {
            return; // an exchange that lacks on the lane does not end
        }
        // The calling thread may have had nothing to do with the device so far.
        if self.covering(state, ticket).is_none() || self.context.bind().is_err() {
            return;
        }
        while let Some(mark) = state.marks.front() {
            match mark.event.is_done() {
                Ok(false) => break,
                Ok(true) => {
                    let ticket = mark.ticket;
                    let mark = state.marks.pop_front();
                    state.spare.extend(mark.and_then(|mark| Arc::into_inner(mark.event)));
                    self.land(state, ticket);
                    self.completed.store(ticket, Ordering::Release);
                }
                Err(cause) => {
                    self.context.fail("look how far it is", Location::caller(), cause);
                    break;
                }
            }
        }
    }

    /// Finishes the flights up to a completed ticket.
    fn land(&self, state: &mut CudaStreamState, ticket: u64) {
        while state.flights.front().is_some_and(|flight| flight.ticket <= ticket) {
            let Some(PendingTask { landing, timed, .. }) = state.flights.pop_front() else { break };
            state.staged -= landing.staging.as_ref().map_or(0, StagingBuffer::size);
            landing.land();
            if let Some((before, after, told)) = timed {
                match self.times(state, &before, &after) {
                    Ok((start, end)) => told(start, end),
                    Err(cause) => self.context.fail("measure time", Location::caller(), cause),
                }
            }
        }
    }

    /// The host's times of two reached events.
    fn times(
        &self,
        state: &mut CudaStreamState,
        before: &CudaEvent,
        after: &Arc<CudaEvent>,
    ) -> Called<(Instant, Instant)> {
        let Some((anchor, at)) = &state.anchor else {
            let now = Instant::now();
            return Ok((now, now));
        };
        let since = |event: &CudaEvent| event.seconds_since(anchor);
        let later = |seconds: f64| *at + Duration::from_secs_f64(seconds.max(0.0));
        let (start, end) = (later(since(before)?), later(since(after)?));
        // Times come as f32 milliseconds, so that only short distances are exact.
        if end.duration_since(*at) > Duration::from_secs(1) {
            state.anchor = Some((after.clone(), end));
        }
        Ok((start, end))
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // Whatever is in flight lands, or is lost with the device.
        self.drain();
        if self.context.bind().is_ok() {
            if let Err(cause) = self.stream.synchronize() {
                self.context.fail("close", Location::caller(), cause);
            }
            self.stream.destroy();
        }
        *lock(&self.state) = CudaStreamState::default();
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaStream of {}", self.context.id)
    }
}

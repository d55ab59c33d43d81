//! Submission: the only way to enqueue anything onto a stream.
//!
//! Invariant: submissions of a device happen one after the other, under one lock. Their order is
//! total, every wait points backwards in it, and the hazards of all storages of a launch are read
//! and updated atomically. Lock order: submission, one queue, one storage. No thread that holds one
//! of them waits for a worker or for space in a queue; a task for a CUDA device may wait for that
//! device while it is issued (`CudaStream::issue`). The models in `model` check this.

use std::ops::Range;
use std::panic::Location;

use super::hazard::{Edges, Hazards, add_edge};
use super::queue::{Access, Edge, StreamQueue, StreamState};
use super::shared::Submission;
use crate::execution::{StreamWork, check_may_wait, on_worker};
use crate::ground::sync::{Arc, MutexGuard, lock};
use crate::ground::{AccessKind, Act, Result};
use crate::hooks::{Allocation, CommandPosition, SubmittedLaunch, Touched};

/// Memory with hazards, as submission uses it.
pub(crate) trait TrackedMemory {
    /// The accesses, which change only under the device's submission lock.
    fn hazards(&self) -> MutexGuard<'_, Hazards>;
    /// The current allocation.
    fn allocation(&self) -> &Allocation;
    /// Address of the first byte, 0 for no bytes.
    fn address(&self) -> u64;
}

/// An access of a launch to a range of bytes of a storage.
pub(crate) struct Touch<'a, M> {
    pub(crate) storage: &'a M,
    pub(crate) access: AccessKind,
    /// Bytes of the storage.
    pub(crate) bytes: Range<usize>,
}

/// A launch at its submission, for observers that check order.
struct CheckedLaunch<'a> {
    after: Vec<CommandPosition<'a>>,
    touched: Vec<Touched<'a>>,
}

impl<'a> CheckedLaunch<'a> {
    #[cold]
    fn new<M: TrackedMemory + 'a>(
        edges: &'a [Edge],
        touches: impl Iterator<Item = &'a Touch<'a, M>>,
    ) -> Self {
        let touched = touches.map(|Touch { storage, access, bytes }| Touched {
            allocation: storage.allocation(),
            address: storage.address(),
            access: *access,
            bytes: bytes.clone(),
        });
        CheckedLaunch { after: positions(edges), touched: touched.collect() }
    }

    fn launched(
        &'a self,
        stream: &'a StreamState,
        seq: u64,
        work: &StreamWork,
    ) -> SubmittedLaunch<'a> {
        let (at, operation, site) = (stream.position(seq), work.operation(), work.site());
        SubmittedLaunch { at, operation, site, after: &self.after, touched: &self.touched }
    }

    /// Checks with every observer that the launch may be enqueued as command `seq` of `stream`.
    fn check(&self, stream: &StreamState, seq: u64, work: &StreamWork) -> Result<()> {
        let launched = self.launched(stream, seq, work);
        stream.shared.observers.try_notify(|observer| observer.launch_requested(&launched))
    }

    /// Notifies every observer that the launch is enqueued as command `seq` of `stream`.
    fn notify(&self, stream: &StreamState, seq: u64, work: &StreamWork) {
        let launched = self.launched(stream, seq, work);
        stream.shared.observers.notify(|observer| observer.launch_submitted(&launched));
    }
}

fn positions(edges: &[Edge]) -> Vec<CommandPosition<'_>> {
    edges.iter().map(|edge| edge.access.position()).collect()
}

/// Submits work, preceded by the waits that its accesses need. Blocks while the stream's queue is
/// full, unless called by a worker.
pub(crate) fn submit_work<'a, M: TrackedMemory + 'a>(
    stream: &Arc<StreamState>,
    touches: impl Iterator<Item = Touch<'a, M>> + Clone,
    work: StreamWork,
) -> Result<()> {
    stream.check_alive()?;
    let (submission, queue) = enter(stream);
    let mut edges = Edges::new();
    for Touch { storage, access, .. } in touches.clone() {
        storage.hazards().waits(stream, access, &mut edges)?;
    }
    let seq = queue.submitted() + edges.len() as u64 + 1;
    if stream.shared.checks_order {
        let touches: Vec<Touch<'_, M>> = touches.clone().collect();
        let seen = CheckedLaunch::new(&edges, touches.iter());
        seen.check(stream, seq, &work)?;
        seen.notify(stream, seq, &work);
    }
    for Touch { storage, access, .. } in touches {
        storage.hazards().record(stream, seq, access);
    }
    let enqueued = stream.enqueue(queue, edges, Some(work));
    debug_assert_eq!(seq, enqueued);
    drop(submission);
    if stream.shared.launch_blocking && !on_worker() {
        stream.wait_host(seq); // S4
        stream.check_result(seq)?;
    }
    Ok(())
}

/// The part of one stream in a group: its accesses, each with the stream that the tensor belongs
/// to.
pub(crate) struct GroupPart<'a, M> {
    pub(crate) stream: &'a Arc<StreamState>,
    pub(crate) touches: Vec<(Touch<'a, M>, &'a Arc<StreamState>)>,
    /// `None` if the work of this stream is included in another part.
    pub(crate) work: Option<StreamWork>,
}

/// Submits work of several streams as one step: each part waits for earlier work, no part waits for
/// another part, and afterwards every stream of the group waits for all parts. So each access is
/// recorded at the end of the group, on the stream that its tensor belongs to. This stream is part
/// of the group.
pub(crate) fn submit_group<M: TrackedMemory>(parts: Vec<GroupPart<'_, M>>) -> Result<()> {
    let submission = enter_all(&parts);
    // A part that includes another stream's work comes after the earlier commands of that stream.
    let without_work = parts.iter().filter(|part| part.work.is_none());
    let end = |stream: &Arc<StreamState>| stream.lock().submitted();
    let ends_before: Vec<Access> = without_work
        .map(|GroupPart { stream, .. }| Access { stream: (*stream).clone(), seq: end(stream) })
        .filter(|access| access.seq > 0)
        .collect();
    let mut before = Vec::with_capacity(parts.len());
    for part in &parts {
        part.stream.check_alive()?;
        let mut edges = Edges::new();
        if part.work.is_some() {
            ends_before.iter().for_each(|access| add_edge(&mut edges, part.stream, access, true));
        }
        for (Touch { storage, access, .. }, _) in &part.touches {
            storage.hazards().waits(part.stream, *access, &mut edges)?;
        }
        if let Some(work) = part.work.as_ref().filter(|_| part.stream.shared.checks_order) {
            let seq = part.stream.lock().submitted() + edges.len() as u64 + 1;
            let touches = part.touches.iter().map(|(touch, _)| touch);
            CheckedLaunch::new(&edges, touches).check(part.stream, seq, work)?;
        }
        before.push(edges);
    }
    let mut all = Vec::with_capacity(parts.len());
    let mut works = Vec::with_capacity(parts.len());
    let mut streams = Vec::with_capacity(parts.len());
    for (GroupPart { stream, touches, work }, edges) in parts.into_iter().zip(before) {
        streams.push(stream);
        let Some(work) = work else { continue };
        let queue = stream.lock();
        if stream.shared.checks_order {
            let seq = queue.submitted() + edges.len() as u64 + 1;
            let touches = touches.iter().map(|(touch, _)| touch);
            CheckedLaunch::new(&edges, touches).notify(stream, seq, &work);
        }
        let seq = stream.enqueue(queue, edges, Some(work));
        works.push(Access { stream: stream.clone(), seq });
        all.extend(touches);
    }
    let ends: Vec<Access> = streams
        .into_iter()
        .map(|stream| {
            let others = works.iter().filter(|other| !Arc::ptr_eq(&other.stream, stream));
            let edges = others.map(|other| Edge { access: other.clone(), propagates: true });
            let seq = enqueue_waits(stream, stream.lock(), edges.collect());
            Access { stream: stream.clone(), seq }
        })
        .collect();
    for (Touch { storage, access, .. }, owner) in all {
        let end = ends.iter().rev().find(|end| Arc::ptr_eq(&end.stream, owner));
        storage.hazards().record(owner, end.map_or(0, |end| end.seq), access);
    }
    drop(submission);
    for Access { stream, seq } in &ends {
        if stream.shared.launch_blocking && !on_worker() {
            stream.wait_host(*seq); // S4
            stream.check_result(*seq)?;
        }
    }
    Ok(())
}

/// Makes `stream` wait for the last write of `storage`.
pub(crate) fn wait_for_producer(
    stream: &Arc<StreamState>,
    storage: &impl TrackedMemory,
) -> Result<()> {
    stream.check_alive()?;
    let (submission, queue) = enter(stream);
    let mut edges = Edges::new();
    storage.hazards().waits(stream, AccessKind::Read, &mut edges)?;
    enqueue_waits(stream, queue, edges);
    drop(submission);
    Ok(())
}

/// Makes `stream` wait for a position in another stream, possibly of another device.
pub(crate) fn wait_for(
    stream: &Arc<StreamState>,
    access: &Access,
    site: &'static Location<'static>,
) -> Result<()> {
    stream.check_alive()?;
    if access.is_on(stream) {
        return Ok(());
    }
    // Read before the result is checked: a failure in between is propagated by the wait, so it is
    // never missed.
    let done = access.is_done() && !stream.shared.checks_order;
    access.stream.check_result(access.seq)?;
    if done {
        return Ok(());
    }
    if stream.cuda_queue().is_some() && access.stream.cuda_queue().is_none() {
        // A CUDA device cannot wait for a worker of this process: the host waits for both.
        let operation = "Stream::wait";
        check_may_wait(operation)?;
        stream.shared.counters.count(Act::Synchronize, operation, site)?;
        let _wait = stream.shared.observers.host_waits(operation, Some(site));
        access.stream.wait_host(access.seq);
        return access.stream.check_result(access.seq);
    }
    let (submission, queue) = enter(stream);
    let edge = Edge { access: access.clone(), propagates: true };
    enqueue_waits(stream, queue, Edges::from_iter([edge]));
    drop(submission);
    Ok(())
}

/// Enqueues waits; returns the number of the last command.
fn enqueue_waits(
    stream: &Arc<StreamState>,
    queue: MutexGuard<'_, StreamQueue>,
    edges: Edges,
) -> u64 {
    if stream.shared.checks_order {
        let (at, after) =
            (stream.position(queue.submitted() + edges.len() as u64), positions(&edges));
        stream.shared.observers.notify(|observer| observer.waits_submitted(at, &after));
    }
    stream.enqueue(queue, edges, None)
}

/// Takes the submission lock and the stream's lock when the stream's queue has space. Waits for
/// space without holding either lock. A worker does not wait, because the queue may need this
/// worker to make progress.
fn enter(stream: &StreamState) -> (MutexGuard<'_, Submission>, MutexGuard<'_, StreamQueue>) {
    loop {
        let submission = lock(&stream.shared.submission);
        let queue = stream.lock();
        if !stream.is_full(&queue) || on_worker() {
            return (submission, queue);
        }
        drop(submission);
        let _wait = stream.shared.observers.host_waits("wait for a place in the queue", None);
        stream.wait_for_space(queue);
    }
}

/// Takes the submission lock when the queues of all parts have room, like [`enter`]. Only a holder
/// of that lock adds to a queue, so the room remains.
fn enter_all<'a, M>(parts: &[GroupPart<'a, M>]) -> Option<MutexGuard<'a, Submission>> {
    let shared = &parts.first()?.stream.shared;
    loop {
        let submission = lock(&shared.submission);
        let full = parts.iter().find(|part| part.stream.is_full(&part.stream.lock()));
        match full {
            Some(part) if !on_worker() => {
                drop(submission);
                let _wait = shared.observers.host_waits("wait for a place in the queue", None);
                part.stream.wait_for_space(part.stream.lock());
            }
            _ => return Some(submission),
        }
    }
}

//! Submission: the one door through which anything gets onto a stream.
//!
//! Invariant: submissions of a device happen one after the other, under one lock. That order is
//! total, every wait points backwards in it, and the hazards of all storages of a launch are looked
//! at and brought up to date at one moment. Lock order: submission, one queue, one storage.

use crate::error::Result;
use crate::executor;
use crate::hazard::{Access, Edge, Edges, Use};
use crate::queue::{Queue, StreamState, Work};
use crate::storage::Storage;
use crate::sync::{Arc, MutexGuard, lock};

/// What a device's submission lock protects: the order of submissions, and with it the hazards of
/// all storages.
#[derive(Default)]
pub(crate) struct Submission;

/// Submits work after the waits that its accesses need. Blocks while the stream's queue is full,
/// unless called by a worker.
pub(crate) fn work<'a>(
    stream: &Arc<StreamState>,
    accesses: impl Iterator<Item = (&'a Storage, Use)> + Clone,
    work: Box<dyn Work>,
) -> Result<()> {
    stream.check_alive()?;
    let (submission, queue) = enter(stream);
    let mut edges = Edges::new();
    for (storage, usage) in accesses.clone() {
        storage.hazards().waits(stream, usage, &mut edges)?;
    }
    let seq = queue.submitted() + edges.len() as u64 + 1;
    for (storage, usage) in accesses {
        storage.hazards().note(stream, seq, usage);
    }
    let enqueued = stream.enqueue(queue, edges, Some(work));
    debug_assert_eq!(seq, enqueued);
    drop(submission);
    if stream.shared.launch_blocking && !executor::on_worker() {
        stream.wait_host(seq); // S4
        stream.check_result(seq)?;
    }
    Ok(())
}

/// Makes `stream` wait until it may read `storage` (the producer is done).
pub(crate) fn wait_for_producer(stream: &Arc<StreamState>, storage: &Storage) -> Result<()> {
    stream.check_alive()?;
    let (submission, queue) = enter(stream);
    let mut edges = Edges::new();
    storage.hazards().waits(stream, Use::Read, &mut edges)?;
    stream.enqueue(queue, edges, None);
    drop(submission);
    Ok(())
}

/// Makes `stream` wait for a place in another stream, maybe of another device.
pub(crate) fn wait_for(stream: &Arc<StreamState>, access: &Access) -> Result<()> {
    stream.check_alive()?;
    if !Arc::ptr_eq(stream, &access.stream) {
        access.stream.check_result(access.seq)?;
    }
    if access.is_ordered_before(stream) {
        return Ok(());
    }
    let (submission, queue) = enter(stream);
    stream.enqueue(queue, [Edge { access: access.clone(), propagates: true }], None);
    drop(submission);
    Ok(())
}

/// Takes the submission lock and the stream's, with room in its queue. Waits for room without
/// holding either; a worker does not wait, as it may be the one that makes room.
fn enter(stream: &StreamState) -> (MutexGuard<'_, Submission>, MutexGuard<'_, Queue>) {
    loop {
        let submission = lock(&stream.shared.submission);
        let queue = stream.lock();
        if !queue.is_full() || executor::on_worker() {
            return (submission, queue);
        }
        drop(submission);
        stream.wait_for_space(queue);
    }
}

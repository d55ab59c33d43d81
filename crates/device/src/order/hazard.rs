//! Pending accesses to a storage, and the waits of its next user.
//!
//! Invariant: every access to a storage's bytes is ordered after every earlier conflicting one
//! (one of the two writes), either because both are on one stream, or by a stream-side wait that
//! was submitted before the later one. Accesses are recorded in the order of submission, which is
//! total on a device, so waits point backwards only and no cycle of waits can arise. The models in
//! `model` check this.
//!
//! A wait for completed work is left out, and completed accesses are forgotten; but not with an
//! observer that checks order, so that the order it sees is that of the program and does not depend
//! on timing.

use super::queue::{Access, Edge, StreamState};
use crate::ground::fault::EngineFault;
use crate::ground::sync::Arc;
use crate::ground::{AccessKind, Result};
use smallvec::SmallVec;
use std::cmp::Reverse;

/// Accesses, usually at most one.
type Accesses = SmallVec<[Access; 1]>;

/// Waits, usually few.
pub(crate) type Edges = SmallVec<[Edge; 4]>;

/// The accesses to a storage that later ones may have to wait for.
#[derive(Default)]
pub(crate) struct Hazards {
    /// The latest write.
    write: Option<Access>,
    /// Reads since the last write, the latest of each stream.
    reads: SmallVec<[Access; 2]>,
    /// Accesses to the block by its earlier storages. Work of this storage may not touch the bytes
    /// before they are done (S2).
    inherited: Accesses,
}

impl Hazards {
    /// Adds the waits that work on `stream` needs before it may use the storage in this way.
    ///
    /// # Errors
    /// [`crate::Error::KernelPanicked`] if it would read the result of a kernel that panicked.
    pub(crate) fn waits(
        &self,
        stream: &Arc<StreamState>,
        usage: AccessKind,
        edges: &mut Edges,
    ) -> Result<()> {
        for access in &self.inherited {
            add_edge(edges, stream, access, false);
        }
        let faults = stream.shared.faults;
        let (to_write, to_read) = match usage {
            AccessKind::Read => (!faults.has(EngineFault::NoWaitForProducer), false),
            AccessKind::Write => (
                !faults.has(EngineFault::NoWaitForWriter),
                !faults.has(EngineFault::NoWaitForReaders),
            ),
        };
        if let Some(write) = self.write.as_ref().filter(|_| to_write) {
            add_edge(edges, stream, write, true);
            // Checked after completion: if the kernel panics in between, the wait already exists
            // and propagates the failure. In the other order the failure would be missed.
            if !write.is_on(stream) {
                write.stream.check_result(write.seq)?;
            }
        }
        if to_read {
            for access in &self.reads {
                add_edge(edges, stream, access, false);
            }
        }
        Ok(())
    }

    /// Records an access that was submitted with its waits.
    pub(crate) fn note(&mut self, stream: &Arc<StreamState>, seq: u64, usage: AccessKind) {
        match usage {
            AccessKind::Write => {
                // All earlier accesses are ordered before this write, which stands for all of them.
                self.reads.clear();
                self.inherited.clear();
                replace(&mut self.write, stream, seq);
            }
            AccessKind::Read => {
                if let Some(read) = self.reads.iter_mut().find(|read| read.is_on(stream)) {
                    read.seq = seq;
                    return;
                }
                if self.reads.len() >= 2 && !stream.shared.checks_order {
                    self.reads.retain(|read| !read.seems_done());
                }
                self.reads.push(Access { stream: stream.clone(), seq });
            }
        }
    }

    /// Turns all accesses into those that the block's next storage inherits: every access that is
    /// not done, or the last of every stream.
    pub(crate) fn bequeath(&mut self, keep_done: bool) {
        // Usually there are none, and an iterator over nothing costs more than this check.
        if !self.reads.is_empty() {
            self.inherited.extend(self.reads.drain(..));
        }
        if let Some(write) = self.write.take() {
            self.inherited.push(write);
        }
        if keep_done {
            let inherited = &mut self.inherited;
            inherited.sort_unstable_by_key(|access| (access.stream.id, Reverse(access.seq)));
            inherited.dedup_by_key(|access| access.stream.id);
        } else {
            self.forget_done();
        }
    }

    /// Forgets inherited accesses that are known to be done.
    pub(crate) fn forget_done(&mut self) {
        if !self.inherited.is_empty() {
            self.inherited.retain(|access| !access.seems_done());
        }
    }

    /// The accesses of earlier storages: all accesses while the block is free.
    pub(crate) fn inherited(&self) -> &[Access] {
        &self.inherited
    }

    /// Forgets every access.
    pub(crate) fn clear(&mut self) {
        *self = Hazards::default();
    }

    /// All accesses, those of earlier storages included.
    pub(crate) fn all(&self) -> Vec<Access> {
        self.inherited.iter().chain(&self.reads).chain(&self.write).cloned().collect()
    }

    /// Whether all accesses are done.
    pub(crate) fn is_idle(&self) -> bool {
        let all = self.inherited.iter().chain(&self.reads).chain(&self.write);
        all.into_iter().all(Access::is_done)
    }
}

/// Sets `slot` to this access, without touching the stream's reference count if it is the same.
fn replace(slot: &mut Option<Access>, stream: &Arc<StreamState>, seq: u64) {
    match slot {
        Some(access) if access.is_on(stream) => access.seq = seq,
        _ => *slot = Some(Access { stream: stream.clone(), seq }),
    }
}

/// Adds a wait for `access`, unless it is ordered before already; one wait per stream, the latest.
pub(super) fn add_edge(
    edges: &mut Edges,
    stream: &Arc<StreamState>,
    access: &Access,
    propagates: bool,
) {
    let ordered = || !stream.shared.checks_order && access.is_ordered_before(stream);
    if access.is_on(stream) || ordered() {
        return;
    }
    match edges.iter_mut().find(|edge| edge.access.is_on(&access.stream)) {
        Some(edge) if edge.propagates == propagates || edge.access.seq == access.seq => {
            edge.access.seq = edge.access.seq.max(access.seq);
            edge.propagates |= propagates;
        }
        _ => edges.push(Edge { access: access.clone(), propagates }),
    }
}

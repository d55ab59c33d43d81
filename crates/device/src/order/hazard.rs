//! Hazards of a storage: pending accesses to its bytes, and the waits that later work needs.
//!
//! A storage remembers its last write, the reads since then (the latest of each stream), and the
//! accesses of earlier users of its block. A new access gets its waits from them:
//!
//! ```text
//! read  on s:  wait for inherited, write                  then add s to reads
//! write on s:  wait for inherited, write, all reads       then write = s, reads = inherited = {}
//!              (each only if it is on another stream and not done)
//! ```
//!
//! For example, a loader that overwrites the buffer that an env still reads:
//!
//! ```text
//! stream loader   w1            w3      w3 waits for r2 (write after read); it needs no wait for
//!                   ╲          ╱        w1, which is on the same stream
//! stream env         ╲──▶ r2 ─╱         r2 waits for w1 (read after write)
//! ```
//!
//! # Why it is fast
//! A write drops all earlier accesses, because a wait for the write covers them. So a storage that
//! is used on one stream has at most one write and one read, and a launch adds no wait. Waits are
//! commands of the stream that must wait; the host never waits here.
//!
//! # Assumptions
//! A launch declares all its accesses, and accesses are noted in the order of submission, under
//! one lock. The whole storage is one unit: disjoint ranges of one storage are ordered, too,
//! except within a group ([`LaunchGroup`](crate::LaunchGroup)).
//!
//! Invariant: every access to a storage's bytes is ordered after every earlier conflicting one
//! (one of the two writes), either because both are on one stream, or by a stream-side wait that
//! was submitted before the later one. Accesses are recorded in the order of submission, which is
//! total on a device, so waits point backwards only and no cycle of waits can arise. The models in
//! `model` check this.
//!
//! Waits for completed work are left out, and completed accesses are forgotten. With an observer
//! that checks order (the race sanitizer) they are kept, so that the observer sees the order of the
//! program, whatever the timing.

use std::cmp::Reverse;

use smallvec::SmallVec;

use super::queue::{Access, Edge, StreamState};
use crate::ground::fault::EngineFault;
use crate::ground::sync::Arc;
use crate::ground::{AccessKind, Result};

/// Accesses, usually at most one.
type Accesses = SmallVec<[Access; 1]>;

/// Waits, usually few.
pub(crate) type Edges = SmallVec<[Edge; 4]>;

/// The accesses to a storage that later accesses may have to wait for.
#[derive(Default)]
pub(crate) struct Hazards {
    /// The latest write.
    write: Option<Access>,
    /// Reads since the last write, the latest of each stream.
    reads: SmallVec<[Access; 2]>,
    /// Accesses to the block by tensors that had it before. Work of the current tensor may not
    /// touch the bytes before these accesses are done (S2).
    inherited: Accesses,
}

impl Hazards {
    /// Adds the waits that work on `stream` needs before it may read or write the storage.
    ///
    /// # Errors
    /// The last write is on another stream, and its result is lost:
    /// [`crate::Error::KernelPanicked`], [`crate::Error::DeviceFailed`].
    pub(crate) fn waits(
        &self,
        stream: &Arc<StreamState>,
        kind: AccessKind,
        edges: &mut Edges,
    ) -> Result<()> {
        for access in &self.inherited {
            add_edge(edges, stream, access, false);
        }
        let faults = stream.shared.faults;
        let (to_write, to_read) = match kind {
            AccessKind::Read => (!faults.has(EngineFault::NoWaitForProducer), false),
            AccessKind::Write => (
                !faults.has(EngineFault::NoWaitForWriter),
                !faults.has(EngineFault::NoWaitForReaders),
            ),
        };
        if let Some(write) = self.write.as_ref().filter(|_| to_write) {
            add_edge(edges, stream, write, true);
            // The result is checked after the wait was added: if the kernel panics in between, the
            // wait propagates the failure. In the other order the failure would be missed.
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

    /// Records a submitted access.
    pub(crate) fn record(&mut self, stream: &Arc<StreamState>, seq: u64, kind: AccessKind) {
        match kind {
            AccessKind::Write => {
                // All earlier accesses are ordered before this write, so a wait for it covers them.
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
                    self.reads.retain(|read| !read.is_known_done());
                }
                self.reads.push(Access { stream: stream.clone(), seq });
            }
        }
    }

    /// Turns all accesses into the inherited accesses of the block's next tensor: every access that
    /// is not done; with `keep_done`, the last access of every stream.
    pub(crate) fn bequeath(&mut self, keep_done: bool) {
        // Usually there are no reads, and draining an empty list costs more than this check.
        if !self.reads.is_empty() {
            self.inherited.extend(self.reads.drain(..));
        }
        if let Some(write) = self.write.take() {
            self.inherited.push(write);
        }
        if keep_done {
            let inherited = std::mem::take(&mut self.inherited);
            self.inherited = last_of_each_stream(inherited);
        } else {
            self.forget_done();
        }
    }

    /// Forgets inherited accesses that are known to be done.
    pub(crate) fn forget_done(&mut self) {
        if !self.inherited.is_empty() {
            self.inherited.retain(|access| !access.is_known_done());
        }
    }

    /// The inherited accesses. While the block is free, these are all accesses.
    pub(crate) fn inherited(&self) -> &[Access] {
        &self.inherited
    }

    /// Forgets every access.
    pub(crate) fn clear(&mut self) {
        *self = Hazards::default();
    }

    /// The last access of each stream, among all accesses, including inherited ones.
    pub(crate) fn last_of_each_stream(&self) -> impl Iterator<Item = Access> + use<> {
        let all = self.inherited.iter().chain(&self.reads).chain(&self.write);
        last_of_each_stream(all.cloned().collect()).into_iter()
    }

    /// Whether all accesses are done.
    pub(crate) fn is_idle(&self) -> bool {
        let all = self.inherited.iter().chain(&self.reads).chain(&self.write);
        all.into_iter().all(Access::is_done)
    }
}

/// The last of the accesses of each stream.
fn last_of_each_stream(mut accesses: Accesses) -> Accesses {
    accesses.sort_unstable_by_key(|access| (access.stream.id, Reverse(access.seq)));
    accesses.dedup_by_key(|access| access.stream.id);
    accesses
}

/// Sets `slot` to this access; keeps the stream's reference count if the stream is the same.
fn replace(slot: &mut Option<Access>, stream: &Arc<StreamState>, seq: u64) {
    match slot {
        Some(access) if access.is_on(stream) => access.seq = seq,
        _ => *slot = Some(Access { stream: stream.clone(), seq }),
    }
}

/// Adds a wait for `access`, unless it is already ordered before `stream`. Keeps one wait per
/// awaited stream, for its latest access.
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

//! Who used a storage last, and whom the next user has to wait for.
//!
//! Invariant: every access to a storage's bytes is ordered after every earlier conflicting one
//! (one of the two writes), either because both are on one stream, or by a stream-side wait that
//! was submitted before the later one. Accesses are noted in the order of submission, which is
//! total on a device, so waits point backwards only and no cycle of waits can arise. Held by the
//! models in `model`.
//!
//! A wait for what is done already is left out, and what is done is forgotten; but not with the race
//! sanitizer on, so that the order it sees is that of the program and not of the moment.

use crate::error::Result;
use crate::faults::Fault;
use crate::queue::StreamState;
use crate::sync::Arc;
use smallvec::SmallVec;
use std::cmp::Reverse;

/// A place in a stream: done when the stream has completed that many commands.
#[derive(Clone)]
pub(crate) struct Access {
    pub(crate) stream: Arc<StreamState>,
    pub(crate) seq: u64,
}

impl Access {
    pub(crate) fn is_done(&self) -> bool {
        self.stream.is_done(self.seq)
    }

    pub(crate) fn is_on(&self, stream: &Arc<StreamState>) -> bool {
        Arc::ptr_eq(&self.stream, stream)
    }

    /// Whether work on `stream` needs no wait for this.
    pub(crate) fn is_ordered_before(&self, stream: &Arc<StreamState>) -> bool {
        self.is_on(stream) || self.is_done()
    }
}

/// Accesses, most often at most one.
type Accesses = SmallVec<[Access; 1]>;

/// A wait that a stream has to make.
pub(crate) struct Edge {
    pub(crate) access: Access,
    /// Whether a kernel that panicked there spoils what comes here (its result is used), or not
    /// (only its end matters).
    pub(crate) propagates: bool,
}

/// A few waits.
pub(crate) type Edges = SmallVec<[Edge; 4]>;

/// How a launch uses a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
}

/// The accesses to a storage that later ones may have to wait for.
#[derive(Default)]
pub(crate) struct Hazards {
    /// The last write.
    write: Option<Access>,
    /// Reads since the last write, the last of each stream.
    reads: SmallVec<[Access; 2]>,
    /// Uses of the block by the storages that had it before. Nothing of this storage may touch
    /// the bytes before they are done (S2).
    inherited: Accesses,
}

impl Hazards {
    /// Adds the waits that work on `stream` needs before it may use the storage like this.
    ///
    /// # Errors
    /// [`crate::Error::KernelPanicked`] if what it would see is a panicked kernel's leftover.
    pub(crate) fn waits(
        &self,
        stream: &Arc<StreamState>,
        usage: Use,
        edges: &mut Edges,
    ) -> Result<()> {
        for access in &self.inherited {
            add_edge(edges, stream, access, false);
        }
        let faults = stream.shared.faults;
        let (to_write, to_read) = match usage {
            Use::Read => (!faults.has(Fault::NoWaitForProducer), false),
            Use::Write => {
                (!faults.has(Fault::NoWaitForWriter), !faults.has(Fault::NoWaitForReaders))
            }
        };
        if let Some(write) = self.write.as_ref().filter(|_| to_write) {
            add_edge(edges, stream, write, true);
            // After the look at whether it is done: a kernel that panics in between has a wait
            // already, which brings the failure. The other way round it would be missed.
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

    /// Notes an access that was submitted with its waits.
    pub(crate) fn note(&mut self, stream: &Arc<StreamState>, seq: u64, usage: Use) {
        match usage {
            Use::Write => {
                // Everything before is ordered before this write: it alone stands for all.
                self.reads.clear();
                self.inherited.clear();
                replace(&mut self.write, stream, seq);
            }
            Use::Read => {
                if let Some(read) = self.reads.iter_mut().find(|read| read.is_on(stream)) {
                    read.seq = seq;
                    return;
                }
                if self.reads.len() >= 2 && stream.shared.sanitizer().is_none() {
                    self.reads.retain(|read| !read.is_done());
                }
                self.reads.push(Access { stream: stream.clone(), seq });
            }
        }
    }

    /// Turns all accesses into what the block's next tenant inherits: every access that is not
    /// done, or the last of every stream.
    pub(crate) fn bequeath(&mut self, keep_done: bool) {
        // Most often there is nothing, and an iterator over nothing costs more than a look.
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

    /// Forgets inherited accesses that are done.
    pub(crate) fn forget_done(&mut self) {
        if !self.inherited.is_empty() {
            self.inherited.retain(|access| !access.is_done());
        }
    }

    /// The accesses of earlier tenants: all there are while the block is free.
    pub(crate) fn inherited(&self) -> &[Access] {
        &self.inherited
    }

    /// Forgets every access.
    pub(crate) fn clear(&mut self) {
        *self = Hazards::default();
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

/// Adds a wait for `access`, unless it is ordered before anyway; one wait per stream, the latest.
fn add_edge(edges: &mut Edges, stream: &Arc<StreamState>, access: &Access, propagates: bool) {
    if access.is_on(stream) || (access.is_done() && stream.shared.sanitizer().is_none()) {
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

//! The pool of a device: stream-ordered memory.
//!
//! A storage whose last handle is dropped goes to a free list of the stream that allocated it,
//! together with its pending accesses. The next tenant (the user of a live storage) inherits the
//! accesses, so a block can be handed out while kernels still use it:
//!
//! ```text
//! allocate(stream, bytes):
//!     class = size class of bytes
//!     a ready block of the stream's list, or of ended streams?    take it        (usual)
//!     room below the limit?                                       new block      (first batches)
//!     a ready block of any stream?                                take it
//!     any block of the class?         take the first of a list; its next work waits on the device
//!     otherwise: return idle blocks of other classes to the system, or wait for one to become idle
//! free(storage):
//!     hazards.bequeath(); push onto the stream's list
//! ```
//!
//! A block is ready for a stream if every pending access is on this stream or done. A training step
//! frees and allocates the same sizes on the same stream, so the usual case finds a ready block at
//! the end of the list:
//!
//! ```text
//! stream s    kernel A(x)   kernel B(y)        x is dropped after A was enqueued;
//! host        x ─ drop ─▶ list of s ─▶ y       y gets its block at once: B is after A on s
//! ```
//!
//! # Why it is fast
//! One short lock, a look at up to eight entries of one list, no allocation and no wait. Storages
//! are recycled whole, with their lock and list of accesses.
//!
//! # Assumptions
//! All work on a block is submitted through its storage, so its hazards are complete. Sizes repeat.
//! Rounding to eight classes per octave adds at most an eighth to a size above 1 KiB.
//!
//! Invariants
//! - A block stays in one storage, and a storage is in one place: with its tenant, in a
//!   `PooledBlock` that kernels borrow it from, or in one free list. A `PooledBlock` or a free
//!   list is the only owner of its storages ([`UniqueArc`]).
//! - A free block carries every access to it that may not be done. Its next tenant inherits them,
//!   and submission makes any stream wait for them before it touches the block (`hazard`). So
//!   handing out a block is correct at any time, on any stream (S2); the choice of the block only
//!   affects speed and memory. No result depends on it.
//! - `reserved` is the sum of the sizes of all blocks, and never above the limit.
//! - A block returns to the system only when its accesses are done.
//! - A request fails only if the live storages leave no room for it, whatever the timing. (A worker
//!   cannot wait, so its request also fails if the room is in busy blocks of other sizes.)
//!
//! The models in `model` check these.

use std::panic::Location;

use triomphe::UniqueArc;

use super::size_class::{class_of, class_size};
use super::storage::Storage;
use super::usage::Usage;
use crate::execution::{BlockSource, ScratchPieces, on_worker};
use crate::ground::fault::{EngineFault, EngineFaults};
use crate::ground::sync::{Arc, Mutex, MutexGuard, lock};
use crate::ground::{Act, Error, Owner, Result};
use crate::hooks::DeviceObservers;
use crate::order::{Access, StreamState, TrackedMemory};

/// Number of entries of a list that a request examines, the last first.
const LOOK: usize = 8;

/// A storage without a tenant: a block with its pending accesses.
pub(super) type FreeStorage<H> = UniqueArc<Storage<H>>;

/// Whether work on `stream` may use the block without waiting.
fn is_ready_for<H>(free: &mut FreeStorage<H>, stream: &Arc<StreamState>) -> bool {
    let after = free.hazards_mut().inherited();
    after.is_empty() || after.iter().all(|access| access.is_ordered_before(stream))
}

/// Free storages by size class; within a class, roughly in the order of freeing.
struct FreeLists<H>(Vec<Vec<FreeStorage<H>>>);

impl<H> Default for FreeLists<H> {
    fn default() -> Self {
        FreeLists(Vec::new())
    }
}

impl<H> FreeLists<H> {
    fn put(&mut self, free: FreeStorage<H>) {
        let class = free.class();
        if self.0.len() <= class {
            self.0.resize_with(class + 1, Vec::new);
        }
        self.0[class].push(free);
    }

    /// Takes a block of this class that `stream` may use without waiting.
    fn take_ready(&mut self, class: usize, stream: &Arc<StreamState>) -> Option<FreeStorage<H>> {
        let list = self.0.get_mut(class)?;
        let from = list.len().saturating_sub(LOOK);
        let found = (from..list.len()).rev().find(|&i| is_ready_for(&mut list[i], stream))?;
        Some(list.swap_remove(found))
    }

    /// Takes the first block of this class.
    fn take_first(&mut self, class: usize) -> Option<FreeStorage<H>> {
        let list = self.0.get_mut(class)?;
        if list.is_empty() { None } else { Some(list.remove(0)) }
    }
}

struct PoolState<H> {
    /// Free blocks by the slot of their stream; the first slot is for ended streams.
    lists: Vec<FreeLists<H>>,
    /// Slots that no stream uses.
    vacant: Vec<usize>,
    usage: Usage,
}

/// Slot for blocks of streams that have ended.
pub(super) const ORPHANS: usize = 0;

/// A device's memory.
pub(crate) struct Pool<H> {
    /// The source of new blocks.
    memory: BlockSource,
    limit: Option<usize>,
    /// A planted fault; see [`crate::ground::fault::EngineFault`].
    forgets: bool,
    /// Whether completed accesses are kept, for an observer that checks order.
    keeps_done: bool,
    observers: DeviceObservers,
    /// Temporary memory of kernels. A request may wait until a kernel returns its piece.
    pieces: Arc<ScratchPieces>,
    state: Mutex<PoolState<H>>,
}

/// A request for memory.
pub(crate) struct MemoryRequest<'a> {
    /// The stream that it will belong to.
    pub(crate) stream: &'a Arc<StreamState>,
    /// Index of the stream's free lists in the pool.
    pub(crate) slot: usize,
    pub(crate) bytes: usize,
    pub(crate) owner: Owner,
    pub(crate) operation: &'static str,
    pub(crate) site: &'static Location<'static>,
}

impl<H> PoolState<H> {
    fn take_anywhere(
        &mut self,
        slot: usize,
        take: impl Fn(&mut FreeLists<H>) -> Option<FreeStorage<H>>,
    ) -> Option<FreeStorage<H>> {
        take(&mut self.lists[slot]).or_else(|| self.lists.iter_mut().find_map(take))
    }

    /// An access that keeps a free block busy.
    fn find_busy(&mut self) -> Option<Access> {
        let free = self.lists.iter_mut().flat_map(|lists| lists.0.iter_mut().flatten());
        let mut accesses = free.flat_map(|free| free.hazards_mut().inherited());
        accesses.find(|access| !access.is_done()).cloned()
    }

    /// Returns idle blocks to the system, the largest first, until `enough` of the reserved bytes
    /// is true; returns the number of bytes.
    fn trim(&mut self, observers: &DeviceObservers, enough: impl Fn(usize) -> bool) -> usize {
        let before = self.usage.reserved;
        let classes = self.lists.iter().map(|l| l.0.len()).max().unwrap_or(0);
        for class in (0..classes).rev() {
            for lists in &mut self.lists {
                let Some(list) = lists.0.get_mut(class) else { continue };
                let mut i = 0;
                while i < list.len() && !enough(self.usage.reserved) {
                    if list[i].hazards_mut().is_idle() {
                        let free = list.swap_remove(i);
                        observers.notify(|observer| observer.block_returned(free.address()));
                        self.usage.reserved -= free.reserved();
                    } else {
                        i += 1;
                    }
                }
            }
        }
        before - self.usage.reserved
    }
}

impl<H> Pool<H> {
    /// A new pool.
    pub(crate) fn new(
        memory: BlockSource,
        limit: Option<usize>,
        faults: EngineFaults,
        observers: DeviceObservers,
        pieces: Arc<ScratchPieces>,
    ) -> Self {
        let lists = vec![FreeLists::default()];
        let state = Mutex::new(PoolState { lists, vacant: Vec::new(), usage: Usage::default() });
        let forgets = faults.has(EngineFault::PoolForgets);
        let keeps_done = observers.check_order();
        Pool { memory, limit, forgets, keeps_done, observers, pieces, state }
    }

    /// Counts the bytes of a request.
    fn count_request(&self, state: &mut PoolState<H>, owner: Owner, bytes: usize) {
        let held = state.usage.take(owner, bytes);
        self.observers.notify(|observer| observer.memory_changed(owner, held));
    }

    /// A slot for a new stream.
    pub(crate) fn open_slot(&self) -> usize {
        let mut state = lock(&self.state);
        state.vacant.pop().unwrap_or_else(|| {
            state.lists.push(FreeLists::default());
            state.lists.len() - 1
        })
    }

    /// Closes a stream's slot; its blocks become available to every stream.
    pub(crate) fn close_slot(&self, slot: usize) {
        let mut state = lock(&self.state);
        let lists = std::mem::take(&mut state.lists[slot]);
        for mut free in lists.0.into_iter().flatten() {
            // Completed accesses would keep the queues of their streams alive without need.
            if !self.keeps_done {
                free.hazards_mut().forget_done();
            }
            state.lists[ORPHANS].put(free);
        }
        state.vacant.push(slot);
    }

    /// Allocates a storage for a request of at least 1 byte. Waits (each kind of wait counts as a
    /// synchronisation) only if the limit or the system's memory is reached: until free blocks of
    /// other sizes are idle or kernels return their temporary memory, and on a CUDA device while
    /// idle blocks return to the system.
    pub(crate) fn allocate(&self, request: &MemoryRequest<'_>) -> Result<FreeStorage<H>> {
        let &MemoryRequest { stream, slot, bytes, owner, operation, site } = request;
        let class = class_of(bytes);
        let counters = &stream.shared.counters;
        let enter = || lock(&self.state);
        let mut state = counters.count_under(Act::Allocate, operation, site, enter)?;
        let mut ready = state.lists[slot].take_ready(class, stream);
        if ready.is_none() {
            ready = state.lists[ORPHANS].take_ready(class, stream);
        }
        let Some(free) = ready else { return self.allocate_anew(state, request) };
        self.count_request(&mut state, owner, bytes);
        Ok(self.hand_out(free))
    }

    /// Allocates when no block is ready: a new block from the system, or else under pressure.
    #[cold]
    fn allocate_anew(
        &self,
        mut state: MutexGuard<'_, PoolState<H>>,
        request: &MemoryRequest<'_>,
    ) -> Result<FreeStorage<H>> {
        let class = class_of(request.bytes);
        let grown = if self.fits(&state, class) { self.grow(&mut state, class) } else { None };
        let (mut state, free) = match grown {
            Some(free) => (state, free),
            None => self.allocate_under_pressure(state, request)?,
        };
        self.count_request(&mut state, request.owner, request.bytes);
        Ok(free)
    }

    fn hand_out(&self, mut free: FreeStorage<H>) -> FreeStorage<H> {
        if !self.keeps_done {
            free.hazards_mut().forget_done();
        }
        free
    }

    fn fits(&self, state: &PoolState<H>, class: usize) -> bool {
        let size = class_size(class);
        self.limit.is_none_or(|limit| state.usage.reserved.saturating_add(size) <= limit)
    }

    /// A new block from the system; `None` if the system has no memory.
    fn grow(&self, state: &mut PoolState<H>, class: usize) -> Option<FreeStorage<H>> {
        let size = class_size(class);
        let block = Arc::new(self.memory.block(size)?);
        let usage = &mut state.usage;
        usage.reserved += size;
        usage.reserved_peak = usage.reserved_peak.max(usage.reserved);
        let fresh = self.memory.is_zeroed();
        Some(UniqueArc::new(Storage::vacant(Some(block), class, fresh)))
    }

    /// Allocates when the limit or the system's memory is reached. In this order: reuses a block at
    /// the cost of a stream-side wait; returns idle blocks to the system; waits for blocks to
    /// become idle. A block of a larger class is never handed out.
    fn allocate_under_pressure<'a>(
        &'a self,
        mut state: MutexGuard<'a, PoolState<H>>,
        request: &MemoryRequest<'_>,
    ) -> Result<(MutexGuard<'a, PoolState<H>>, FreeStorage<H>)> {
        let (stream, class) = (request.stream, class_of(request.bytes));
        let mut waited = false;
        loop {
            let reused = state
                .take_anywhere(request.slot, |lists| lists.take_ready(class, stream))
                .or_else(|| state.take_anywhere(request.slot, |lists| lists.take_first(class)));
            if let Some(free) = reused {
                return Ok((state, self.hand_out(free)));
            }
            // Looked up before trimming: blocks that become idle meanwhile are found in the next
            // iteration.
            let may_wait = !on_worker();
            let busy = if may_wait { state.find_busy() } else { None };
            let returns = if may_wait { self.pieces.returns() } else { None };
            if self.memory.returning_waits() {
                let counters = &stream.shared.counters;
                counters.count(Act::Synchronize, request.operation, request.site)?;
            }
            if let Some(free) = self.trim_and_grow(&mut state, class) {
                return Ok((state, free));
            }
            if busy.is_none() && returns.is_none() {
                stream.check_alive()?; // a failed device has no memory
                return Err(self.exhausted(&state, request));
            }
            drop(state);
            if !std::mem::replace(&mut waited, true) {
                stream.shared.counters.count(Act::Synchronize, request.operation, request.site)?;
            }
            let wait = self.observers.host_waits("wait for memory", Some(request.site));
            match (busy, returns) {
                (Some(access), _) => access.stream.wait_host(access.seq),
                (None, Some(returns)) => self.pieces.wait_beyond(returns),
                (None, None) => {}
            }
            drop(wait);
            state = lock(&self.state);
        }
    }

    fn exhausted(&self, state: &PoolState<H>, request: &MemoryRequest<'_>) -> Error {
        let mut owners = state.usage.owners();
        owners.retain(|held| held.current > 0);
        Error::OutOfMemory {
            owners,
            operation: request.operation,
            device: request.stream.shared.id,
            owner: request.owner,
            requested: class_size(class_of(request.bytes)),
            current: state.usage.current,
            reserved: state.usage.reserved,
            limit: self.limit,
        }
    }

    fn trim_and_grow(&self, state: &mut PoolState<H>, class: usize) -> Option<FreeStorage<H>> {
        match self.limit {
            Some(limit) => {
                let room = limit.checked_sub(class_size(class))?;
                state.trim(&self.observers, |reserved| reserved <= room);
            }
            // The system refused, so everything idle is returned to it.
            None => drop(state.trim(&self.observers, |_| false)),
        }
        if self.fits(state, class) { self.grow(state, class) } else { None }
    }

    /// Takes back a storage whose last handle was dropped; `bytes` were requested for `owner`.
    pub(crate) fn free(&self, slot: usize, mut free: FreeStorage<H>, owner: Owner, bytes: usize) {
        if self.forgets {
            free.hazards_mut().clear();
        }
        let mut state = lock(&self.state);
        let held = state.usage.give(owner, bytes);
        self.observers.notify(|observer| observer.memory_changed(owner, held));
        state.lists[slot].put(free);
    }

    /// Temporary memory of kernels.
    pub(crate) fn pieces(&self) -> &Arc<ScratchPieces> {
        &self.pieces
    }

    /// Whether returning a block to the system waits for all work of the device.
    pub(crate) fn returning_waits(&self) -> bool {
        self.memory.returning_waits()
    }

    /// Returns every idle block to the system; returns the number of bytes.
    pub(crate) fn trim(&self) -> usize {
        lock(&self.state).trim(&self.observers, |_| false)
    }

    /// Calls `look` with the memory in use.
    pub(crate) fn with_usage<T>(&self, look: impl FnOnce(&mut Usage) -> T) -> T {
        look(&mut lock(&self.state).usage)
    }
}

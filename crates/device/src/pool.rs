//! Stream-ordered memory: blocks go back to the stream that made the storage, with the accesses
//! that are still to come, and from there to the next storage.
//!
//! Invariants
//! - A block is in at most one place: in one storage, or in one free list.
//! - A free block carries every access to it that may not be done. Its next storage inherits them,
//!   and submission makes any stream wait for them before it touches the block (`hazard`). So
//!   handing out a block is right at any time, on any stream (S2); which block is handed out is a
//!   question of speed and memory only. No result depends on it.
//! - `reserved` is the sum of the sizes of all blocks, and never above the limit.
//! - A block goes back to the system only when its accesses are done.
//! - A request fails only if the live storages leave no room for it, whatever the timing. (A worker
//!   cannot wait, so its request also fails if the room is in busy blocks of other sizes.)
//!
//! Held by the models in `model`.

use crate::block::Block;
use crate::counters::Act;
use crate::device::{Environment, Shared};
use crate::error::{Error, Result};
use crate::executor;
use crate::faults::Fault;
use crate::hazard::{Access, Accesses};
use crate::memory::{MemoryReport, Owner, Usage};
use crate::queue::StreamState;
use crate::size_class::{class_of, class_size};
use crate::sync::{Arc, Mutex, MutexGuard, lock};
use crate::trace::Lane;
use std::panic::Location;

/// Entries of a list that a request looks at, the latest first.
const LOOK: usize = 8;

/// A block that no storage has, and what may still use it.
struct FreeBlock {
    block: Arc<Block>,
    after: Accesses,
}

impl FreeBlock {
    fn is_ready_for(&self, stream: &Arc<StreamState>) -> bool {
        self.after.iter().all(|access| access.is_ordered_before(stream))
    }

    fn is_idle(&self) -> bool {
        self.after.iter().all(Access::is_done)
    }
}

/// Free blocks by size class, latest last.
#[derive(Default)]
struct FreeLists(Vec<Vec<FreeBlock>>);

impl FreeLists {
    fn put(&mut self, free: FreeBlock) {
        let class = class_of(free.block.size());
        if self.0.len() <= class {
            self.0.resize_with(class + 1, Vec::new);
        }
        self.0[class].push(free);
    }

    /// Takes a block of this class that `stream` may use without a wait.
    fn take_ready(&mut self, class: usize, stream: &Arc<StreamState>) -> Option<FreeBlock> {
        let list = self.0.get_mut(class)?;
        let from = list.len().saturating_sub(LOOK);
        let found = (from..list.len()).rev().find(|&i| list[i].is_ready_for(stream))?;
        Some(list.swap_remove(found))
    }

    /// Takes the block of this class that was freed first.
    fn take_oldest(&mut self, class: usize) -> Option<FreeBlock> {
        let list = self.0.get_mut(class)?;
        if list.is_empty() { None } else { Some(list.remove(0)) }
    }
}

#[derive(Default)]
struct State {
    /// Free blocks by the slot of their stream; the first list is that of ended streams.
    lists: Vec<FreeLists>,
    /// Slots without a stream.
    vacant: Vec<usize>,
    reserved: usize,
    reserved_peak: usize,
    usage: Usage,
}

/// Slot of the blocks whose stream ended.
const ORPHANS: usize = 0;

/// A device's memory.
pub(crate) struct Pool {
    limit: Option<usize>,
    /// A planted fault; see [`crate::faults::Fault`].
    forgets: bool,
    /// Keeps accesses that are done, for the race sanitizer.
    keeps_done: bool,
    state: Mutex<State>,
}

/// Who wants memory, and how much.
pub(crate) struct Request<'a> {
    pub(crate) stream: &'a Arc<StreamState>,
    pub(crate) slot: usize,
    /// At least 1.
    pub(crate) bytes: usize,
    pub(crate) owner: Owner,
    pub(crate) operation: &'static str,
    pub(crate) site: &'static Location<'static>,
}

/// Memory handed out; by default of no bytes.
pub(crate) struct Allocation {
    pub(crate) block: Option<Arc<Block>>,
    pub(crate) inherited: Accesses,
    /// Whether the bytes are zeros, as they came from the system.
    pub(crate) zeroed: bool,
}

impl Default for Allocation {
    fn default() -> Self {
        Allocation { block: None, inherited: Accesses::new(), zeroed: true }
    }
}

/// What a storage gives back.
pub(crate) struct Returned {
    pub(crate) block: Arc<Block>,
    /// Accesses that may not be done.
    pub(crate) after: Accesses,
    pub(crate) owner: Owner,
    /// As requested.
    pub(crate) bytes: usize,
}

impl State {
    fn take_anywhere(
        &mut self,
        slot: usize,
        take: impl Fn(&mut FreeLists) -> Option<FreeBlock>,
    ) -> Option<FreeBlock> {
        take(&mut self.lists[slot]).or_else(|| self.lists.iter_mut().find_map(take))
    }

    /// An access that keeps a free block busy.
    fn find_busy(&self) -> Option<Access> {
        let free = self.lists.iter().flat_map(|lists| lists.0.iter().flatten());
        free.flat_map(|free| &free.after).find(|access| !access.is_done()).cloned()
    }

    /// Gives idle blocks back to the system, the largest first, until `enough`; returns the bytes.
    fn trim(&mut self, enough: impl Fn(usize) -> bool) -> usize {
        let before = self.reserved;
        let classes = self.lists.iter().map(|l| l.0.len()).max().unwrap_or(0);
        for class in (0..classes).rev() {
            for lists in &mut self.lists {
                let Some(list) = lists.0.get_mut(class) else { continue };
                let mut i = 0;
                while i < list.len() && !enough(self.reserved) {
                    if list[i].is_idle() {
                        self.reserved -= list.swap_remove(i).block.size();
                    } else {
                        i += 1;
                    }
                }
            }
        }
        before - self.reserved
    }
}

impl Pool {
    /// `timeline`: where a trace records the memory in use.
    pub(crate) fn new(
        limit: Option<usize>,
        environment: &Environment,
        timeline: Option<Arc<Lane>>,
    ) -> Self {
        let (lists, usage) = (vec![FreeLists::default()], Usage::new(timeline));
        let state = Mutex::new(State { lists, usage, ..State::default() });
        let forgets = environment.faults.has(Fault::PoolForgets);
        Pool { limit, forgets, keeps_done: environment.sanitize, state }
    }

    /// A slot for a new stream.
    pub(crate) fn open_slot(&self) -> usize {
        let mut state = lock(&self.state);
        state.vacant.pop().unwrap_or_else(|| {
            state.lists.push(FreeLists::default());
            state.lists.len() - 1
        })
    }

    /// Ends a stream's slot; its blocks are there for every stream.
    pub(crate) fn close_slot(&self, slot: usize) {
        let mut state = lock(&self.state);
        let lists = std::mem::take(&mut state.lists[slot]);
        for mut free in lists.0.into_iter().flatten() {
            // What is done would keep its stream's queue for nothing.
            free.after.retain(|access| self.keeps_done || !access.is_done());
            state.lists[ORPHANS].put(free);
        }
        state.vacant.push(slot);
    }

    /// Memory for a storage. Does not wait, unless the limit is reached and all that is left is
    /// waiting for free blocks of other sizes to fall idle (counted as a synchronisation).
    pub(crate) fn allocate(&self, shared: &Shared, request: &Request<'_>) -> Result<Allocation> {
        shared.counters.note(Act::Allocate, request.operation, request.site)?;
        let class = class_of(request.bytes);
        let size = class_size(class);
        let mut state = lock(&self.state);
        if let Some(free) = state.lists[request.slot].take_ready(class, request.stream) {
            state.usage.take(request.owner, request.bytes);
            return Ok(self.hand_out(free));
        }
        if let Some(free) = state.lists[ORPHANS].take_ready(class, request.stream) {
            state.usage.take(request.owner, request.bytes);
            return Ok(self.hand_out(free));
        }
        if self.fits(&state, size)
            && let Some(allocation) = self.grow(&mut state, size)
        {
            state.usage.take(request.owner, request.bytes);
            return Ok(allocation);
        }
        let (mut state, allocation) = self.allocate_under_pressure(shared, state, request)?;
        state.usage.take(request.owner, request.bytes);
        Ok(allocation)
    }

    fn hand_out(&self, free: FreeBlock) -> Allocation {
        let mut inherited = free.after;
        if !self.keeps_done {
            inherited.retain(|access| !access.is_done());
        }
        Allocation { block: Some(free.block), inherited, zeroed: false }
    }

    fn fits(&self, state: &State, size: usize) -> bool {
        self.limit.is_none_or(|limit| state.reserved.saturating_add(size) <= limit)
    }

    /// A new block from the system, `None` if it has none.
    fn grow(&self, state: &mut State, size: usize) -> Option<Allocation> {
        let block = Some(Arc::new(Block::new(size)?));
        state.reserved += size;
        state.reserved_peak = state.reserved_peak.max(state.reserved);
        Some(Allocation { block, inherited: Accesses::new(), zeroed: true })
    }

    /// The limit, or the system's memory, is reached: reuse what costs a stream-side wait, then
    /// give back what is idle, then wait for more to fall idle. A block that is too large is never
    /// handed out.
    fn allocate_under_pressure<'a>(
        &'a self,
        shared: &Shared,
        mut state: MutexGuard<'a, State>,
        request: &Request<'_>,
    ) -> Result<(MutexGuard<'a, State>, Allocation)> {
        let class = class_of(request.bytes);
        let size = class_size(class);
        let mut waited = false;
        loop {
            let reused = state
                .take_anywhere(request.slot, |lists| lists.take_ready(class, request.stream))
                .or_else(|| state.take_anywhere(request.slot, |lists| lists.take_oldest(class)));
            if let Some(free) = reused {
                let allocation = self.hand_out(free);
                return Ok((state, allocation));
            }
            // Before trimming: what falls idle meanwhile is there for the next turn.
            let busy = if executor::on_worker() { None } else { state.find_busy() };
            if let Some(allocation) = self.trim_and_grow(&mut state, size) {
                return Ok((state, allocation));
            }
            let Some(access) = busy else {
                return Err(self.exhausted(shared, &state, request));
            };
            drop(state);
            if !std::mem::replace(&mut waited, true) {
                shared.counters.note(Act::Synchronize, request.operation, request.site)?;
            }
            let wait = shared.trace_wait("wait for memory", Some(request.site));
            access.stream.wait_host(access.seq);
            drop(wait);
            state = lock(&self.state);
        }
    }

    fn exhausted(&self, shared: &Shared, state: &State, request: &Request<'_>) -> Error {
        Error::OutOfMemory {
            operation: request.operation,
            device: shared.id,
            owner: request.owner,
            requested: class_size(class_of(request.bytes)),
            current: state.usage.current(),
            reserved: state.reserved,
            limit: self.limit,
        }
    }

    fn trim_and_grow(&self, state: &mut State, size: usize) -> Option<Allocation> {
        match self.limit {
            Some(limit) => {
                let room = limit.checked_sub(size)?;
                state.trim(|reserved| reserved <= room);
            }
            // The system refused: give it all that can be given.
            None => drop(state.trim(|_| false)),
        }
        if self.fits(state, size) { self.grow(state, size) } else { None }
    }

    /// Takes back what a storage that is gone had; see [`Returned`].
    pub(crate) fn free(&self, slot: usize, returned: Returned) {
        let Returned { block, mut after, owner, bytes } = returned;
        if self.forgets {
            after.clear();
        }
        let mut state = lock(&self.state);
        state.usage.give(owner, bytes);
        state.lists[slot].put(FreeBlock { block, after });
    }

    /// Gives every idle block back to the system; returns the bytes.
    pub(crate) fn trim(&self) -> usize {
        lock(&self.state).trim(|_| false)
    }

    /// Lets go of all free blocks, once nobody can ask for one any more.
    pub(crate) fn clear(&self) {
        let mut state = lock(&self.state);
        state.lists.iter_mut().for_each(|lists| lists.0.clear());
    }

    pub(crate) fn report(&self) -> MemoryReport {
        self.report_with(|_| ()).0
    }

    /// A report, and what `look` finds at the same moment.
    pub(crate) fn report_with<T>(&self, look: impl FnOnce(&mut Usage) -> T) -> (MemoryReport, T) {
        let mut state = lock(&self.state);
        let report = state.usage.report(state.reserved, state.reserved_peak);
        (report, look(&mut state.usage))
    }
}

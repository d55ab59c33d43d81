//! The memory of tensors: a block with its owner and its latest accesses.

use crate::execution::MemoryBlock;
use crate::ground::sync::{Arc, AtomicU64, Mutex, MutexGuard, Ordering, lock};
use crate::hooks::Allocation;
use crate::order::{Hazards, TrackedMemory};
use std::cell::Cell;
use std::sync::PoisonError;

/// Storage ids given to threads so far in this process: an id is never reused, unlike an address.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);
/// Number of ids that a thread takes at once, so that threads seldom contend.
const IDS: u64 = 1024;

/// An id that no other storage of this process has or had.
pub(super) fn next_id() -> u64 {
    thread_local! {
        /// The thread's next number, and how many it has.
        static MINE: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    }
    let (next, left) = match MINE.get() {
        (_, 0) => (NEXT_ID.fetch_add(IDS, Ordering::Relaxed), IDS),
        mine => mine,
    };
    MINE.set((next + 1, left - 1));
    next
}

/// BlockSource that tensors share. It has a tenant while a [`StorageHandle`](super::StorageHandle) exists. When the
/// last handle is dropped, it is free, and returns to the pool in stream order unchanged: creating
/// or moving one would cost more than handing it out.
pub(crate) struct Storage<H> {
    /// `None` for no bytes.
    pub(super) block: Option<Arc<MemoryBlock>>,
    /// Size class of the block.
    class: usize,
    /// Whether the bytes were zeros when it was allocated: they had just come from the system.
    pub(super) fresh: bool,
    /// Changed under the device's submission lock only, or by the sole owner.
    hazards: Mutex<Hazards>,
    /// `None` while it is free.
    pub(super) tenant: Option<Tenant<H>>,
}

/// The current use of a storage.
pub(super) struct Tenant<H> {
    pub(super) allocation: Allocation,
    /// The stream that asked for it, to which the block returns.
    pub(super) home: H,
}

impl<H> Storage<H> {
    /// A storage without a tenant, of a block that was never used; `fresh` if it holds zeros.
    pub(crate) fn vacant(block: Option<Arc<MemoryBlock>>, class: usize, fresh: bool) -> Self {
        Storage { block, class, fresh, hazards: Mutex::default(), tenant: None }
    }

    fn tenant(&self) -> &Tenant<H> {
        match &self.tenant {
            Some(tenant) => tenant,
            None => unreachable!("a storage that a tensor holds has a tenant"),
        }
    }

    /// The accesses, with exclusive ownership.
    pub(crate) fn hazards_mut(&mut self) -> &mut Hazards {
        self.hazards.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Size class of its block.
    pub(crate) fn class(&self) -> usize {
        self.class
    }

    /// Bytes of its block.
    pub(crate) fn reserved(&self) -> usize {
        self.block.as_ref().map_or(0, |block| block.size())
    }

    /// Whether the bytes were zeros when it was made.
    pub(crate) fn is_fresh(&self) -> bool {
        self.fresh
    }

    pub(crate) fn home(&self) -> &H {
        &self.tenant().home
    }

    pub(crate) fn block(&self) -> Option<&Arc<MemoryBlock>> {
        self.block.as_ref()
    }
}

impl<H> TrackedMemory for Storage<H> {
    fn hazards(&self) -> MutexGuard<'_, Hazards> {
        lock(&self.hazards)
    }

    fn allocation(&self) -> &Allocation {
        &self.tenant().allocation
    }

    fn address(&self) -> u64 {
        self.block.as_ref().map_or(0, |block| block.address())
    }
}

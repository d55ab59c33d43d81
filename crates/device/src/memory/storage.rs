//! Storages, the memory of tensors: a block with its owner and its latest accesses.

use std::cell::Cell;
use std::sync::PoisonError;

use crate::execution::MemoryBlock;
use crate::ground::sync::{Arc, AtomicU64, Mutex, MutexGuard, Ordering, lock};
use crate::hooks::Allocation;
use crate::order::{Hazards, TrackedMemory};

/// The next storage id of this process that no thread has taken. Unlike an address, an id is never
/// reused.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);
/// Number of ids that a thread takes at once, so that threads seldom contend.
const IDS: u64 = 1024;

/// A storage id that is unique in this process.
pub(super) fn next_id() -> u64 {
    thread_local! {
        /// The thread's next id, and the number of ids that it has left.
        static MINE: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    }
    let (next, left) = match MINE.get() {
        (_, 0) => (NEXT_ID.fetch_add(IDS, Ordering::Relaxed), IDS),
        mine => mine,
    };
    MINE.set((next + 1, left - 1));
    next
}

/// A block of memory that tensors share. It has a tenant while a
/// [`StorageHandle`](super::StorageHandle) exists. When the last handle is dropped the storage is
/// free, and returns to the pool in stream order as it is: creating or moving a storage would cost
/// more than handing it out.
pub(crate) struct Storage<H> {
    /// `None` for no bytes.
    pub(super) block: Option<Arc<MemoryBlock>>,
    /// Size class of the block.
    class: usize,
    /// Whether the bytes were zeros at allocation, because the block was new from the system.
    pub(super) fresh: bool,
    /// Changed only under the device's submission lock, or by the sole owner.
    hazards: Mutex<Hazards>,
    /// `None` while it is free.
    pub(super) tenant: Option<Tenant<H>>,
}

/// The current user of a storage.
pub(super) struct Tenant<H> {
    pub(super) allocation: Allocation,
    /// The stream that allocated the storage, to which the block returns.
    pub(super) home: H,
}

impl<H> Storage<H> {
    /// A storage without a tenant, with a block that was never used; `fresh` if the block holds
    /// zeros.
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

    /// Whether the bytes were zeros at allocation.
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

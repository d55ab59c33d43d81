//! The memory of tensors: a block with its owner and its latest accesses.

use crate::block::Block;
use crate::ground::Result;
use crate::ground::sync::{Arc, AtomicU64, Mutex, MutexGuard, Ordering, lock};
use crate::hazard::Hazards;
use crate::hooks::Allocation;
use crate::pool::Request;
use crate::stream::Stream;
use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::PoisonError;
use triomphe::{Arc as Shared, UniqueArc};

/// Storage ids given to threads so far in this process: an id is never reused, unlike an address.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);
/// Number of ids that a thread takes at once, so that threads seldom contend.
const IDS: u64 = 1024;

/// An id that no other storage of this process has or had.
fn next_id() -> u64 {
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

/// Memory that tensors share. It has a tenant while a [`Handle`] exists. When the last handle is
/// dropped, it is free, and returns to the pool in stream order unchanged: creating or moving one
/// would cost more than handing it out.
pub(crate) struct Storage {
    /// `None` for no bytes.
    block: Option<Arc<Block>>,
    /// Size class of the block.
    class: usize,
    /// Whether the bytes were zeros when it was allocated: they had just come from the system.
    fresh: bool,
    /// Changed under the device's submission lock only, or by the sole owner.
    hazards: Mutex<Hazards>,
    /// `None` while it is free.
    tenant: Option<Tenant>,
}

/// The current use of a storage.
struct Tenant {
    allocation: Allocation,
    /// The stream that asked for it, to which the block returns.
    home: Stream,
}

/// A tensor's reference to a storage.
#[derive(Clone)]
pub(crate) struct Handle(ManuallyDrop<Shared<Storage>>);

impl Handle {
    /// Allocates memory from the stream's pool.
    pub(crate) fn new(request: &Request<'_>) -> Result<Handle> {
        let &Request { home, bytes, owner, site: origin, .. } = request;
        let mut storage = match bytes {
            0 => UniqueArc::new(Storage::vacant(None, 0)),
            _ => home.state().shared.pool.allocate(request)?,
        };
        let allocation = Allocation { id: next_id(), owner, origin, bytes };
        storage.tenant = Some(Tenant { allocation, home: home.clone() });
        Ok(Handle(ManuallyDrop::new(storage.shareable())))
    }

    /// Writes a new storage from the host, if nothing else uses it or its block; returns whether it
    /// did.
    pub(crate) fn fill_if_idle(&mut self, bytes: &[u8]) -> bool {
        let Some(storage) = Shared::get_mut(&mut self.0) else { return false };
        assert!(bytes.len() <= storage.allocation().bytes);
        let idle = storage.hazards_mut().is_idle();
        match &storage.block {
            Some(block) if idle => {
                // SAFETY: this is the only handle, so no work of this storage can be submitted
                // meanwhile. What was submitted, for it or for earlier tenants of the block, is
                // done, as `is_idle` says.
                unsafe { block.fill(bytes) };
                true
            }
            Some(_) => false,
            None => true,
        }
    }

    /// Fills a new storage with a pattern from the host, if its block comes from the system;
    /// returns whether it did.
    pub(crate) fn fill_fresh(&mut self, pattern: u32) -> bool {
        let Some(storage) = Shared::get_mut(&mut self.0) else { return false };
        if !storage.fresh {
            return false;
        }
        if let Some(block) = &storage.block {
            // SAFETY: this is the only handle, and nothing was ever submitted for this block.
            unsafe { block.fill_with(pattern) };
        }
        true
    }

    /// Whether another handle exists.
    pub(crate) fn is_shared(&self) -> bool {
        !Shared::is_unique(&self.0)
    }

    /// Whether both are of one storage.
    pub(crate) fn is_same(&self, other: &Handle) -> bool {
        Shared::ptr_eq(&self.0, &other.0)
    }
}

impl Deref for Handle {
    type Target = Storage;

    fn deref(&self) -> &Storage {
        &self.0
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: this is the end of the handle, and nothing looks at the field after this.
        let storage = unsafe { ManuallyDrop::take(&mut self.0) };
        // Of handles dropped at the same time, exactly one finds itself the last.
        if let Some(last) = Shared::into_unique(storage) {
            Storage::give_back(last);
        }
    }
}

impl Storage {
    /// A storage without a tenant, of a block that was never used.
    pub(crate) fn vacant(block: Option<Arc<Block>>, class: usize) -> Storage {
        Storage { block, class, fresh: true, hazards: Mutex::default(), tenant: None }
    }

    /// Returns it to the pool, with the accesses to it that may not be done.
    fn give_back(mut storage: UniqueArc<Storage>) {
        let shared = &storage.home().state().shared;
        let keep_done = shared.checks_order;
        if keep_done {
            for observer in shared.observers.all() {
                observer.memory_freed(storage.allocation(), storage.address());
            }
        }
        let Some(Tenant { allocation, home }) = storage.tenant.take() else { return };
        let Allocation { owner, bytes, .. } = allocation;
        if storage.block.is_some() {
            storage.fresh = false;
            storage.hazards_mut().bequeath(keep_done);
            home.state().shared.pool.free(home.slot(), storage, owner, bytes);
        }
    }

    fn tenant(&self) -> &Tenant {
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

    pub(crate) fn home(&self) -> &Stream {
        &self.tenant().home
    }

    /// Facts of its current use.
    pub(crate) fn allocation(&self) -> &Allocation {
        &self.tenant().allocation
    }

    /// Address of the first byte, 0 for no bytes.
    pub(crate) fn address(&self) -> u64 {
        self.block.as_ref().map_or(0, |block| block.data().as_ptr().addr() as u64)
    }

    pub(crate) fn block(&self) -> Option<&Arc<Block>> {
        self.block.as_ref()
    }

    /// The accesses; call only under the device's submission lock.
    pub(crate) fn hazards(&self) -> MutexGuard<'_, Hazards> {
        lock(&self.hazards)
    }
}

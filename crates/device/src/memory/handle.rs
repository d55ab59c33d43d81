//! Handles of storages: dropping the last handle returns the memory to the pool.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::panic::Location;

use triomphe::{Arc as Shared, UniqueArc};

use super::pool::{MemoryRequest, Pool};
use super::storage::{Storage, Tenant, next_id};
use crate::ground::sync::Arc;
use crate::ground::{Owner, Result};
use crate::hooks::Allocation;
use crate::order::{StreamState, TrackedMemory};

/// The stream that memory belongs to.
pub(crate) trait StreamHome: Clone {
    fn state(&self) -> &Arc<StreamState>;

    /// The pool of its device.
    fn pool(&self) -> &Pool<Self>;

    /// Index of its free lists in the pool.
    fn slot(&self) -> usize;
}

/// A tensor's handle of a storage.
pub(crate) struct StorageHandle<H: StreamHome>(ManuallyDrop<Shared<Storage<H>>>);

impl<H: StreamHome> StorageHandle<H> {
    /// Allocates memory from the pool of a stream.
    pub(crate) fn new(
        home: &H,
        bytes: usize,
        owner: Owner,
        operation: &'static str,
        site: &'static Location<'static>,
    ) -> Result<Self> {
        let mut storage = match bytes {
            0 => UniqueArc::new(Storage::vacant(None, 0, true)),
            _ => {
                let (stream, slot) = (home.state(), home.slot());
                let request = MemoryRequest { stream, slot, bytes, owner, operation, site };
                home.pool().allocate(&request)?
            }
        };
        let allocation = Allocation { id: next_id(), owner, origin: site, bytes };
        storage.tenant = Some(Tenant { allocation, home: home.clone() });
        Ok(StorageHandle(ManuallyDrop::new(storage.shareable())))
    }

    /// Writes a new storage from the host, if the host can address it and no work uses its block;
    /// returns whether it did.
    pub(crate) fn fill_if_idle(&mut self, bytes: &[u8]) -> bool {
        let Some(storage) = Shared::get_mut(&mut self.0) else { return false };
        assert!(bytes.len() <= storage.allocation().bytes);
        let idle = storage.hazards_mut().is_idle();
        let Some(block) = &storage.block else { return true };
        match block.host() {
            Some(block) if idle => {
                // SAFETY: this is the only handle, so no work of this storage can be submitted
                // meanwhile. All submitted work of this storage and of earlier tenants of the block
                // is done, as `is_idle` has checked.
                unsafe { block.fill(bytes) };
                true
            }
            _ => false,
        }
    }

    /// Fills a new storage with a pattern from the host, if its block is new and zeroed; returns
    /// false if the storage still has to be filled.
    pub(crate) fn fill_fresh(&mut self, pattern: u32) -> bool {
        let Some(storage) = Shared::get_mut(&mut self.0) else { return false };
        if !storage.fresh {
            return false;
        }
        if let Some(block) = storage.block.as_ref().and_then(|block| block.host()) {
            // SAFETY: this is the only handle, and nothing was ever submitted for this block.
            unsafe { block.fill_with(pattern) };
        }
        true
    }

    /// Whether another handle exists.
    pub(crate) fn is_shared(&self) -> bool {
        !Shared::is_unique(&self.0)
    }

    /// Whether both are handles of one storage.
    pub(crate) fn is_same(&self, other: &StorageHandle<H>) -> bool {
        Shared::ptr_eq(&self.0, &other.0)
    }
}

impl<H: StreamHome> Clone for StorageHandle<H> {
    fn clone(&self) -> Self {
        StorageHandle(self.0.clone())
    }
}

impl<H: StreamHome> Deref for StorageHandle<H> {
    type Target = Storage<H>;

    fn deref(&self) -> &Storage<H> {
        &self.0
    }
}

impl<H: StreamHome> Drop for StorageHandle<H> {
    fn drop(&mut self) {
        // SAFETY: the handle is being dropped, and the field is not used after this.
        let storage = unsafe { ManuallyDrop::take(&mut self.0) };
        // If several handles are dropped at the same time, exactly one becomes the unique owner.
        if let Some(last) = Shared::into_unique(storage) {
            give_back(last);
        }
    }
}

/// Returns a storage to its pool, with its accesses that may not be done.
fn give_back<H: StreamHome>(mut storage: UniqueArc<Storage<H>>) {
    let shared = &storage.home().state().shared;
    let keep_done = shared.checks_order;
    if keep_done {
        let (allocation, address) = (storage.allocation(), storage.address());
        shared.observers.notify(|observer| observer.memory_freed(allocation, address));
    }
    let Some(tenant) = storage.tenant.take() else { return };
    let (home, Allocation { owner, bytes, .. }) = (tenant.home, tenant.allocation);
    if storage.block.is_some() {
        storage.fresh = false;
        storage.hazards_mut().bequeath(keep_done);
        home.pool().free(home.slot(), storage, owner, bytes);
    }
}

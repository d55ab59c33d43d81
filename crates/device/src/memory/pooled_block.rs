//! Pool memory that belongs to no tensor. Its owner orders all uses of it.

use super::pool::{FreeStorage, MemoryRequest, ORPHANS, Pool};
use crate::execution::MemoryBlock;
use crate::ground::sync::Arc;
use crate::ground::{Act, Owner, Result};

/// A block that is counted in its pool, and returns to the pool when this is dropped. No work uses
/// the block by then.
pub(crate) struct PooledBlock<H> {
    pool: Arc<Pool<H>>,
    /// `None` once the block has returned.
    storage: Option<FreeStorage<H>>,
    owner: Owner,
    bytes: usize,
}

impl<H> PooledBlock<H> {
    /// A block for a request of at least 1 byte, without pending accesses. Waits as
    /// [`Pool::allocate`] does. If that gives a busy block, for lack of memory, also waits until
    /// the block is idle, which counts as a synchronisation.
    pub(crate) fn new(pool: &Arc<Pool<H>>, request: &MemoryRequest<'_>) -> Result<Self> {
        let &MemoryRequest { stream, bytes, owner, operation, site, .. } = request;
        let mut storage = pool.allocate(request)?;
        let pending: Vec<_> =
            storage.hazards_mut().inherited().iter().filter(|of| !of.is_done()).cloned().collect();
        let block = Self { pool: Arc::clone(pool), storage: Some(storage), owner, bytes };
        if !pending.is_empty() {
            stream.shared.counters.count(Act::Synchronize, operation, site)?;
            pending.iter().for_each(|access| access.stream.wait_host(access.seq));
        }
        Ok(block)
    }

    /// Its block.
    pub(crate) fn block(&self) -> Option<&Arc<MemoryBlock>> {
        self.storage.as_ref().and_then(|storage| storage.block())
    }
}

impl<H> Drop for PooledBlock<H> {
    fn drop(&mut self) {
        if let Some(mut storage) = self.storage.take() {
            storage.fresh = false;
            self.pool.free(ORPHANS, storage, self.owner, self.bytes);
        }
    }
}

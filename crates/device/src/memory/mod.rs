//! Stream-ordered memory (S2): storages with their pending accesses, the pool of storages, and the
//! memory in use by owner (V3).

mod handle;
mod pool;
mod pooled_block;
mod size_class;
mod storage;
mod usage;
mod watermark;

pub(crate) use handle::{StorageHandle, StreamHome};
pub(crate) use pool::{MemoryRequest, Pool};
pub(crate) use pooled_block::PooledBlock;
pub(crate) use storage::Storage;
pub(crate) use usage::Usage;
pub(crate) use watermark::WatermarkId;

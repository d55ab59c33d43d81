//! Blocks: contiguous memory that a device takes from its system.

use std::fmt;

use super::host_block::HostBlock;

/// A run of bytes at one address until it is dropped, aligned to [`ALIGNMENT`](super::ALIGNMENT).
#[derive(Debug)]
pub(crate) enum MemoryBlock {
    Host(HostBlock),
    Device(Box<dyn DeviceMemory>),
}

/// Memory that the host cannot address; dropping it frees it.
pub(crate) trait DeviceMemory: fmt::Debug + Send + Sync {
    /// Usable bytes.
    fn size(&self) -> usize;

    /// Address of the first byte, in the device's address space.
    fn address(&self) -> u64;
}

impl MemoryBlock {
    /// Usable bytes.
    pub(crate) fn size(&self) -> usize {
        match self {
            MemoryBlock::Host(block) => block.size(),
            MemoryBlock::Device(block) => block.size(),
        }
    }

    /// Address of the first byte, in the device's address space.
    pub(crate) fn address(&self) -> u64 {
        match self {
            MemoryBlock::Host(block) => block.data().as_ptr().addr() as u64,
            MemoryBlock::Device(block) => block.address(),
        }
    }

    /// The block as host memory; `None` if the host cannot address it.
    #[inline]
    pub(crate) fn host(&self) -> Option<&HostBlock> {
        match self {
            MemoryBlock::Host(block) => Some(block),
            MemoryBlock::Device(_) => None,
        }
    }
}

/// The source of a device's blocks.
pub(crate) enum BlockSource {
    Host,
    Device(Box<dyn Allocator>),
}

/// Allocator of a device's own memory. Returning memory to it waits for all work of the device, as
/// `cuMemFree` does.
pub(crate) trait Allocator: Send + Sync {
    /// A block of `size` bytes with undefined contents; `None` if no memory is left.
    fn allocate(&self, size: usize) -> Option<Box<dyn DeviceMemory>>;
}

impl BlockSource {
    /// A new block of `size` bytes, `None` if there is no memory left.
    pub(crate) fn block(&self, size: usize) -> Option<MemoryBlock> {
        match self {
            BlockSource::Host => HostBlock::new(size).map(MemoryBlock::Host),
            BlockSource::Device(allocator) => allocator.allocate(size).map(MemoryBlock::Device),
        }
    }

    /// Whether returning a block to the system waits for all work of the device.
    pub(crate) fn returning_waits(&self) -> bool {
        matches!(self, BlockSource::Device(_))
    }

    /// Whether a new block holds zeros.
    pub(crate) fn is_zeroed(&self) -> bool {
        matches!(self, BlockSource::Host)
    }
}

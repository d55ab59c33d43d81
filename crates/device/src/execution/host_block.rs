//! Memory of a CPU device: the only place that allocates from the system and frees to it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use memmap2::MmapMut;

use crate::ground::sync::RaceCell;

/// Alignment of every block, in bytes: a cache line, and the widest vector register.
pub(crate) const ALIGNMENT: usize = 64;

/// Smallest block in bytes that requests huge pages. Arenas, batches and datasets are read from end
/// to end or at random; with pages of 4 KiB address translation would limit both.
const HUGE: usize = 4 << 20;

/// Contiguous bytes at one address until the block is dropped. Always initialised: they begin as
/// zeros, and later hold the writes of kernels. Access to the bytes is ordered by submission
/// (`submit`), not here.
#[derive(Debug)]
pub(crate) struct HostBlock {
    /// The owner of the bytes.
    _home: HostMemory,
    /// First aligned byte.
    data: NonNull<u8>,
    size: usize,
    /// Notified of every access to the bytes; see [`RaceCell`].
    pub(crate) race: RaceCell,
}

/// Memory from the system, given back when it is dropped.
#[derive(Debug)]
enum HostMemory {
    /// Memory of the allocator.
    Heap { base: NonNull<u8>, layout: Layout },
    /// A mapping, which its `drop` ends.
    Pages(#[expect(dead_code, reason = "kept for its `drop`")] MmapMut),
}

// SAFETY: a block is memory and its address; it has no thread affinity. Its methods return
// addresses only; code that dereferences them proves exclusive access there.
unsafe impl Send for HostBlock {}
// SAFETY: as above: shared use only reads the address and the size, which never change.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// A block of `size` zeroed bytes, `None` if the system has no memory.
    pub(crate) fn new(size: usize) -> Option<HostBlock> {
        let room = size.checked_add(ALIGNMENT)?;
        let (home, base) = match size {
            HUGE.. if cfg!(not(miri)) => HostMemory::pages(room)?,
            _ => HostMemory::heap(room)?,
        };
        let skip = base.as_ptr().align_offset(ALIGNMENT);
        debug_assert!(skip < ALIGNMENT);
        // SAFETY: `skip` < ALIGNMENT and the allocation is `size + ALIGNMENT` bytes, so the result
        // and `size` bytes after it are inside.
        let data = unsafe { base.add(skip) };
        Some(HostBlock { _home: home, data, size, race: RaceCell::new() })
    }

    /// Usable bytes.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Address of the first byte, aligned to [`ALIGNMENT`].
    pub(crate) fn data(&self) -> NonNull<u8> {
        self.data
    }

    /// Fills the block with a pattern.
    ///
    /// # Safety
    /// The condition of [`fill`](HostBlock::fill).
    pub(crate) unsafe fn fill_with(&self, pattern: u32) {
        // SAFETY: the block is initialised, aligned for u32, its size a multiple of 64, and only
        // the caller has access to it.
        unsafe {
            std::slice::from_raw_parts_mut(self.data.as_ptr().cast::<u32>(), self.size / 4)
                .fill(pattern);
        }
    }

    /// Copies `bytes` to the block's start.
    ///
    /// # Safety
    /// No other thread and no queued work reads or writes the block meanwhile.
    pub(crate) unsafe fn fill(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.size);
        self.race.write();
        // SAFETY: the length was checked, `bytes` cannot overlap memory to which only the caller
        // has access, and both are valid for that length.
        unsafe { self.data.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }
}

impl HostMemory {
    /// Zeroed bytes from the allocator, and their address.
    fn heap(bytes: usize) -> Option<(HostMemory, NonNull<u8>)> {
        // The block is aligned by hand: with a large alignment the allocator would zero every page,
        // and with its natural alignment it leaves the pages untouched until a kernel writes them.
        let layout = Layout::from_size_align(bytes, 16).ok()?;
        // SAFETY: the layout's size is at least ALIGNMENT, so not zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some((HostMemory::Heap { base, layout }, base))
    }

    /// Zeroed pages, and the address of the first.
    fn pages(bytes: usize) -> Option<(HostMemory, NonNull<u8>)> {
        isize::try_from(bytes).ok()?;
        let mut pages = MmapMut::map_anon(bytes).ok()?;
        // A hint: a system without huge pages, or with none left, takes small ones.
        #[cfg(target_os = "linux")]
        let _ = pages.advise(memmap2::Advice::HugePage);
        let base = NonNull::new(pages.as_mut_ptr())?;
        Some((HostMemory::Pages(pages), base))
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        match self {
            // SAFETY: `base` came from the allocator with this layout, and is given back once.
            HostMemory::Heap { base, layout } => unsafe { dealloc(base.as_ptr(), *layout) },
            HostMemory::Pages(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_zeroed_and_writable_to_the_end() {
        for size in [64, 128, 4096, 1 << 20, HUGE - 64, HUGE, HUGE + 64] {
            let block = HostBlock::new(size).unwrap();
            assert_eq!(block.data().as_ptr() as usize % ALIGNMENT, 0);
            // SAFETY: this block has no other user.
            let bytes = unsafe { std::slice::from_raw_parts(block.data().as_ptr(), size) };
            assert!(bytes.iter().all(|&b| b == 0));
            // SAFETY: this block has no other user, and `bytes` is not used after this.
            unsafe { block.fill(&vec![7; size]) };
        }
    }

    #[test]
    fn absurd_sizes_are_refused() {
        assert!(HostBlock::new(usize::MAX).is_none());
        assert!(HostBlock::new(isize::MAX as usize).is_none());
    }
}

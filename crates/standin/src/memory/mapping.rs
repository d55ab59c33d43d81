//! Pages from the operating system, with an inaccessible page on both sides.

use std::ptr;

/// A multiple of the page size, also where pages are larger than on x86-64.
pub(crate) const PAGE: usize = 64 << 10;

/// Pages that can be read and written, between two inaccessible ones.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// The first page, which is closed.
    start: *mut u8,
    /// Bytes of all pages.
    bytes: usize,
}

// SAFETY: a mapping is an owned range of addresses without thread affinity.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Pages for at least `bytes` bytes; `None` if the system has no memory.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        let open = bytes.max(1).checked_next_multiple_of(PAGE)?;
        let bytes = open.checked_add(2 * PAGE)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the system chooses.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        let mapping = Self { start: start.cast(), bytes };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: pages of the mapping just made.
        let opened = unsafe { libc::mprotect(mapping.open().cast(), open, access) };
        (opened == 0).then_some(mapping)
    }

    /// The first byte that can be used.
    pub(crate) fn open(&self) -> *mut u8 {
        // SAFETY: a mapping has at least three pages.
        unsafe { self.start.add(PAGE) }
    }

    /// Number of bytes that can be used.
    pub(crate) fn open_bytes(&self) -> usize {
        self.bytes - 2 * PAGE
    }

    /// Gives the pages back and keeps the addresses: an access from now on faults.
    pub(crate) fn close(&self) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: new pages in place of the pages that this mapping owns.
        let closed =
            unsafe { libc::mmap(self.start.cast(), self.bytes, libc::PROT_NONE, flags, -1, 0) };
        assert!(closed == self.start.cast(), "mmap could not close pages of the stand-in");
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the pages of this mapping, to which no reference exists any more.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

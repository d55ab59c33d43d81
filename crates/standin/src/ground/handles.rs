//! Handles: the caller's pointers are numbers, which are looked up before use.
//!
//! Numbers are never given out twice, so a handle that was destroyed is recognised, where the real
//! driver may crash.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::CUresult;

/// The first handle: small numbers are the driver's names of its default streams.
const FIRST: u64 = 0x1000;

/// Distance of two handles, so that they look like pointers to something aligned.
const STEP: u64 = 16;

static NEXT: AtomicU64 = AtomicU64::new(FIRST);

/// Objects of one kind by handle.
#[derive(Debug)]
pub(crate) struct HandleTable<T>(BTreeMap<u64, T>);

impl<T> HandleTable<T> {
    /// A table without objects.
    pub(crate) fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Takes an object and returns its handle.
    pub(crate) fn insert(&mut self, object: T) -> u64 {
        let handle = NEXT.fetch_add(STEP, Ordering::Relaxed);
        self.0.insert(handle, object);
        handle
    }

    /// The object of a handle, or the error for one that is none.
    pub(crate) fn get(&self, handle: u64) -> Result<&T, CUresult> {
        self.0.get(&handle).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    /// The object of a handle, to change.
    pub(crate) fn get_mut(&mut self, handle: u64) -> Result<&mut T, CUresult> {
        self.0.get_mut(&handle).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    /// Takes an object out.
    pub(crate) fn remove(&mut self, handle: u64) -> Result<T, CUresult> {
        self.0.remove(&handle).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    /// Handles and objects, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.0.iter().map(|(handle, object)| (*handle, object))
    }

    /// Handles and objects, to change.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut T)> {
        self.0.iter_mut().map(|(handle, object)| (*handle, object))
    }

    /// Keeps the objects for which `keep` returns true.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(u64, &T) -> bool) {
        self.0.retain(|handle, object| keep(*handle, object));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_good_until_it_is_removed_and_never_again() {
        let mut table = HandleTable::new();
        let first = table.insert("a");
        assert_eq!(table.get(first), Ok(&"a"));
        assert_eq!(table.remove(first), Ok("a"));
        let second = table.insert("b");
        assert_ne!(first, second);
        assert_eq!(table.get(first), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
        assert_eq!(table.remove(first), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    }
}

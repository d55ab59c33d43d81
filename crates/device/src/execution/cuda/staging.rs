//! Staging buffers: host memory that copies between host and device go through.
//!
//! Most copies take a buffer from the memory that the device keeps for all of them
//! ([`CudaContext`]). Copies of a known size that repeat, such as those of streamed batches, have a
//! [`StagingRing`], which is allocated before the first copy.

use std::ffi::c_void;
use std::fmt;

use super::context::CudaContext;
use super::driver::Pinned;
use crate::ground::sync::{Arc, Mutex, lock};
use crate::ground::{CudaError, Error, Result};

/// Host memory of one copy. When no copy uses it any more, its owner drops it or gives it back for
/// reuse ([`StagingBuffer::release`]).
pub(crate) struct StagingBuffer {
    // Freed before the context, whose last handle this may be: fields are dropped in this order.
    memory: StagingMemory,
    /// The ring to which the memory returns; `None` for memory of the context.
    ring: Option<Arc<StagingRing>>,
    context: Arc<CudaContext>,
}

enum StagingMemory {
    /// Page-locked: the device copies while the host continues.
    Pinned(Pinned),
    /// Pageable, for very large copies or without page-locked memory: the driver copies in steps,
    /// and the call waits. Words of 8 bytes, so that any element is aligned.
    Plain(Vec<u64>),
}

impl StagingBuffer {
    /// A staging buffer for a copy of `bytes` bytes. The context must be current.
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> StagingBuffer {
        let memory = match context.take_pinned(bytes) {
            Some(pinned) => StagingMemory::Pinned(pinned),
            None => StagingMemory::Plain(vec![0; bytes.div_ceil(8)]),
        };
        StagingBuffer { memory, ring: None, context: context.clone() }
    }

    /// Whether the memory belongs to this ring.
    pub(super) fn is_of(&self, ring: &Arc<StagingRing>) -> bool {
        self.ring.as_ref().is_some_and(|own| Arc::ptr_eq(own, ring))
    }

    /// Whether the buffer is pageable, so that the host waits during a copy.
    pub(super) fn is_plain(&self) -> bool {
        matches!(self.memory, StagingMemory::Plain(_))
    }

    /// Bytes that count against the limit of staging memory in flight; none for memory of a ring,
    /// whose number of buffers is its limit.
    pub(super) fn limited_bytes(&self) -> usize {
        match &self.memory {
            StagingMemory::Pinned(_) if self.ring.is_some() => 0,
            StagingMemory::Pinned(pinned) => pinned.size(),
            StagingMemory::Plain(words) => words.len() * size_of::<u64>(),
        }
    }

    /// Address for copies of the device.
    pub(super) fn address(&mut self) -> *mut c_void {
        match &mut self.memory {
            StagingMemory::Pinned(pinned) => pinned.address(),
            StagingMemory::Plain(words) => words.as_mut_ptr().cast(),
        }
    }

    /// Its bytes, for the host.
    ///
    /// # Safety
    /// No copy of the device that reads or writes the memory is pending.
    pub(crate) unsafe fn bytes(&mut self) -> &mut [u8] {
        match &mut self.memory {
            // SAFETY: the caller's promise.
            StagingMemory::Pinned(pinned) => unsafe { pinned.bytes() },
            StagingMemory::Plain(words) => bytemuck::cast_slice_mut(words),
        }
    }

    /// Gives the memory back for reuse, from any thread. No copy may have used the buffer.
    pub(crate) fn give_back(self) {
        if self.context.bind().is_ok() {
            self.release();
        }
    }

    /// Gives the memory back for reuse. The context is current, and no copy uses the memory any
    /// more.
    pub(super) fn release(self) {
        let StagingMemory::Pinned(pinned) = self.memory else { return };
        match &self.ring {
            Some(ring) => lock(&ring.free).push(pinned),
            None => self.context.give_pinned(pinned),
        }
    }
}

impl fmt::Debug for StagingBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StagingBuffer({} bytes)", self.limited_bytes())
    }
}

/// Alignment of the buffers of a ring: a cache line.
const BUFFER_ALIGNMENT: usize = 64;

/// Page-locked buffers of one size that copies use in turn, allocated before the first copy.
pub(crate) struct StagingRing {
    /// Buffers that neither the host nor a copy uses.
    free: Mutex<Vec<Pinned>>,
    /// Bytes of a buffer.
    bytes: usize,
    // Dropped last, because memory is freed in this context.
    context: Arc<CudaContext>,
}

impl StagingRing {
    /// A ring of `count` buffers of `bytes` bytes, which are locked here.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the system does not lock that many bytes.
    pub(super) fn new(
        context: &Arc<CudaContext>,
        count: usize,
        bytes: usize,
    ) -> Result<Arc<StagingRing>> {
        let ring = StagingRing { free: Mutex::default(), bytes, context: context.clone() };
        *lock(&ring.free) = ring.allocate(count)?;
        Ok(Arc::new(ring))
    }

    /// Takes a free buffer.
    pub(super) fn take(self: &Arc<Self>) -> Option<StagingBuffer> {
        let pinned = lock(&self.free).pop()?;
        Some(self.buffer(pinned))
    }

    /// An additional buffer of the ring.
    ///
    /// # Errors
    /// As [`new`](StagingRing::new).
    pub(super) fn grow(self: &Arc<Self>) -> Result<StagingBuffer> {
        let mut added = self.allocate(1)?;
        added.pop().map(|pinned| self.buffer(pinned)).ok_or_else(|| self.refused(1, None))
    }

    fn buffer(self: &Arc<Self>, pinned: Pinned) -> StagingBuffer {
        let (memory, context) = (StagingMemory::Pinned(pinned), self.context.clone());
        StagingBuffer { memory, ring: Some(self.clone()), context }
    }

    fn allocate(&self, count: usize) -> Result<Vec<Pinned>> {
        let device = self.context.id;
        self.context.bind().map_err(|source| Error::Cuda { device, source })?;
        let size = self.bytes.max(1).checked_next_multiple_of(BUFFER_ALIGNMENT);
        let all = size.and_then(|size| size.checked_mul(count.max(1)));
        match size.filter(|_| all.is_some_and(|bytes| bytes <= isize::MAX as usize)) {
            None => Err(self.refused(count, None)),
            Some(size) => {
                Pinned::pieces(size, count.max(1)).map_err(|cause| self.refused(count, Some(cause)))
            }
        }
    }

    fn refused(&self, count: usize, cause: Option<CudaError>) -> Error {
        let bytes = self.bytes;
        let cause = cause.map_or_else(|| "more than there can be".to_owned(), |c| c.to_string());
        let source = CudaError::NoLockedMemory { count, bytes, cause };
        Error::Cuda { device: self.context.id, source }
    }
}

impl Drop for StagingRing {
    fn drop(&mut self) {
        // Freeing the buffers acts on the current context.
        let _ = self.context.bind();
    }
}

impl fmt::Debug for StagingRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StagingRing({} free buffers of {} bytes)", lock(&self.free).len(), self.bytes)
    }
}

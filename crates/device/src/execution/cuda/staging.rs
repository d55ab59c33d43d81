//! Staging buffers: host memory that copies between host and device go through.

use std::ffi::c_void;
use std::fmt;

use super::context::CudaContext;
use super::driver::Pinned;
use crate::ground::sync::Arc;

/// Host memory of one copy. When no copy uses it any more, its owner drops it or gives it back for
/// reuse ([`StagingBuffer::release`]).
pub(crate) struct StagingBuffer {
    // Freed before the context, whose last handle this may be: fields are dropped in this order.
    memory: StagingMemory,
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
        StagingBuffer { context: context.clone(), memory }
    }

    /// Whether the buffer is pageable, so that the host waits during a copy.
    pub(super) fn is_plain(&self) -> bool {
        matches!(self.memory, StagingMemory::Plain(_))
    }

    pub(super) fn size(&self) -> usize {
        match &self.memory {
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
        if let StagingMemory::Pinned(pinned) = self.memory {
            self.context.give_pinned(pinned);
        }
    }
}

impl fmt::Debug for StagingBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StagingBuffer({} bytes)", self.size())
    }
}

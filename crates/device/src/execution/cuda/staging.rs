//! Host memory that copies go through.

use super::context::CudaContext;
use super::driver::Pinned;
use crate::ground::sync::Arc;
use std::ffi::c_void;
use std::fmt;

/// Host memory of one copy. Its owner gives it back ([`StagingBuffer::release`]), or drops it, when no
/// copy uses it any more.
pub(crate) struct StagingBuffer {
    context: Arc<CudaContext>,
    memory: StagingMemory,
}

enum StagingMemory {
    /// Page-locked: the device copies while the host goes on.
    Pinned(Pinned),
    /// Where there is no more of that, or for very large copies: the driver copies in steps, and
    /// the call waits. Words, so that any element is aligned.
    Plain(Vec<u64>),
}

impl StagingBuffer {
    /// StagingMemory for a copy of so many bytes. The context is current.
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> StagingBuffer {
        let memory = match context.take_pinned(bytes) {
            Some(pinned) => StagingMemory::Pinned(pinned),
            None => StagingMemory::Plain(vec![0; bytes.div_ceil(8)]),
        };
        StagingBuffer { context: context.clone(), memory }
    }

    /// Whether the host waits while a copy uses it.
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
    pub(super) unsafe fn bytes(&mut self) -> &mut [u8] {
        match &mut self.memory {
            // SAFETY: the caller's promise.
            StagingMemory::Pinned(pinned) => unsafe { pinned.bytes() },
            StagingMemory::Plain(words) => bytemuck::cast_slice_mut(words),
        }
    }

    /// Gives it back for reuse. The context is current, and no copy uses it any more.
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

//! Memory of a CUDA device as buffers of the MPI library. The only unsafe code of this crate.
//!
//! The library gets addresses, and no Rust reference to the memory exists: the host cannot read it.
//! A buffer is valid because it borrows from [`DeviceMemory`], which has lent the tensor and keeps
//! its memory alive. An access of a kernel during a transfer would leave wrong elements, and would
//! not break a rule of Rust; [`Mpi`](super::Mpi) prevents it by waiting before and after.

use std::ffi::c_void;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use meristem_device::{DeviceId, LentDeviceTensor};
use mpi::Count;
use mpi::traits::{AsDatatype, Buffer, BufferMut, Collection, Equivalence, Pointer, PointerMut};

use super::chunks::chunks;

/// Memory of a tensor on a CUDA device, lent to MPI until this is dropped.
pub(super) struct DeviceMemory {
    /// The messages, which lie within the memory.
    chunks: Vec<DeviceChunk>,
    lent: LentDeviceTensor,
}

impl DeviceMemory {
    /// All memory of a lent tensor.
    ///
    /// # Panics
    /// For a tensor of a CPU device. Its memory has Rust references, in kernels.
    pub(super) fn new(lent: LentDeviceTensor) -> DeviceMemory {
        let tensor = lent.tensor();
        assert!(matches!(tensor.device().id(), DeviceId::Cuda(_)), "memory of a CUDA device");
        let mut address = lent.address();
        let chunk = |bytes: usize| {
            let chunk = DeviceChunk { address, bytes };
            address += bytes as u64;
            chunk
        };
        let chunks = chunks(tensor.numel() * tensor.dtype().size()).map(chunk).collect();
        DeviceMemory { chunks, lent }
    }

    /// The messages, in order.
    pub(super) fn chunks(&self) -> &[DeviceChunk] {
        &self.chunks
    }

    /// The messages to be received, in order.
    pub(super) fn chunks_mut(&mut self) -> &mut [DeviceChunk] {
        &mut self.chunks
    }

    /// Makes the device's context current on the calling thread: the library takes an address in
    /// the current context.
    pub(super) fn make_context_current(&self) -> meristem_device::Result<()> {
        self.lent.make_context_current()
    }
}

/// A part of the memory of a [`DeviceMemory`], at most [`CHUNK`](super::chunks::CHUNK) bytes.
/// Neither copied nor made elsewhere, so that it is always borrowed.
pub(super) struct DeviceChunk {
    address: u64,
    bytes: usize,
}

// SAFETY: the address points to device memory, which `DeviceMemory` keeps alive.
unsafe impl Pointer for DeviceChunk {
    fn pointer(&self) -> *const c_void {
        with_exposed_provenance(self.address as usize)
    }
}

// SAFETY: as for `Pointer`. The memory may be written, because the tensor is lent for that.
unsafe impl PointerMut for DeviceChunk {
    fn pointer_mut(&mut self) -> *mut c_void {
        with_exposed_provenance_mut(self.address as usize)
    }
}

// SAFETY: the memory at the address has this number of bytes.
unsafe impl Collection for DeviceChunk {
    fn count(&self) -> Count {
        // At most `CHUNK`, which a test compares with the largest count.
        self.bytes as Count
    }
}

// SAFETY: the elements are bytes, and every byte of device memory is initialised.
unsafe impl AsDatatype for DeviceChunk {
    type Out = <u8 as Equivalence>::Out;

    fn as_datatype(&self) -> Self::Out {
        u8::equivalent_datatype()
    }
}

// SAFETY: address, number and type describe the same memory, as said above.
unsafe impl Buffer for DeviceChunk {}
// SAFETY: as for `Buffer`.
unsafe impl BufferMut for DeviceChunk {}

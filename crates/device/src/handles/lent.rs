//! Lent tensors: memory for code that uses addresses, such as the arrays of another library.

use super::{Event, Tensor};
use crate::ground::{Error, Property, Result};
use crate::order::TrackedMemory;

/// Host memory of a tensor that other code reads and writes by its address. The memory is not
/// reused while this lives, and counts as shared ([`Tensor::is_shared`]).
///
/// Launches with other handles of the tensor are not ordered after accesses by address. Code that
/// launches must check whether the tensor is shared, as the ring of a gather does.
#[derive(Debug)]
pub struct LentTensor {
    tensor: Tensor,
    address: usize,
}

impl LentTensor {
    /// Lends a tensor of a CPU device. Waits for all enqueued work that uses the tensor.
    #[track_caller]
    pub(super) fn new(tensor: &Tensor) -> Result<Self> {
        let block = tensor.storage().block();
        let start = block.map(|block| block.host().map(|block| block.data()));
        let Some(start) = start.unwrap_or(Some(std::ptr::NonNull::dangling())) else {
            return Err(Error::Mismatch {
                operation: "Tensor::lend",
                argument: "self".to_owned(),
                property: Property::Device,
                expected: "cpu, whose memory the host can address".into(),
                got: tensor.device().id().to_string(),
            });
        };
        let mut pending = tensor.storage().hazards().last_of_each_stream();
        pending.try_for_each(|access| Event(access).synchronize())?;
        let address = start.as_ptr().expose_provenance() + tensor.offset();
        Ok(Self { tensor: tensor.clone(), address })
    }

    /// Address of the first element. Valid while this lives.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Number of bytes of the tensor.
    pub fn bytes(&self) -> usize {
        self.tensor.bytes()
    }

    /// The tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// Memory of a tensor on its device, which other code of the process reads by its address: host
/// memory, or memory of a CUDA device in its primary context. It is not reused while this lives.
///
/// If this is the last handle of a tensor on a CUDA device, its drop waits until the whole device
/// is idle: other code may have enqueued work that still reads the memory.
#[derive(Debug)]
pub struct LentDeviceTensor {
    tensor: Tensor,
}

impl LentDeviceTensor {
    /// Lends a tensor. Waits for all enqueued work that uses the tensor, so that streams of other
    /// code need not wait for it.
    #[track_caller]
    pub(super) fn new(tensor: &Tensor) -> Result<Self> {
        let mut pending = tensor.storage().hazards().last_of_each_stream();
        pending.try_for_each(|access| Event(access).synchronize())?;
        Ok(Self { tensor: tensor.clone() })
    }

    /// Address of the first element in the memory of the device. Valid while this lives.
    pub fn address(&self) -> u64 {
        self.tensor.address()
    }

    /// The tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

impl Drop for LentDeviceTensor {
    fn drop(&mut self) {
        if !self.tensor.is_shared() {
            self.tensor.stream().state().wait_for_device();
        }
    }
}

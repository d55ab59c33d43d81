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
        let pending = tensor.storage().hazards().all();
        pending.into_iter().try_for_each(|access| Event(access).synchronize())?;
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

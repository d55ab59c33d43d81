//! Lent tensors: memory for code that uses addresses, such as the arrays of another library.

use std::panic::Location;

use super::expect::Expect;
use super::{Event, Tensor};
use crate::execution::check_may_wait;
use crate::ground::{Act, Error, Property, Result};
use crate::order::{Access, TrackedMemory};

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

/// Memory of a tensor on its device, which other code of the process reads and writes by its
/// address: host memory, or memory of a CUDA device in its primary context. It is not reused while
/// this lives.
///
/// Launches are not ordered after accesses by address. Code that writes must have ended before the
/// next launch with the tensor is enqueued, and code that reads before the next launch that writes.
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

    /// Makes the primary context of the tensor's CUDA device current on the calling thread, as
    /// libraries that take addresses expect. Has no effect for a CPU device.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn make_context_current(&self) -> Result<()> {
        let queue = self.tensor.stream().state().cuda_queue();
        queue.map_or(Ok(()), |queue| queue.make_context_current())
    }
}

/// Lends tensors of any streams of one device, as [`Tensor::lend_on_device`] lends one, with ONE
/// counted wait for all of them. Nothing is counted for no tensors.
///
/// # Errors
/// [`Error::Mismatch`] if they are not on one device; the errors of [`Tensor::lend_on_device`].
#[track_caller]
pub fn lend_on_device(tensors: &[&Tensor]) -> Result<Vec<LentDeviceTensor>> {
    let (operation, site) = ("lend_on_device", Location::caller());
    check_may_wait(operation)?;
    let Some(first) = tensors.first() else { return Ok(Vec::new()) };
    let (shared, expect) = (first.device().shared(), Expect::device(first.device()));
    for (i, tensor) in tensors.iter().enumerate() {
        expect.check(operation, format_args!("tensors[{i}]"), tensor)?;
    }
    shared.counters.count(Act::Synchronize, operation, site)?;
    let _wait = shared.observers.host_waits(operation, Some(site));
    // The latest access of each stream, because the end of an access is the end of all before it.
    let mut pending: Vec<Access> = Vec::new();
    for tensor in tensors {
        for access in tensor.storage().hazards().last_of_each_stream() {
            match pending.iter_mut().find(|known| known.is_on(&access.stream)) {
                Some(known) => known.seq = known.seq.max(access.seq),
                None => pending.push(access),
            }
        }
    }
    pending.iter().for_each(|access| access.stream.wait_host(access.seq));
    pending.iter().try_for_each(|access| access.stream.check_result(access.seq))?;
    Ok(tensors.iter().map(|tensor| LentDeviceTensor { tensor: (*tensor).clone() }).collect())
}

impl Drop for LentDeviceTensor {
    fn drop(&mut self) {
        if !self.tensor.is_shared() {
            self.tensor.stream().state().wait_for_device();
        }
    }
}

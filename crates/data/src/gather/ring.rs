//! Batch buffers of one env, reused when no handle to them is alive (D3, D5).

use meristem_device::{DType, Expect, MemoryFormat, Owner, Stream, Tensor};

use crate::error::Result;
use crate::shape::SampleShape;
use crate::targets::TargetForm;

struct BatchBuffers {
    /// f32 (N, C, H, W), channels last; N is the ring's capacity.
    inputs: Tensor,
    /// u32 [N], or f32 [N, K].
    targets: Tensor,
}

/// The buffers of one env: slots, of which each batch takes the first free one.
pub(super) struct Ring {
    stream: Stream,
    shape: SampleShape,
    targets: TargetForm,
    /// Samples of a slot.
    capacity: usize,
    /// Number of slots that [`Ring::allocate`] allocates.
    depth: usize,
    slots: Vec<BatchBuffers>,
    /// Number of slots added because every slot was held.
    grown: usize,
}

impl Ring {
    /// A ring for `depth` slots of `capacity` samples, which has no memory yet.
    pub(super) fn new(
        stream: &Stream,
        (shape, targets): (SampleShape, TargetForm),
        capacity: usize,
        depth: usize,
    ) -> Self {
        let (stream, slots) = (stream.clone(), Vec::with_capacity(depth));
        Self { stream, shape, targets, capacity, depth, slots, grown: 0 }
    }

    /// Allocates the slots that are missing up to `depth`.
    pub(super) fn allocate(&mut self) -> Result<()> {
        while self.slots.len() < self.depth {
            self.add()?;
        }
        Ok(())
    }

    /// Gives the slots another capacity. Allocates them again if they are allocated.
    pub(super) fn resize(&mut self, capacity: usize) -> Result<()> {
        if capacity == self.capacity {
            return Ok(());
        }
        self.capacity = capacity;
        let is_allocated = !self.slots.is_empty();
        self.free();
        if is_allocated { self.allocate() } else { Ok(()) }
    }

    /// Frees the slots; batches that are alive keep theirs.
    pub(super) fn free(&mut self) {
        self.slots.clear();
    }

    /// Adds a slot. Checks its form once, for all batches that it will hold (V1).
    fn add(&mut self) -> Result<()> {
        let (shape, format) = (self.shape.batch(self.capacity), MemoryFormat::ChannelsLast);
        let (stream, owner) = (&self.stream, Owner::Batches);
        let inputs = Tensor::empty_with_format(stream, shape, DType::F32, format, owner)?;
        let (target_shape, dtype) = (self.targets.batch(self.capacity), self.targets.dtype());
        let targets = Tensor::empty(stream, target_shape, dtype, owner)?;
        let expect = Expect::stream(stream).dtype(DType::F32).shape(shape).channels_last();
        expect.check("gather", "inputs", &inputs)?;
        self.slots.push(BatchBuffers { inputs, targets });
        Ok(())
    }

    /// Buffers for `n` samples, at most the capacity: the first slot without a handle outside of
    /// the ring. A loop that drops each batch before it takes the next thus uses one slot, which
    /// stays in the caches. Kernels may still read the slot; the device orders the new writes after
    /// these reads.
    /// If every slot is held, the ring grows by one.
    pub(super) fn take(&mut self, n: usize) -> Result<(Tensor, Tensor)> {
        let free = |slot: &BatchBuffers| !slot.inputs.is_shared() && !slot.targets.is_shared();
        let chosen = match self.slots.iter().position(free) {
            Some(i) => i,
            None => {
                self.add()?;
                self.grown += 1;
                self.slots.len() - 1
            }
        };
        let BatchBuffers { inputs, targets } = &self.slots[chosen];
        let format = MemoryFormat::ChannelsLast;
        let inputs = inputs.view_with_format(0, self.shape.batch(n), format)?;
        Ok((inputs, targets.view(0, self.targets.batch(n))?))
    }

    /// Shape of the samples.
    pub(super) fn shape(&self) -> SampleShape {
        self.shape
    }

    /// Number of slots added because every slot was held.
    pub(super) fn grown(&self) -> usize {
        self.grown
    }
}

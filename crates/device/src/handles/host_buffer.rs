//! Host memory for uploads, which another thread may fill.

use std::fmt;
use std::panic::Location;

use super::{Launch, Stream, Tensor};
use crate::execution::{HostBytes, StagingBuffer, StagingRing, StreamWork, Transfer};
use crate::ground::sync::Arc;
use crate::ground::{Act, Error, Property, Result};
use crate::hooks::Category;

/// Host buffers of one size for uploads on one stream, from [`Stream::host_buffers`]. On a CUDA
/// device they are page-locked, so that the device copies from them while the host continues, and
/// they are allocated once, for uploads that repeat. On a CPU device each buffer is new.
pub struct HostBuffers {
    stream: Stream,
    bytes: usize,
    /// Only for a CUDA device.
    ring: Option<Arc<StagingRing>>,
}

impl HostBuffers {
    /// A buffer that no upload uses. Any thread may fill it. On a CUDA device, if all are in use,
    /// waits for the oldest of their uploads on the stream, which counts as a synchronisation; if
    /// the program holds them all, the number of buffers grows by one, which counts as an
    /// allocation.
    ///
    /// # Errors
    /// [`Error::Cuda`], [`Error::DeviceFailed`]; [`Error::HotScope`] if an open scope forbids the
    /// wait or the allocation.
    #[track_caller]
    pub fn take(&self) -> Result<HostBuffer> {
        let (operation, site) = ("HostBuffers::take", Location::caller());
        let (state, bytes) = (self.stream.state(), self.bytes);
        let shared = &state.shared;
        let memory = match (&self.ring, state.cuda_queue()) {
            (Some(ring), Some(queue)) => {
                let wait = || {
                    shared.counters.count(Act::Synchronize, operation, site)?;
                    Ok(shared.observers.host_waits(operation, Some(site)))
                };
                let grow = || shared.counters.count(Act::Allocate, operation, site);
                HostMemory::Staging(queue.take_staging(ring, wait, grow)?)
            }
            _ => HostMemory::Plain(vec![0; bytes].into()),
        };
        Ok(HostBuffer { memory: Some(memory), bytes })
    }
}

impl fmt::Debug for HostBuffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuffers(of {} bytes for {:?})", self.bytes, self.stream)
    }
}

/// Host memory of a given size, from [`HostBuffers::take`]. Any thread may fill it, for example
/// with the images of the next batch. [`Stream::upload_from`] consumes it; dropped, it is free for
/// another upload.
pub struct HostBuffer {
    /// `None` once it is uploaded.
    memory: Option<HostMemory>,
    bytes: usize,
}

enum HostMemory {
    Plain(Box<[u8]>),
    Staging(StagingBuffer),
}

impl HostBuffer {
    /// Its bytes. The contents of a buffer that was not filled are unspecified.
    pub fn bytes(&mut self) -> &mut [u8] {
        match &mut self.memory {
            None => &mut [],
            Some(HostMemory::Plain(bytes)) => bytes,
            // SAFETY: the buffer has not been uploaded, since that takes the memory, and earlier
            // copies from this memory are complete.
            Some(HostMemory::Staging(staging)) => unsafe { &mut staging.bytes()[..self.bytes] },
        }
    }
}

impl Drop for HostBuffer {
    /// Returns page-locked memory to its ring for a later upload, unless it was uploaded.
    fn drop(&mut self) {
        if let Some(HostMemory::Staging(staging)) = self.memory.take() {
            staging.give_back();
        }
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuffer({} bytes)", self.bytes)
    }
}

impl Stream {
    /// Host buffers of `bytes` bytes for uploads on this stream, best a stream from
    /// [`copy_stream`](super::Device::copy_stream). On a CUDA device `count` of them are locked in
    /// memory here, at least one, so that no upload allocates; does not wait for the device.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the system does not lock that many bytes.
    pub fn host_buffers(&self, count: usize, bytes: usize) -> Result<HostBuffers> {
        let queue = self.state().cuda_queue();
        let ring = queue.map(|queue| queue.staging_ring(count, bytes)).transpose()?;
        Ok(HostBuffers { stream: self.clone(), bytes, ring })
    }

    /// Overwrites a tensor with the first bytes of a buffer, in stream order: one command, counted
    /// as one copy to the device. Waits only for space if the stream's queue is full.
    ///
    /// # Errors
    /// The errors of [`Launch::run`], the tensor being argument 0; [`Error::Mismatch`] for a buffer
    /// that is smaller than the tensor; [`Error::HotScope`] if an open scope forbids the copy.
    #[track_caller]
    pub fn upload_from(
        &self,
        operation: &'static str,
        tensor: &Tensor,
        mut buffer: HostBuffer,
    ) -> Result<()> {
        if buffer.bytes < tensor.bytes() {
            return Err(Error::Mismatch {
                operation,
                argument: "buffer".to_owned(),
                property: Property::Shape,
                expected: format!("at least {} bytes", tensor.bytes()),
                got: buffer.bytes.to_string(),
            });
        }
        let launch = Launch::new(self, operation, Some(Act::CopyToDevice), Location::caller());
        let launch = launch.write(tensor);
        let Some(queue) = self.state().cuda_queue() else {
            let bytes = buffer.bytes()[..tensor.bytes()].into();
            return launch.transfer(Transfer::Upload(HostBytes::Staged(bytes)));
        };
        let counters = &self.state().shared.counters;
        // The memory is taken when the scopes have permitted the copy: if they refuse it, dropping
        // the buffer returns the memory to its ring.
        launch.submit(Category::CopyToDevice, |record| {
            let task = match buffer.memory.take() {
                Some(HostMemory::Staging(staging)) => queue.upload(staging, record)?,
                memory => {
                    buffer.memory = memory;
                    let bytes = buffer.bytes()[..tensor.bytes()].into();
                    let upload = Transfer::Upload(HostBytes::Staged(bytes));
                    queue.transfer(upload, record, counters)?
                }
            };
            Ok(StreamWork::Cuda(Box::new(task)))
        })
    }
}

//! Host memory for uploads, which another thread may fill.

use std::fmt;
use std::panic::Location;

use super::{Device, DeviceBackend, Launch, Stream, Tensor};
use crate::execution::{HostBytes, StagingBuffer, StreamWork, Transfer};
use crate::ground::{Act, Error, Property, Result};
use crate::hooks::Category;

/// Host memory of a given size, from [`Device::host_buffer`]. Any thread may fill it, for example
/// with the images of the next batch. [`Stream::upload_from`] consumes it. For a CUDA device it is
/// page-locked, so that the device copies from it while the host continues.
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
    /// Its bytes. The contents of a new buffer are unspecified.
    pub fn bytes(&mut self) -> &mut [u8] {
        match &mut self.memory {
            None => &mut [],
            Some(HostMemory::Plain(bytes)) => bytes,
            // SAFETY: the buffer has not been uploaded, since that takes the memory, and its memory
            // came from copies that are complete.
            Some(HostMemory::Staging(staging)) => unsafe { &mut staging.bytes()[..self.bytes] },
        }
    }
}

impl Drop for HostBuffer {
    /// Keeps page-locked memory that was not uploaded for later buffers.
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

impl Device {
    /// Host memory for an upload of `bytes` bytes to this device. On a CUDA device it comes from
    /// memory of uploads that are complete, if there is some. Waits for earlier copies while more
    /// than 256 MiB of such memory are in flight; each wait counts as a synchronisation.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::HotScope`] if an open scope forbids the wait.
    #[track_caller]
    pub fn host_buffer(&self, bytes: usize) -> Result<HostBuffer> {
        let (counters, site) = (&self.shared().counters, Location::caller());
        let memory = match &self.0.backend {
            DeviceBackend::Cpu { .. } => HostMemory::Plain(vec![0; bytes].into()),
            DeviceBackend::Cuda { copies, .. } => {
                let wait = || counters.note(Act::Synchronize, "Device::host_buffer", site);
                HostMemory::Staging(copies.staging(bytes, wait)?)
            }
        };
        Ok(HostBuffer { memory: Some(memory), bytes })
    }
}

impl Stream {
    /// Overwrites a tensor with the bytes of a buffer of its size, in stream order: one command,
    /// counted as one copy to the device. Does not wait, unless the system had no page-locked
    /// memory for the buffer: then the host waits, which counts as a synchronisation.
    ///
    /// # Errors
    /// The errors of [`Launch::run`], the tensor being argument 0; [`Error::Mismatch`] for a buffer
    /// of another size.
    #[track_caller]
    pub fn upload_from(
        &self,
        operation: &'static str,
        tensor: &Tensor,
        mut buffer: HostBuffer,
    ) -> Result<()> {
        if buffer.bytes != tensor.bytes() {
            return Err(Error::Mismatch {
                operation,
                argument: "buffer".to_owned(),
                property: Property::Shape,
                expected: format!("{} bytes", tensor.bytes()),
                got: buffer.bytes.to_string(),
            });
        }
        let launch = Launch::new(self, operation, Some(Act::CopyToDevice), Location::caller());
        let launch = launch.write(tensor);
        match (buffer.memory.take(), self.state().cuda_queue()) {
            (Some(HostMemory::Staging(staging)), Some(queue)) => {
                launch.submit(Category::CopyToDevice, |record| {
                    let task = queue.upload(staging, record, &self.state().shared.counters)?;
                    Ok(StreamWork::Cuda(Box::new(task)))
                })
            }
            (memory, _) => {
                buffer.memory = memory;
                let bytes = buffer.bytes().into();
                launch.transfer(Transfer::Upload(HostBytes::Staged(bytes)))
            }
        }
    }
}

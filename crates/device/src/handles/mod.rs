//! The user's interface: devices, streams, tensors and launches.
//!
//! The four types refer to each other: a device opens streams, a stream starts launches, a launch
//! takes tensors, a tensor belongs to a stream. So they are declared together here. The methods of
//! each are in the file of its name, and no two of these files import each other.

mod device;
mod event;
mod expect;
mod group;
mod host_buffer;
mod launch;
mod launches;
mod lent;
mod operands;
mod options;
mod peers;
mod report;
mod scratch;
mod stream;
mod tensor;
mod transfer;

use std::panic::Location;

pub use event::Event;
pub use expect::{Expect, Extent};
pub use group::LaunchGroup;
pub use host_buffer::{HostBuffer, HostBuffers};
pub use launches::{Launches, PlannedLaunch};
pub use lent::{LentDeviceTensor, LentTensor, lend_on_device};
use operands::LaunchOperands;
pub use options::DeviceOptions;
#[cfg(test)]
pub(crate) use options::Environment;
pub use peers::Peers;
pub use report::{MemoryAround, MemoryReport};
pub use scratch::Scratch;
pub use transfer::{read_back, read_back_as, read_back_f64};

use crate::execution::cuda::CudaStream;
use crate::execution::{Executor, Program};
use crate::ground::sync::thread::JoinHandle;
use crate::ground::sync::{Arc, AtomicU64, Mutex, Weak};
use crate::ground::{Act, DType, MemoryFormat, Shape};
use crate::memory::{Pool, StorageHandle};
use crate::observers::{Process, Sanitizer};
use crate::order::{DeviceShared, StreamState};

/// A device: its workers or its GPU, memory and counts. A handle: clones are the same device, and
/// streams and tensors hold one. Dropping the last handle waits until all enqueued work is done,
/// and ends the workers. (A kernel that drops it does not wait for the workers of a CPU device;
/// they end after that work.)
#[derive(Clone)]
pub struct Device(Arc<DeviceHandle>);

struct DeviceHandle {
    shared: Arc<DeviceShared>,
    backend: DeviceBackend,
    /// Shared with the pieces of temporary memory, because a piece outlives the device handle if
    /// its kernel ends last.
    pool: Arc<Pool<Stream>>,
    /// The device's process in a trace, if it is traced.
    trace: Option<Arc<Process>>,
    /// The race sanitizer, if it is on.
    sanitizer: Option<Arc<Sanitizer>>,
    /// Live streams, to wait for all of them.
    streams: Mutex<Vec<Weak<StreamState>>>,
    next_stream: AtomicU64,
}

/// The workers of a CPU device, or the driver's streams of a CUDA device.
enum DeviceBackend {
    Cpu {
        executor: Arc<Executor<StreamState>>,
        workers: Vec<JoinHandle<()>>,
    },
    Cuda {
        /// The driver's streams, to which streams are assigned in turn.
        cuda_streams: Vec<Arc<CudaStream>>,
        /// The driver's stream for copies between host and device.
        copies: Arc<CudaStream>,
    },
}

/// An ordered queue of work on a device (S1). Work on one stream runs in order; work on different
/// streams may run concurrently, unless one uses the result of another. On a CPU device at most
/// [`Device::threads`] streams run at once, each on a worker. On a CUDA device the streams share
/// this number of streams of the driver, by default one. A handle: clones are the same stream.
/// After the last handle and the last tensor are dropped, enqueued work still runs.
#[derive(Clone)]
pub struct Stream(Arc<StreamHandle>);

struct StreamHandle {
    state: Arc<StreamState>,
    device: Device,
    /// Index of its free lists in the pool.
    slot: usize,
}

/// A tensor on a device. Belongs to one stream: only launches of that stream accept it, and
/// [`on`](Tensor::on) gives a handle for another stream (S1). A handle: clones share the memory.
/// When the last handle is dropped, the memory is reused in stream order (S2): dropping a tensor
/// whose kernels are still in flight is correct, and does not wait.
#[derive(Clone)]
pub struct Tensor {
    storage: StorageHandle<Stream>,
    /// First byte in the storage.
    offset: usize,
    shape: Shape,
    dtype: DType,
    format: MemoryFormat,
    /// The stream that the tensor belongs to, if another stream allocated the storage.
    moved_to: Option<Stream>,
}

/// A builder of a launch, made by [`Stream::launch`]. Nothing happens before [`run`](Launch::run).
#[must_use = "a launch does nothing until `run`"]
pub struct Launch<'a> {
    stream: &'a Stream,
    operation: &'static str,
    act: Option<Act>,
    site: &'static Location<'static>,
    tensors: LaunchOperands<'a>,
    scratch: Option<&'a Scratch>,
    /// Its calls on a CUDA device.
    program: Option<Program>,
}

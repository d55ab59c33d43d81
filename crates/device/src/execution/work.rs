//! Work of a stream: a kernel, or a transfer.
//!
//! A kernel on a CPU device is a closure over its arguments' elements; on a CUDA device it is a
//! program of calls. A transfer (a copy or a fill) is a value that each backend carries out.

use std::panic::Location;

use super::args::{Args, LaunchRecord};
use super::cuda::CudaTask;
use super::transfer::Transfer;
use crate::ground::sync::Arc;
use crate::hooks::LaunchCall;

/// Work of a stream. Running it releases all memory that it refers to.
pub(crate) enum StreamWork {
    /// A kernel on a CPU device.
    Kernel(Box<dyn HostKernel>),
    /// A copy or a fill on a CPU device.
    Transfer(Box<(LaunchRecord, Transfer)>),
    /// Any work of a CUDA device.
    Cuda(Box<CudaTask>),
}

impl StreamWork {
    pub(crate) fn kernel<F>(record: LaunchRecord, kernel: F) -> StreamWork
    where
        F: FnOnce(&mut Args<'_>) + Send + 'static,
    {
        StreamWork::Kernel(Box::new(HostLaunch { record, kernel }))
    }

    /// Name of the operation.
    pub(crate) fn operation(&self) -> &'static str {
        self.record().operation
    }

    /// Its call site.
    pub(crate) fn site(&self) -> &'static Location<'static> {
        self.record().site
    }

    /// The description of its call, for observers that watch runs; `None` without such observers.
    pub(crate) fn take_call(&mut self) -> Option<Arc<LaunchCall>> {
        match self {
            StreamWork::Kernel(kernel) => kernel.record_mut().call.take(),
            StreamWork::Cuda(task) => task.record_mut().call.take(),
            StreamWork::Transfer(transfer) => transfer.0.call.take(),
        }
    }

    /// Runs the work on the calling worker. May panic: kernels are user code.
    pub(crate) fn run(self) {
        match self {
            StreamWork::Kernel(kernel) => kernel.run(),
            StreamWork::Cuda(_) => unreachable!("a launch makes a task for a CUDA device only"),
            StreamWork::Transfer(transfer) => {
                let (mut record, transfer) = *transfer;
                transfer.run(&mut Args::new(&mut record));
            }
        }
    }

    fn record(&self) -> &LaunchRecord {
        match self {
            StreamWork::Kernel(kernel) => kernel.record(),
            StreamWork::Cuda(task) => task.record(),
            StreamWork::Transfer(transfer) => &transfer.0,
        }
    }
}

/// A kernel and its arguments.
pub(crate) trait HostKernel: Send {
    fn record(&self) -> &LaunchRecord;
    fn record_mut(&mut self) -> &mut LaunchRecord;
    fn run(self: Box<Self>);
}

/// A closure and its arguments: one allocation for both.
struct HostLaunch<F> {
    record: LaunchRecord,
    kernel: F,
}

impl<F> HostKernel for HostLaunch<F>
where
    F: FnOnce(&mut Args<'_>) + Send,
{
    fn record(&self) -> &LaunchRecord {
        &self.record
    }

    fn record_mut(&mut self) -> &mut LaunchRecord {
        &mut self.record
    }

    fn run(self: Box<Self>) {
        let HostLaunch { mut record, kernel } = *self;
        kernel(&mut Args::new(&mut record));
    }
}

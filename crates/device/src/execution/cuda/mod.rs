//! Execution on a CUDA device, through the driver's own functions.
//!
//! # From a launch to the driver
//! ```text
//! Launch::run      the launch has two bodies: a closure for the CPU, a `Program` for CUDA
//!   CudaQueue::calls     compare the program's calls with the kernels' declarations, and bind them
//!                        to functions (once per program and device)
//!   submission           under the submission lock: waits from the hazards, as on a CPU device
//!     CudaQueue::issue   after events of other CUDA streams
//!       CudaStream::issue    hand the task to the driver; number it
//! ```
//!
//! A program is a list of calls: plain values that name a kernel, its blocks and threads, a struct
//! of values, and the pieces of the launch's tensors that are its operands. Nothing is compiled or
//! checked under the submission lock, and a launch without a program is a typed error.
//!
//! - **Streams.** The streams of a device are assigned in turn to a few streams of the driver
//!   (`stream`, `queue`). Commands of one driver stream need no waits between them.
//! - **Graphs.** Independent launches ([`Launches`](crate::Launches)), such as one training step of
//!   a fleet, become one launch of a graph (`graph`, `fusion`). A driver call costs some
//!   microseconds of the host, so a fleet of small networks would otherwise be limited by calls.
//! - **Memory** comes from the driver's plain allocator, through the same pool as on a CPU device.
//!   A block is reused in stream order, also while kernels still use it, and returns to the driver
//!   when all accesses to it are done. Copies between host and device go through page-locked
//!   staging buffers. An upload is staged before it is submitted, because it may call user code.
//! - **Failure is final.** After a failure every stream of the device fails, and so does every
//!   stream of another device that waited for its results.
//! - **Exchanges** with other processes are launches, too (`nccl`).
//!
//! # Modules
//! - `bindings`: functions of a library, looked up by name.
//! - `driver`: the driver's functions with typed errors, events, and page-locked host memory.
//! - `context`: an opened device, its kernels, staging memory and failure.
//! - `block`: its memory.
//! - `compiler`, `cache`, `module`: from the text of kernels to functions of the device.
//! - `nccl`: memberships in groups of devices that exchange data.
//! - `mpi`: a query of the MPI library.
//! - `program`: the calls of a launch, checked and bound to their kernels.
//! - `graph`, `fusion`: the programs of several launches, started by one call.
//! - `task`: a launch, a copy or a fill, ready to be issued.
//! - `staging`: host memory for copies between host and device.
//! - `enqueue`: tasks as calls of the driver.
//! - `stream`: a stream of the driver, which carries out several streams of the device.
//! - `queue`: one stream of the device, mapped onto a stream of the driver.
//!
//! There are no threads here. The thread that submits a launch hands it to the driver, and a thread
//! that needs to know the device's progress polls events.
//!
//! Unsafe code: every function of the driver is foreign. `driver` documents the conditions of each
//! call; the other modules use its safe functions wherever the arguments can be checked.

mod bindings;
mod block;
mod cache;
mod compiler;
mod context;
mod driver;
mod enqueue;
mod fusion;
mod graph;
mod module;
mod mpi;
mod nccl;
mod program;
mod queue;
mod staging;
mod stream;
mod task;

pub(crate) use context::CudaContext;
pub use mpi::mpi_takes_cuda_memory;
pub(crate) use nccl::PeerMembership;
pub(crate) use queue::CudaQueue;
pub(crate) use staging::{StagingBuffer, StagingRing};
pub(crate) use stream::{CudaStream, OnComplete};
pub(crate) use task::CudaTask;

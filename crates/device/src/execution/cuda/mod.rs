//! Execution on a CUDA device, through the driver's own functions: memory, real streams, kernels.
//!
//! - `bindings`: functions of a library, looked up by name.
//! - `driver`: the driver's functions with typed errors, events, and memory that the host shares.
//! - `context`: an opened device with its kernels, staging memory and failure.
//! - `block`: its memory.
//! - `compiler`, `cache`, `module`: from the text of kernels to functions of the device.
//! - `nccl`: memberships in groups of devices that exchange data.
//! - `program`: the calls of a launch, checked and bound to their kernels.
//! - `graph`, `fusion`: the programs of several launches, started by one call.
//! - `task`: a launch as it is handed to a lane.
//! - `staging`: host memory that copies go through.
//! - `enqueue`: how a work becomes calls of the driver.
//! - `lane`: a real stream, onto which the streams of the device are dealt.
//! - `track`: one of those streams, by the numbers of its commands.
//!
//! Nothing here runs on a thread of its own: a launch is handed to the driver by the thread that
//! submits it, and whoever wants to know looks how far the device is.
//!
//! Unsafe code: every function of the driver is foreign. `driver` says what each call needs; the
//! others call it through safe functions wherever the arguments can be checked.

mod bindings;
mod block;
mod cache;
mod compiler;
mod context;
mod driver;
mod enqueue;
mod fusion;
mod graph;
mod lane;
mod module;
mod nccl;
mod program;
mod staging;
mod task;
mod track;

pub(crate) use context::CudaContext;
pub(crate) use lane::{CudaStream, OnComplete};
pub(crate) use nccl::Membership;
pub(crate) use task::CudaTask;
pub(crate) use track::CudaQueue;

//! Devices, streams, stream-ordered memory and tensors.
//!
//! A [`Device`] runs kernels on ordered asynchronous queues, its [`Stream`]s. A [`Tensor`] is
//! memory that belongs to a stream; a kernel accesses it only through a [`Launch`] on that stream.
//! The waits between launches follow from what they read and write, so a race or a use after free
//! cannot be written with the safe code of this API (S1, S2). [`Tensor::lend`] and
//! [`Tensor::lend_on_device`] give out addresses; ordering accesses by them is the caller's task.
//! With `MERISTEM_SANITIZE=1` or [`DeviceOptions::sanitize`] a race sanitizer checks launches (S3).
//! Ids such as (S1) are rows of `docs/requirements.md`.
//!
//! ```
//! use meristem_device::{DType, Device, DeviceId, DeviceOptions, Owner, Tensor};
//!
//! # fn main() -> meristem_device::Result<()> {
//! let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?;
//! let (load, compute) = (device.stream("load"), device.stream("compute"));
//! let x = Tensor::from_slice(&load, &[1.0f32, 2.0, 3.0], [3], Owner::Batches)?;
//! let y = Tensor::empty(&compute, [3], DType::F32, Owner::Activations)?;
//! let x = x.on(&compute)?; // `compute` waits for `load`, the host does not
//! compute.launch("double").read(&x).write(&y).run(|args| {
//!     for (y, x) in args.write::<f32>(1).iter_mut().zip(args.read::<f32>(0)) {
//!         *y = 2.0 * x;
//!     }
//! })?;
//! assert_eq!(y.to_vec::<f32>()?, [2.0, 4.0, 6.0]); // the one wait
//! # Ok(())
//! # }
//! ```
//!
//! # Modules
//! Modules, from the lowest up. Each uses only modules before it, which `cargo xtask tidy` checks:
//! - `ground`: errors, names of devices, element types, shapes, instruction sets, random numbers.
//! - `hooks`: the interface between the engine and its observers; counts of acts.
//! - `execution`: memory blocks, kernels with their arguments, and the backends that run them: the
//!   workers of a CPU device, or a CUDA device.
//! - `order`: queues of streams, pending accesses to memory, submission.
//! - `memory`: stream-ordered memory, its pool, and its use by owner.
//! - `observers`: the trace, the race sanitizer and hot scopes. They use `ground` and `hooks` only,
//!   and only `handles` names them.
//! - `handles`: the user's interface.
//!
//! Unsafe code is in `execution` (`host_block` allocates memory, `args` gives kernels slices of it,
//! `parts` lends a kernel's closure to other workers, `transfer` copies from memory of other
//! libraries, `cuda` calls the driver) and, for a few calls each, in `memory::handle`,
//! `handles::{host_buffer, stream, transfer}`, `MappedFile`, `isa` and `simd`. All locks, and all
//! atomics that order memory, come from `ground::sync`, where `model` replaces the locks, and the
//! atomics of the CPU engine, by a model checker's.

mod execution;
mod ground;
mod handles;
mod hooks;
mod memory;
#[cfg(all(test, any(feature = "loom", feature = "shuttle")))]
mod model;
mod observers;
mod order;
#[cfg(test)]
mod tests;

pub use execution::{Args, Fill, in_parts, mpi_takes_cuda_memory};
pub use execution::{Call, Kernel, KernelHeader, KernelSource, Operand, Piece, Program};
pub use ground::{Act, Counts, CudaError, Owner, OwnerUse, Property};
pub use ground::{DType, DeviceId, Element, MAX_DIMS, MappedFile, MemoryFormat, Shape};
pub use ground::{Error, Race, RaceAccess, RaceKind, Result};
pub use ground::{Isa, IsaError, isa, named_file, random, simd};
pub use ground::{PeerPlace, PeerProgress, user_cache};
pub use handles::{
    Device, DeviceOptions, Event, Expect, Extent, HostBuffer, HostBuffers, Launch, LaunchGroup,
    Launches, LentDeviceTensor, LentTensor, PlannedLaunch, Stream, Tensor,
};
pub use handles::{
    MemoryAround, MemoryReport, Peers, Scratch, lend_on_device, read_back, read_back_as,
    read_back_f64,
};
pub use hooks::POISON;
pub use observers::{ActSite, HotScope, ScopePolicy, ScopeReport, Trace, TraceReport, TraceSpan};

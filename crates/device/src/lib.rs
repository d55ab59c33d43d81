//! Devices, streams, stream-ordered memory and tensors.
//!
//! A [`Device`] runs kernels on ordered asynchronous queues, its [`Stream`]s. A [`Tensor`] is
//! memory that belongs to a stream; a kernel accesses it only through a [`Launch`] on that stream.
//! The waits between launches follow from what they read and write, so a race or a use after free
//! cannot be written with this API (S1, S2): there is no host pointer to device memory. With
//! `MERISTEM_SANITIZE=1` a race sanitizer checks this (S3).
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
//! # Modules, from top to bottom
//! - `tensor`, `transfer`, `launch`, `stream`, `device`: the user's interface.
//! - `expect`, `scope`: checks before submission.
//! - `submit`: submission onto a stream; `hazard`: the waits that it needs.
//! - `work`: work of a stream, kernels and transfers; `queue`, `executor`: streams and their
//!   workers.
//! - `storage`, `pool`, `size_class`, `block`: memory; `memory`, `watermark`: its use by owner.
//! - `trace`, `placement`: records of events and of tensors' locations.
//! - `sanitize`: checks that all conflicting accesses are ordered.
//!
//! Unsafe code is in `block` (allocating memory) and `args` (giving kernels slices of it);
//! `storage`, `host` and `simd` have a call or two each. All locks and atomics come from `sync`,
//! where `model` replaces them by those of a model checker.

mod args;
mod block;
#[cfg(test)]
mod blocking;
mod device;
mod executor;
mod expect;
mod ground;
mod group;
mod hazard;
mod hooks;
mod launch;
mod memory;
#[cfg(all(test, any(feature = "loom", feature = "shuttle")))]
mod model;
#[cfg(test)]
mod naive;
mod observers;
mod pool;
mod queue;
mod size_class;
mod storage;
mod stream;
mod submit;
mod tensor;
mod transfer;
mod watermark;
mod work;

pub use args::Args;
pub use device::{Device, DeviceOptions};
pub use expect::{Expect, Extent};
pub use ground::{Act, Counts, Owner, OwnerUse, Property};
pub use ground::{DType, DeviceId, Element, MAX_DIMS, MappedFile, MemoryFormat, Shape};
pub use ground::{Error, Race, RaceAccess, RaceKind, Result};
pub use ground::{Isa, IsaError, isa, random, simd};
pub use group::Group;
pub use hooks::POISON;
pub use launch::Launch;
pub use memory::MemoryReport;
pub use observers::{ActSite, HotScope, Policy, ScopeReport, Span, Trace, TraceReport};
pub use stream::{Event, Stream};
pub use tensor::Tensor;
pub use transfer::{read_back, read_back_as, read_back_f64};
pub use watermark::MemoryAround;
pub use work::Fill;

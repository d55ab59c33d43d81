//! Devices, streams, stream-ordered memory and tensors.
//!
//! A [`Device`] runs kernels on ordered asynchronous queues, its [`Stream`]s. A [`Tensor`] is memory
//! that belongs to a stream; a kernel gets at it only by a [`Launch`] on that stream. Which launches
//! must wait for which is worked out from what they read and write, so a race or a use after free
//! cannot be written with this API (S1, S2): there is no host pointer to device memory. That this
//! holds is checked by a race sanitizer with `MERISTEM_SANITIZE=1` (S3).
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
//! # The inside, from top to bottom
//! `tensor`, `transfer`, `launch`, `stream`, `device`: what the user holds. `submit`: the one door
//! onto a stream; `hazard`: who must wait for whom. `expect`, `scope`: what is refused before
//! that. `work`: what a stream runs, kernels and transfers; `queue`, `executor`: streams run by
//! workers. `storage`, `pool`, `size_class`, `block`:
//! memory; `memory`, `watermark`: who uses how much. `trace`, `placement`: what happened when, and
//! where. `sanitize`: checks that the rest orders what it must. Unsafe code is in `block` (taking
//! memory) and `args` (giving kernels slices of it); `storage`, `host` and `simd` have a call or two
//! each. All locks and atomics come from `sync`, where `model` puts a model checker's into their
//! place.

mod args;
mod block;
#[cfg(test)]
mod blocking;
mod counters;
mod device;
mod dtype;
mod error;
mod executor;
mod expect;
mod faults;
mod group;
mod hazard;
pub mod host;
mod id;
pub mod isa;
mod launch;
mod memory;
#[cfg(all(test, any(feature = "loom", feature = "shuttle")))]
mod model;
#[cfg(test)]
mod naive;
mod placement;
mod pool;
mod queue;
pub mod random;
mod sanitize;
mod scope;
mod shape;
pub mod simd;
mod size_class;
mod storage;
mod stream;
mod submit;
mod sync;
mod tensor;
mod trace;
mod transfer;
mod watermark;
mod work;

pub use args::Args;
pub use counters::{Act, Counts};
pub use device::{Device, DeviceOptions};
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use expect::{Expect, Extent, Property};
pub use group::Group;
pub use id::DeviceId;
pub use isa::{Isa, IsaError};
pub use launch::Launch;
pub use memory::{MemoryReport, Owner, OwnerUse};
pub use sanitize::{POISON, Race, RaceAccess, RaceKind};
pub use scope::{ActSite, HotScope, Policy, ScopeReport};
pub use shape::{MAX_DIMS, MemoryFormat, Shape};
pub use stream::{Event, Stream};
pub use tensor::Tensor;
pub use trace::{Span, Trace, TraceReport};
pub use transfer::{read_back, read_back_as, read_back_f64};
pub use watermark::MemoryAround;
pub use work::Fill;

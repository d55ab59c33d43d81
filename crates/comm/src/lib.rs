//! Gradient exchange between ranks.
//!
//! A [`Communicator`] is one rank's membership in a group. Collectives take tensors of a
//! [`meristem_device`] stream and enqueue their work onto that stream. Over threads that share an
//! opened device no collective waits for it. By default sums are in rank order: the same bits on
//! every rank, run and transport. Transports are [`threads`](Communicator::threads),
//! [`mpi`](Communicator::mpi) in builds with that feature, TCP
//! ([`rendezvous`](Communicator::rendezvous)) and [`nccl`](Communicator::nccl). Ids in
//! parentheses, such as (X1), are rows of `docs/requirements.md`.
//!
//! ```
//! use meristem_comm::{CommOptions, Communicator, Reduction};
//! use meristem_device::{Device, DeviceId, DeviceOptions, Owner, Tensor};
//!
//! let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap();
//! std::thread::scope(|scope| {
//!     for mut comm in Communicator::threads(2, &CommOptions::default()).unwrap() {
//!         let stream = device.stream("rank");
//!         scope.spawn(move || {
//!             let values = [1.0f32 + comm.rank() as f32; 4];
//!             let x = Tensor::from_slice(&stream, &values, [4], Owner::Other).unwrap();
//!             comm.all_reduce(&x, Reduction::Mean).unwrap();
//!             assert_eq!(x.to_vec::<f32>().unwrap(), [1.5; 4]);
//!         });
//!     }
//! });
//! ```
//!
//! # Modules, from top to bottom
//! - `outer`: the outer step, which averages the weights of a model that every rank trains locally.
//! - `exchange`: the gradients of a model.
//! - `state`: the state of an exchange in a checkpoint.
//! - `auto`: choice of the fastest sum.
//! - `sparse`: sums of the largest elements.
//! - `int8`: the dense sum with elements of eight bits.
//! - `memory`: device memory of a sum, phase by phase.
//! - `communicator`: the interface of a rank.
//! - `dense`: the dense sum over any transport.
//! - `scratch`: temporary memory of collectives.
//! - `threads`: ranks of one process.
//! - `mpi`: ranks that are processes.
//! - `nccl`: ranks with GPUs; elements move over NCCL, control messages over another transport.
//! - `tcp`: ranks that are processes, which find each other by environment variables.
//! - `packing`: parcels in one piece of device memory each.
//! - `wire`: headers and notices between ranks.
//! - `host`: copies between a device and host memory.
//! - `agree`: comparison of the ranks' calls.
//! - `log`: log targets, and the log of the tensors of collectives.
//! - `transport`: the interface of transports.
//! - `watch`: monitoring of a group by another thread.
//! - `gpu`: CUDA kernels of this crate.
//! - `spans`: elements in several pieces of memory.
//! - `check`: checks of arguments.
//! - `number`: element types that can be summed.
//! - `sync`: locks and atomics, which a model checker replaces in tests.
//! - `error`: errors, which name the rank that caused them.
//!
//! Unsafe code is only in `mpi::device_memory`, which gives addresses of device memory to MPI.

#![deny(unsafe_code)]

mod agree;
mod auto;
mod check;
mod communicator;
mod dense;
mod error;
mod exchange;
mod gpu;
mod host;
mod int8;
mod log;
mod memory;
#[cfg_attr(not(feature = "mpi"), path = "mpi/off.rs")]
mod mpi;
mod nccl;
mod number;
mod outer;
mod packing;
mod scratch;
mod spans;
mod sparse;
mod state;
mod sync;
mod tcp;
mod threads;
mod transport;
mod watch;
mod wire;

/// Parsers of bytes from other processes, for `fuzz/`.
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzz {
    /// Decodes a message to the hub, and a message from the hub.
    pub fn frames(bytes: &[u8]) {
        crate::tcp::decode_both(bytes);
    }
}

pub use auto::{Method, Timing, TimingTable};
pub use communicator::{CommOptions, Communicator, Traffic};
pub use error::{Error, Result};
pub use exchange::{Exchange, ExchangeOptions};
pub use memory::PhaseMemory;
pub use number::{Magnitude, SumElement};
pub use outer::{OuterOptions, OuterStep};
pub use spans::Spans;
pub use sparse::gather::{
    TopKElements, TopKStorage, topk, topk_all_gather, topk_all_gather_measured,
};
pub use sparse::picks;
pub use sparse::sum::{FeedbackMode, SparseMethod, SparseSum};
pub use state::{ExchangeState, ParameterState};
pub use transport::{CollectiveCall, Parcel, Reduction, Sum, SumOrder, Transport};
pub use watch::{ExchangeProblem, GroupStatus, GroupWatch, Heartbeat};

//! Execution: memory blocks, kernels with their arguments, and the backends that run them. The
//! modules `order` and `memory` above are bookkeeping that does not depend on the backend.
//!
//! - CPU: `host_block`, `args` (kernels are closures over slices), `executor` (workers), `parts`
//!   (idle workers take over parts of a kernel), `scratch` (temporary memory of running kernels).
//! - CUDA: `call` (calls of kernels are values), and `cuda`, which calls the driver. `absent`
//!   replaces `cuda` in a build without the feature.
//! - Both: `transfer` (copies and fills are values), `fill` (what memory is filled with), `block`
//!   (memory of either backend) and `work` (work of either backend).

#[cfg(not(feature = "cuda"))]
#[path = "absent.rs"]
pub(crate) mod cuda;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

mod args;
mod block;
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a CUDA device looks at calls"))]
mod call;
mod executor;
mod fill;
mod host_block;
mod parts;
mod scratch;
mod transfer;
mod work;

pub use args::Args;
pub(crate) use args::{Arg, LaunchRecord};
pub(crate) use block::{BlockSource, MemoryBlock};
pub use call::{Call, Kernel, KernelHeader, KernelSource, Operand, Piece, Program};
pub use cuda::mpi_takes_cuda_memory;
pub(crate) use cuda::{PeerMembership, StagingBuffer, StagingRing};
pub(crate) use executor::{Executor, Task, TaskEnd, check_may_wait, on_worker};
pub use fill::Fill;
pub(crate) use host_block::ALIGNMENT;
pub(crate) use parts::discard;
pub use parts::in_parts;
pub(crate) use scratch::{BorrowedScratch, Reservation, ScratchPiece, ScratchPieces};
pub(crate) use transfer::{ForeignAddresses, HostBytes, IntoReadBack, Make, ReadBack, Transfer};
pub(crate) use work::StreamWork;

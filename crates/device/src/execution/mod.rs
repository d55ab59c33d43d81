//! Execution: memory blocks, kernels with their arguments, and what runs them. Order and memory
//! above it are bookkeeping that does not depend on the backend.
//!
//! - The processor: `host_block`, `args` (kernels are closures over slices), `executor` (workers),
//!   `parts` (which workers take over from each other), `scratch` (memory that a kernel has while
//!   it runs).
//! - CUDA: `call` (kernels are declared values), and `cuda` with everything that talks to the
//!   driver. In a build without the feature `absent` takes its place.
//! - Both: `transfer` (copies and fills are values), `block` and `work`, which say of which kind a
//!   piece of memory or of work is.

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
mod host_block;
mod parts;
mod scratch;
mod transfer;
mod work;

pub use args::Args;
pub(crate) use args::{Arg, LaunchRecord};
pub(crate) use block::{MemoryBlock, BlockSource};
pub use call::{Call, Header, Kernel, Operand, Piece, Program, Source};
pub(crate) use cuda::Membership;
pub(crate) use executor::{Executor, TaskEnd, Task, check_may_wait, on_worker};
pub(crate) use host_block::ALIGNMENT;
pub(crate) use parts::discard;
pub use parts::in_parts;
pub(crate) use scratch::{BorrowedScratch, Reservation, ScratchPiece, ScratchPieces};
pub use transfer::Fill;
pub(crate) use transfer::{HostBytes, IntoSlots, Make, Slots, Transfer};
pub(crate) use work::Work;

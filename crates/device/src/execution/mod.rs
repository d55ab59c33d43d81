//! Execution on the processor: memory blocks, kernels with their arguments, and the workers that
//! run them. Whatever another backend brings of its own takes the place of this; order and memory
//! above it are bookkeeping that does not depend on it.

mod args;
mod block;
mod executor;
mod work;

pub use args::Args;
pub(crate) use args::{Arg, Record};
pub(crate) use block::{ALIGNMENT, Block};
pub(crate) use executor::{Executor, Left, Task, check_may_wait, on_worker};
pub use work::Fill;
pub(crate) use work::{HostBytes, IntoSlots, Slots, Transfer, Work};

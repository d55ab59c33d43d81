//! The ground floor: errors, names and plain values that all other modules use. Nothing here uses a
//! device.

mod access;
mod act;
mod cuda_error;
mod dtype;
mod error;
pub(crate) mod fault;
mod id;
pub mod isa;
mod mapped_file;
pub mod named_file;
mod owner;
mod peers;
mod property;
mod race;
pub mod random;
mod shape;
pub mod simd;
pub(crate) mod sync;
mod user_cache;

pub(crate) use access::{AccessKind, INLINE_ARGS};
pub use act::{Act, Counts};
pub use cuda_error::CudaError;
#[cfg(feature = "cuda")]
pub(crate) use cuda_error::{DRIVER_NEEDED, NCCL_NEEDED};
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use id::DeviceId;
pub use isa::{Isa, IsaError};
pub use mapped_file::MappedFile;
pub use owner::{Owner, OwnerUse};
pub(crate) use peers::ID_BYTES;
pub use peers::{PeerPlace, PeerProgress};
pub use property::Property;
pub use race::{Race, RaceAccess, RaceKind};
pub use shape::{MAX_DIMS, MemoryFormat, Shape};
pub use user_cache::user_cache;

//! Functions of the CUDA driver, one file for each family, and functions of NCCL.
//!
//! Each function behaves as NVIDIA documents, including error codes. Where the real driver may
//! crash, as on a destroyed handle, the function returns an error.

mod call;
pub mod context;
pub mod copy;
pub mod device;
pub mod error;
pub mod event;
pub mod graph;
pub mod memory;
pub mod module;
#[allow(non_snake_case, reason = "NCCL's names")]
pub mod nccl;
pub mod stream;
pub mod unified;

//! Functions of the CUDA driver, one file for each family, and functions of NCCL.
//!
//! Each does what NVIDIA documents for it, error codes included. Where the real driver may crash,
//! as on a handle that was destroyed, these return an error.

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

//! The stream queue, the events, the executor and the pool under model checkers.
//!
//! Built into this crate's unit tests by one of two features, which replace the primitives of the
//! standard library by the checker's ([`crate::ground::sync`]). All other code is the real code.
//! - `loom`: every interleaving with at most a given number of preemptions, and every value that
//!   the C++ memory model lets a load see. Small programs. [`primitives::RaceCell`] reports every
//!   access of a kernel to a block, so that a missing order is found (`loom_models`).
//! - `shuttle`: random schedules, thousands of each program, sequentially consistent. Programs with
//!   more streams, workers and host threads (`shuttle_models`).
//!
//! A lost wake-up shows as a deadlock, a missing order as a race or a wrong value. With both
//! features loom is used. Only the tests of this module run in such a build:
//! `cargo test -p meristem-device --features loom --lib model`, and the same with `shuttle`. With
//! the variable `MODELS_QUICK` loom takes one preemption less, if two remain, and shuttle a fourth
//! of the schedules: the tests then take about a fourth of the time.

#![allow(clippy::unwrap_used, reason = "models fail by panicking, their helpers too")]

#[cfg(feature = "loom")]
mod loom_models;
#[cfg(feature = "loom")]
#[path = "loom_primitives.rs"]
pub(crate) mod primitives;
#[cfg(not(feature = "loom"))]
#[path = "shuttle_primitives.rs"]
pub(crate) mod primitives;
#[cfg(not(feature = "loom"))]
mod shuttle_models;

use crate::{DType, Device, DeviceId, DeviceOptions, Owner, Stream, Tensor};

/// Whether `MODELS_QUICK` asks for fewer schedules.
fn is_quick() -> bool {
    std::env::var_os("MODELS_QUICK").is_some()
}

fn device(threads: usize, memory_limit: Option<usize>) -> Device {
    Device::open(
        DeviceId::Cpu(0),
        &DeviceOptions { threads, memory_limit, ..DeviceOptions::default() },
    )
    .unwrap()
}

/// A tensor of four u32, whose block is of the smallest class (64 bytes).
fn tensor(stream: &Stream) -> Tensor {
    Tensor::empty(stream, [4], DType::U32, Owner::Other).unwrap()
}

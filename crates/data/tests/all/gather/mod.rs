//! Gathered batches: their values, memory, envs, and errors.

mod any_case;
mod envs;
mod errors;
mod memory;
mod values;

use meristem_device::DeviceId;

#[cfg(feature = "cuda")]
pub(crate) use self::any_case::{Case, any_case};

fn cpus(envs: usize) -> Vec<DeviceId> {
    vec![DeviceId::Cpu(0); envs]
}

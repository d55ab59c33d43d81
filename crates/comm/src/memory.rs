//! Device memory of a sum, phase by phase (V3).

use meristem_device::Device;

use crate::communicator::Communicator;
use crate::error::Result;

/// Bytes of a device's tensors at the ends of the phases of one sum, over all ranks that share the
/// device; they wait for each other between phases during this measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PhaseMemory {
    /// Before the sum.
    pub before: usize,
    /// After the allocation of the sum's memory, if it was not allocated before.
    pub allocation: usize,
    /// After each rank's elements were selected.
    pub selection: usize,
    /// After the exchange, with the result written.
    pub collective: usize,
    /// Peak, including the memory in use before.
    pub peak: usize,
}

/// Bytes of tensors, while no rank is ahead of this one.
pub(crate) fn in_use(comm: &mut Communicator, device: &Device) -> Result<usize> {
    comm.barrier()?;
    let bytes = device.memory().current;
    comm.barrier()?;
    Ok(bytes)
}

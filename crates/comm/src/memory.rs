//! Device memory of a sum, phase by phase (V3).

use meristem_device::Device;

use crate::communicator::Communicator;
use crate::error::Result;

/// Bytes of a device's tensors at the end of each phase of one sum, over all ranks that share the
/// device. During this measurement ranks wait for each other between phases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PhaseMemory {
    /// Before the sum.
    pub before: usize,
    /// After the allocation of the sum's memory.
    pub allocation: usize,
    /// After every rank's selection.
    pub selection: usize,
    /// After the exchange and the write of the result.
    pub collective: usize,
    /// Peak, including `before`.
    pub peak: usize,
}

/// Bytes of the device's tensors, read between two barriers, so that no rank allocates or frees
/// meanwhile.
pub(crate) fn in_use(comm: &mut Communicator, device: &Device) -> Result<usize> {
    comm.barrier()?;
    let bytes = device.memory().current;
    comm.barrier()?;
    Ok(bytes)
}

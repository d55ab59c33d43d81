//! Device memory of a sum, phase by phase (V3).

use crate::communicator::Communicator;
use crate::error::Result;
use meristem_device::Device;

/// Bytes in tensors of a device at the ends of the phases of one sum: of all ranks that share the
/// device, which meet between phases while this is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PhaseMemory {
    /// Before the sum.
    pub before: usize,
    /// After its memory was made, if it was not there.
    pub allocation: usize,
    /// After each rank's elements were selected.
    pub selection: usize,
    /// After the exchange, with the result written.
    pub collective: usize,
    /// The most at any moment, what was there before included.
    pub peak: usize,
}

/// Bytes in tensors, while no rank is further than this one.
pub(crate) fn in_use(comm: &mut Communicator, device: &Device) -> Result<usize> {
    comm.barrier()?;
    let bytes = device.memory().current;
    comm.barrier()?;
    Ok(bytes)
}

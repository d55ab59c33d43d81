//! Commands of streams and nodes of graphs, as values.

use cudarc::driver::sys::CUresult;

use super::links::{ExchangeWork, LinkMessage};
use crate::ground::DeviceFault;
use crate::kernel::{KernelGrid, KernelRunner};
use crate::memory::{AddressSpace, MemoryKind};

/// A command or node: an operation of a device.
#[derive(Clone, Debug)]
pub(crate) enum DeviceWork {
    /// No operation: a wait for other streams, or a node that only joins.
    Nothing,
    Copy(CopyWork),
    Fill(FillWork),
    Grid(KernelGrid),
    /// Messages between processes.
    Exchange(ExchangeWork),
}

/// A copy of bytes.
#[derive(Clone, Debug)]
pub(crate) struct CopyWork {
    pub(crate) from: CopySource,
    pub(crate) to: CopyTarget,
    pub(crate) bytes: usize,
}

/// Source of a copy.
#[derive(Clone, Debug)]
pub(crate) enum CopySource {
    Device(u64),
    /// Page-locked memory, read when the copy runs.
    Pinned(u64),
    /// Bytes of pageable memory, read when the copy was enqueued.
    Staged(Vec<u8>),
}

/// Destination of a copy.
#[derive(Clone, Debug)]
pub(crate) enum CopyTarget {
    Device(u64),
    /// Host memory: page-locked, or pageable, for which the host waits.
    Host(u64),
}

/// A fill with a repeated value.
#[derive(Clone, Debug)]
pub(crate) struct FillWork {
    pub(crate) to: u64,
    /// The value, of one, two or four bytes.
    pub(crate) value: Vec<u8>,
    pub(crate) count: usize,
}

impl DeviceWork {
    /// Checks that all memory is live. Called when the work is enqueued and again when it runs.
    pub(crate) fn check(&self, memory: &AddressSpace) -> Result<(), DeviceFault> {
        let on_device = |address: u64, bytes: usize, role: &str| match memory.owner(address, bytes)
        {
            Some(MemoryKind::Device(_)) => Ok(()),
            _ if bytes == 0 => Ok(()),
            _ => Err(DeviceFault::illegal_address(format!(
                "{role} of {bytes} bytes at {address:#x}, {}",
                memory.describe(address)
            ))),
        };
        match self {
            Self::Nothing => Ok(()),
            Self::Copy(copy) => {
                match &copy.from {
                    CopySource::Device(address) => on_device(*address, copy.bytes, "a copy from")?,
                    CopySource::Pinned(address) if memory.owner(*address, copy.bytes).is_none() => {
                        return Err(DeviceFault::illegal_address(format!(
                            "a copy from page-locked memory at {address:#x}, {}",
                            memory.describe(*address)
                        )));
                    }
                    CopySource::Pinned(_) | CopySource::Staged(_) => {}
                }
                match copy.to {
                    CopyTarget::Device(address) => on_device(address, copy.bytes, "a copy to"),
                    CopyTarget::Host(address) if memory.is_freed(address) => {
                        Err(DeviceFault::illegal_address(format!(
                            "a copy to memory of the host at {address:#x}, {}",
                            memory.describe(address)
                        )))
                    }
                    CopyTarget::Host(_) => Ok(()),
                }
            }
            Self::Fill(fill) => on_device(fill.to, fill.value.len() * fill.count, "a fill"),
            Self::Grid(grid) => grid.check(memory),
            Self::Exchange(exchange) => {
                exchange.messages().try_for_each(|LinkMessage { address, bytes, .. }| {
                    on_device(*address, *bytes, "an exchange")
                })
            }
        }
    }

    /// Executes the work.
    pub(crate) fn run(
        &self,
        engine: &mut KernelRunner,
        memory: &AddressSpace,
    ) -> Result<(), DeviceFault> {
        self.check(memory)?;
        match self {
            Self::Nothing => {}
            Self::Copy(copy) => copy.run(),
            Self::Fill(fill) => fill.run(),
            Self::Grid(grid) => engine.run(grid, memory)?,
            Self::Exchange(exchange) => exchange.run().map_err(|why| {
                DeviceFault::new(CUresult::CUDA_ERROR_UNKNOWN, format!("an exchange: {why}"))
            })?,
        }
        match memory.damage() {
            None => Ok(()),
            Some(damage) => Err(DeviceFault::new(
                CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
                format!("{}: {damage}", self.name()),
            )),
        }
    }

    /// Description of the work for messages.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Nothing => "nothing".into(),
            Self::Copy(copy) => format!("a copy of {} bytes", copy.bytes),
            Self::Fill(fill) => format!("a fill of {} bytes", fill.value.len() * fill.count),
            Self::Grid(grid) => format!("kernel {}", grid.name()),
            Self::Exchange(_) => "an exchange".into(),
        }
    }
}

impl CopyWork {
    fn run(&self) {
        let from = match &self.from {
            CopySource::Device(address) | CopySource::Pinned(address) => *address as *const u8,
            CopySource::Staged(bytes) => bytes.as_ptr(),
        };
        let (CopyTarget::Device(to) | CopyTarget::Host(to)) = self.to;
        // SAFETY: `check` found all memory of devices and page-locked memory. The caller waits for
        // the copy, and guarantees that pageable memory of the host is live.
        unsafe { std::ptr::copy(from, to as *mut u8, self.bytes) };
    }
}

impl FillWork {
    fn run(&self) {
        for at in 0..self.count {
            let to = self.to as usize + at * self.value.len();
            // SAFETY: `check` found the memory.
            unsafe {
                self.value.as_ptr().copy_to_nonoverlapping(to as *mut u8, self.value.len());
            }
        }
    }
}

//! Commands of streams and nodes of graphs, as values.

use cudarc::driver::sys::CUresult;

use super::links::{Exchange, Message};
use crate::ground::Fault;
use crate::kernel::{Engine, Grid};
use crate::memory::{Kind, Memory};

/// One thing for a device to do.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    /// Nothing: a wait for others, or a node that only joins.
    Nothing,
    Copy(Copy),
    Fill(Fill),
    Grid(Grid),
    /// Messages between processes.
    Exchange(Exchange),
}

/// Bytes of one place that go to another.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub(crate) from: From,
    pub(crate) to: To,
    pub(crate) bytes: usize,
}

/// Source of a copy.
#[derive(Clone, Debug)]
pub(crate) enum From {
    Device(u64),
    /// Page-locked memory, read when the copy runs.
    Pinned(u64),
    /// Bytes of pageable memory, read when the copy was enqueued.
    Staged(Vec<u8>),
}

/// Destination of a copy.
#[derive(Clone, Debug)]
pub(crate) enum To {
    Device(u64),
    /// Memory of the host: page-locked, or pageable memory that the host waits for.
    Host(u64),
}

/// A value that is written many times.
#[derive(Clone, Debug)]
pub(crate) struct Fill {
    pub(crate) to: u64,
    /// The value, of one, two or four bytes.
    pub(crate) value: Vec<u8>,
    pub(crate) count: usize,
}

impl Work {
    /// Checks that all memory is there. The same when it is enqueued and when it runs.
    pub(crate) fn check(&self, memory: &Memory) -> Result<(), Fault> {
        let on_device = |address: u64, bytes: usize, role: &str| match memory.owner(address, bytes)
        {
            Some(Kind::Device(_)) => Ok(()),
            _ if bytes == 0 => Ok(()),
            _ => Err(Fault::illegal_address(format!(
                "{role} of {bytes} bytes at {address:#x}, {}",
                memory.describe(address)
            ))),
        };
        match self {
            Self::Nothing => Ok(()),
            Self::Copy(copy) => {
                match &copy.from {
                    From::Device(address) => on_device(*address, copy.bytes, "a copy from")?,
                    From::Pinned(address) if memory.owner(*address, copy.bytes).is_none() => {
                        return Err(Fault::illegal_address(format!(
                            "a copy from page-locked memory at {address:#x}, {}",
                            memory.describe(*address)
                        )));
                    }
                    From::Pinned(_) | From::Staged(_) => {}
                }
                match copy.to {
                    To::Device(address) => on_device(address, copy.bytes, "a copy to"),
                    To::Host(address) if memory.is_freed(address) => {
                        Err(Fault::illegal_address(format!(
                            "a copy to memory of the host at {address:#x}, {}",
                            memory.describe(address)
                        )))
                    }
                    To::Host(_) => Ok(()),
                }
            }
            Self::Fill(fill) => on_device(fill.to, fill.value.len() * fill.count, "a fill"),
            Self::Grid(grid) => grid.check(memory),
            Self::Exchange(exchange) => {
                exchange.messages().try_for_each(|Message { address, bytes, .. }| {
                    on_device(*address, *bytes, "an exchange")
                })
            }
        }
    }

    /// Does it.
    pub(crate) fn run(&self, engine: &mut Engine, memory: &Memory) -> Result<(), Fault> {
        self.check(memory)?;
        match self {
            Self::Nothing => {}
            Self::Copy(copy) => copy.run(),
            Self::Fill(fill) => fill.run(),
            Self::Grid(grid) => engine.run(grid, memory)?,
            Self::Exchange(exchange) => exchange.run().map_err(|why| {
                Fault::new(CUresult::CUDA_ERROR_UNKNOWN, format!("an exchange: {why}"))
            })?,
        }
        match memory.damage() {
            None => Ok(()),
            Some(damage) => Err(Fault::new(
                CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
                format!("{}: {damage}", self.name()),
            )),
        }
    }

    /// Its name in messages.
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

impl Copy {
    fn run(&self) {
        let from = match &self.from {
            From::Device(address) | From::Pinned(address) => *address as *const u8,
            From::Staged(bytes) => bytes.as_ptr(),
        };
        let (To::Device(to) | To::Host(to)) = self.to;
        // SAFETY: `check` found all memory of devices and page-locked memory; pageable memory of
        // the host is the caller's promise, who waits for the copy.
        unsafe { std::ptr::copy(from, to as *mut u8, self.bytes) };
    }
}

impl Fill {
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

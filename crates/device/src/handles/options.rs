//! Options of a device, and settings from the environment.

use crate::ground::fault::EngineFaults;
use crate::ground::{Error, Isa, Result};
use crate::observers::Trace;

/// Largest number of workers of a device.
pub(super) const MAX_THREADS: usize = 1024;

/// Options for opening a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Number of workers of a CPU device; 0: one for each core available to the process. For a CUDA
    /// device not a number of host threads: the number of the driver's streams that carry out its
    /// streams; 0: one. No result depends on it.
    pub threads: usize,
    /// Largest number of bytes that the device takes from the system for tensors and temporary
    /// memory of kernels, `None` for no limit. Graphs, code and staging memory of a CUDA device do
    /// not count.
    pub memory_limit: Option<usize>,
    /// Instruction set of the kernels; `None`: the value of `MERISTEM_ISA`, or else the best of
    /// this machine.
    pub isa: Option<Isa>,
    /// Trace to record into; `None` for none.
    pub trace: Option<Trace>,
    /// Checks every launch for races (S3), as `MERISTEM_SANITIZE=1` does for every device.
    pub sanitize: bool,
}

/// Settings from environment variables.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Environment {
    /// `MERISTEM_ISA`: the instruction set of the kernels.
    pub(crate) isa: Isa,
    /// `MERISTEM_LAUNCH_BLOCKING`: every launch waits for its kernel (S4).
    pub(crate) launch_blocking: bool,
    /// `MERISTEM_SANITIZE`: every launch is checked for races (S3).
    pub(crate) sanitize: bool,
    /// Faults planted by tests only.
    pub(crate) faults: EngineFaults,
}

impl Default for Environment {
    /// Settings with no variable set.
    fn default() -> Self {
        let faults = EngineFaults::default();
        Environment { isa: Isa::detect(), launch_blocking: false, sanitize: false, faults }
    }
}

impl Environment {
    pub(super) fn read() -> Result<Self> {
        let isa = Isa::from_env()?;
        let launch_blocking = switch("MERISTEM_LAUNCH_BLOCKING")?;
        let sanitize = switch("MERISTEM_SANITIZE")?;
        Ok(Environment { isa, launch_blocking, sanitize, faults: EngineFaults::default() })
    }
}

/// Reads an environment variable that is on or off.
fn switch(variable: &'static str) -> Result<bool> {
    let value = std::env::var_os(variable);
    match value.as_ref().map(|value| value.to_str()) {
        None | Some(Some("" | "0")) => Ok(false),
        Some(Some("1")) => Ok(true),
        Some(_) => {
            let got = value.unwrap_or_default().to_string_lossy().into_owned();
            Err(Error::BadEnvironment { variable, expected: "0 or 1", got })
        }
    }
}

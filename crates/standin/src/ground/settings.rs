//! Settings of the stand-in, from environment variables.

use std::env;

/// Settings, read once by `cuInit`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// Decides the order in which streams, blocks and threads run, and the poison.
    pub(crate) seed: u64,
    /// Number of devices.
    pub(crate) devices: usize,
    /// Memory of each device in bytes.
    pub(crate) memory: usize,
}

impl Settings {
    /// The settings of this process, or the name of the variable that is no number, and its value.
    pub(crate) fn read() -> Result<Self, String> {
        Ok(Self {
            seed: number("MERISTEM_STANDIN_SEED", 0)?,
            devices: number("MERISTEM_STANDIN_DEVICES", 1)? as usize,
            memory: number("MERISTEM_STANDIN_MEMORY", 8 << 30)? as usize,
        })
    }
}

fn number(name: &str, default: u64) -> Result<u64, String> {
    match env::var(name) {
        Ok(text) => text.trim().parse().map_err(|_| format!("{name}={text} is no whole number")),
        Err(_) => Ok(default),
    }
}

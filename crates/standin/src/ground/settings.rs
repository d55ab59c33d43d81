//! Settings of the stand-in, from environment variables.

use std::env;

/// Largest dynamic shared memory of compute capability 9.0, in bytes; each module has room for it.
pub(crate) const SHARED_MAX: usize = 232_448;

/// Settings of the stand-in, read once by `cuInit`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StandinSettings {
    /// Decides the order in which streams, blocks and threads run.
    pub(crate) seed: u64,
    /// Number of devices.
    pub(crate) devices: usize,
    /// Memory of each device in bytes.
    pub(crate) memory: usize,
    /// Most bytes of dynamic shared memory that a kernel may be permitted.
    pub(crate) shared: usize,
}

impl StandinSettings {
    /// The settings of this process, or the name of the variable that is no number, and its value.
    pub(crate) fn read() -> Result<Self, String> {
        Ok(Self {
            seed: number("MERISTEM_STANDIN_SEED", 0)?,
            devices: number("MERISTEM_STANDIN_DEVICES", 1)? as usize,
            memory: number("MERISTEM_STANDIN_MEMORY", 8 << 30)? as usize,
            shared: shared(number("MERISTEM_STANDIN_SHARED", SHARED_MAX as u64)?)?,
        })
    }
}

/// Checks the limit of dynamic shared memory: at least 48 KiB, which every device permits by
/// default, and at most [`SHARED_MAX`], for which modules have room.
fn shared(bytes: u64) -> Result<usize, String> {
    let known = usize::try_from(bytes).ok().filter(|n| (48 << 10..=SHARED_MAX).contains(n));
    known.ok_or_else(|| {
        format!("MERISTEM_STANDIN_SHARED={bytes} is not between {} and {SHARED_MAX}", 48 << 10)
    })
}

fn number(name: &str, default: u64) -> Result<u64, String> {
    match env::var(name) {
        Ok(text) => text.trim().parse().map_err(|_| format!("{name}={text} is no whole number")),
        Err(_) => Ok(default),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_between_what_all_devices_have_and_the_room() {
        assert_eq!([shared(48 << 10), shared(101_376)], [Ok(48 << 10), Ok(101_376)]);
        for bytes in [0, (48 << 10) - 1, SHARED_MAX as u64 + 1, u64::MAX] {
            let why = format!("MERISTEM_STANDIN_SHARED={bytes} is not between 49152 and 232448");
            assert_eq!(shared(bytes), Err(why));
        }
    }
}

//! Names of devices: `cpu`, `cuda`, `cuda:3`.

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// Which device. Parsed from and shown as `cpu` and `cuda:3`; `cuda` is `cuda:0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceId {
    /// The processor.
    Cpu,
    /// The CUDA device of this ordinal.
    Cuda(u32),
}

impl DeviceId {
    /// The device's index in seeds (D2): `cpu` and `cuda:0` are 0, `cuda:k` is k.
    pub fn index(self) -> u32 {
        match self {
            DeviceId::Cpu => 0,
            DeviceId::Cuda(ordinal) => ordinal,
        }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceId::Cpu => f.write_str("cpu"),
            DeviceId::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for DeviceId {
    type Err = Error;

    /// # Errors
    /// [`Error::BadDeviceName`] for anything but `cpu`, `cuda` and `cuda:` with a plain number.
    fn from_str(name: &str) -> Result<Self> {
        let ordinal = match name {
            "cpu" => return Ok(DeviceId::Cpu),
            "cuda" => "0",
            _ => name.strip_prefix("cuda:").unwrap_or(""),
        };
        let plain = !ordinal.is_empty() && ordinal.bytes().all(|b| b.is_ascii_digit());
        let ordinal = if plain { ordinal.parse().ok() } else { None };
        ordinal.map(DeviceId::Cuda).ok_or_else(|| Error::BadDeviceName { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for (name, id) in [("cpu", DeviceId::Cpu), ("cuda:3", DeviceId::Cuda(3))] {
            assert_eq!(name.parse::<DeviceId>().unwrap(), id);
            assert_eq!(id.to_string(), name);
        }
        assert_eq!("cuda".parse::<DeviceId>().unwrap(), DeviceId::Cuda(0));
        assert_eq!(
            [DeviceId::Cpu, DeviceId::Cuda(0), DeviceId::Cuda(2)].map(DeviceId::index),
            [0, 0, 2]
        );
    }

    #[test]
    fn bad_names_are_refused() {
        for name in ["", "CPU", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda:99999999999", "gpu"]
        {
            let error = name.parse::<DeviceId>().unwrap_err();
            assert!(error.to_string().contains(&format!("`{name}`")), "{error}");
        }
    }
}

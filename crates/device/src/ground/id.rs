//! Names of devices: `cpu`, `cpu:1`, `cuda`, `cuda:3`.

use std::fmt;

/// A device. Parsed from `cpu`, `cpu:1`, `cuda`, `cuda:3`, where `cpu` is `cpu:0` and `cuda` is
/// `cuda:0`. Displayed in the same form, `cpu:0` as `cpu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceId {
    /// Logical device of this number on the CPU: it has its own memory, workers and counts, and
    /// shares the cores.
    Cpu(u32),
    /// The CUDA device of this ordinal.
    Cuda(u32),
}

impl DeviceId {
    /// The number k of `cpu:k` and `cuda:k`. Seeds of permutations depend on it (D2).
    pub fn index(self) -> u32 {
        match self {
            DeviceId::Cpu(index) | DeviceId::Cuda(index) => index,
        }
    }

    /// The device of a name; `None` for anything but `cpu` and `cuda`, alone or with `:` and a
    /// plain number.
    pub(super) fn from_name(name: &str) -> Option<DeviceId> {
        let (kind, number) = name.split_once(':').unwrap_or((name, "0"));
        if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let number = number.parse().ok()?;
        match kind {
            "cpu" => Some(DeviceId::Cpu(number)),
            "cuda" => Some(DeviceId::Cuda(number)),
            _ => None,
        }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceId::Cpu(0) => f.write_str("cpu"),
            DeviceId::Cpu(index) => write!(f, "cpu:{index}"),
            DeviceId::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        let ids = [DeviceId::Cpu(0), DeviceId::Cpu(2), DeviceId::Cuda(0), DeviceId::Cuda(3)];
        for (name, id) in ["cpu", "cpu:2", "cuda:0", "cuda:3"].into_iter().zip(ids) {
            assert_eq!(name.parse::<DeviceId>().unwrap(), id);
            assert_eq!(id.to_string(), name);
        }
        assert_eq!("cuda".parse::<DeviceId>().unwrap(), DeviceId::Cuda(0));
        assert_eq!("cpu:0".parse::<DeviceId>().unwrap(), DeviceId::Cpu(0));
        assert_eq!(ids.map(DeviceId::index), [0, 2, 0, 3]);
    }

    #[test]
    fn bad_names_are_refused() {
        for name in [
            "",
            "CPU",
            "cpu:",
            "cpu:x",
            "cpu:0:1",
            "cpu:-1",
            "cuda:",
            "cuda:x",
            "cuda:-1",
            "cuda:+1",
            "cuda:99999999999",
            "gpu",
            ":1",
        ] {
            let error = name.parse::<DeviceId>().unwrap_err();
            assert!(matches!(error, crate::Error::BadDeviceName { .. }), "{error:?}");
            let words = format!("`{name}` is not a device; use cpu, cpu:N, cuda or cuda:N");
            assert!(error.to_string().starts_with(&words), "{error}");
        }
    }
}

//! Instruction sets: the sets of this machine, and the set that a device's kernels use.
//!
//! A device's set is chosen when the device is opened: [`DeviceOptions::isa`], or else
//! `MERISTEM_ISA`, or else the best set of the machine. A kernel reads it from
//! [`Args::isa`](crate::Args::isa).
//!
//! [`DeviceOptions::isa`]: crate::DeviceOptions::isa

use std::fmt;
use std::str::FromStr;

/// Environment variable that forces an instruction set: `portable`, `avx2`, `avx512`, `avx512-256`
/// or `neon`.
const ISA_VARIABLE: &str = "MERISTEM_ISA";

/// An instruction set of the kernels.
///
/// A value other than [`Isa::portable`] exists only if this machine has the instructions, so
/// kernels may use them without another check, and dispatch is sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Isa {
    level: Level,
    halves: bool,
}

/// The instruction set of an [`Isa`], to branch on. It cannot be converted into an `Isa`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// Plain Rust.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX2, FMA, and AVX-512 F, VL, DQ and BW.
    Avx512,
    /// NEON, the vectors of aarch64.
    Neon,
}

/// An instruction set that was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IsaError {
    /// No instruction set has this name.
    #[error(
        "`{name}` is not an instruction set; this machine has {}; set MERISTEM_ISA to one of \
         these, or unset it",
        names_of_this_machine()
    )]
    Unknown {
        /// The name given.
        name: String,
    },
    /// This machine lacks the instructions.
    #[error(
        "this machine has no {name}; it has {}; set MERISTEM_ISA to one of these, or unset it",
        names_of_this_machine()
    )]
    Missing {
        /// The instruction set asked for.
        name: &'static str,
    },
}

impl Isa {
    /// Plain Rust, on every machine.
    pub const fn portable() -> Self {
        Self::at_level(Level::Portable)
    }

    const fn at_level(level: Level) -> Self {
        Self { level, halves: false }
    }

    /// AVX2 and FMA, if this machine has them.
    pub fn avx2() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Some(Self::at_level(Level::Avx2));
        }
        None
    }

    /// AVX-512 (F, VL, DQ, BW), if this machine has it.
    pub fn avx512() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if Self::avx2().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512bw")
        {
            return Some(Self::at_level(Level::Avx512));
        }
        None
    }

    /// [`Isa::avx512`] for processors whose units are 256 bits wide: kernels use vectors of 256
    /// bits where wider vectors would only waste lanes.
    fn avx512_256() -> Option<Self> {
        Self::avx512().map(|isa| Self { halves: true, ..isa })
    }

    /// NEON, which every aarch64 has.
    pub fn neon() -> Option<Self> {
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            return Some(Self::at_level(Level::Neon));
        }
        None
    }

    /// The best instruction set of this machine.
    pub fn detect() -> Self {
        Self::available().pop().unwrap_or(Self::portable())
    }

    /// All instruction sets of this machine, portable first and the best last.
    pub fn available() -> Vec<Self> {
        let (wide, halves) = (Self::avx512(), Self::avx512_256());
        let last =
            if wide.is_some() && computes_in_halves() { [wide, halves] } else { [halves, wide] };
        let first = [Some(Self::portable()), Self::neon(), Self::avx2()];
        first.into_iter().chain(last).flatten().collect()
    }

    /// The instruction set named by `MERISTEM_ISA`, or [`Isa::detect`] if it is unset or empty.
    ///
    /// # Errors
    /// The name is unknown, or this machine lacks the instructions.
    pub fn from_env() -> Result<Self, IsaError> {
        match std::env::var_os(ISA_VARIABLE) {
            Some(name) if !name.is_empty() => name.to_string_lossy().parse(),
            _ => Ok(Self::detect()),
        }
    }

    /// The name: `portable`, `avx2`, `avx512`, `avx512-256` or `neon`.
    pub const fn name(self) -> &'static str {
        match self.level {
            Level::Portable => "portable",
            Level::Avx2 => "avx2",
            Level::Avx512 if self.halves => "avx512-256",
            Level::Avx512 => "avx512",
            Level::Neon => "neon",
        }
    }

    /// Whether this is `avx512-256`, for processors that execute an operation on 512 bits as two on
    /// 256 bits.
    pub const fn halves(self) -> bool {
        self.halves
    }

    /// The level to branch on: code compiled for it may be called on this machine.
    pub const fn level(self) -> Level {
        self.level
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = IsaError;

    fn from_str(name: &str) -> Result<Self, IsaError> {
        match name {
            "portable" => Ok(Self::portable()),
            "avx2" => Self::avx2().ok_or(IsaError::Missing { name: "avx2" }),
            "avx512" => Self::avx512().ok_or(IsaError::Missing { name: "avx512" }),
            "avx512-256" => Self::avx512_256().ok_or(IsaError::Missing { name: "avx512-256" }),
            "neon" => Self::neon().ok_or(IsaError::Missing { name: "neon" }),
            _ => Err(IsaError::Unknown { name: name.into() }),
        }
    }
}

/// Whether this processor's units are 256 bits wide, so that an operation on 512 bits takes two
/// passes: AMD's family 19h, whose members with AVX-512 are Zen 4 ("Software Optimization Guide for
/// the AMD Zen4 Microarchitecture", publication 57647).
#[cfg(target_arch = "x86_64")]
fn computes_in_halves() -> bool {
    // SAFETY: every x86-64 has the instruction. Newer versions of Rust do not call it unsafe.
    #[allow(unused_unsafe)]
    let leaf = |of| unsafe { std::arch::x86_64::__cpuid(of) };
    let name = leaf(0);
    let vendor = [name.ebx, name.edx, name.ecx].map(u32::to_le_bytes);
    let signature = leaf(1).eax;
    // For base family Fh, the extended family is added.
    let family = (signature >> 8 & 0xf) + (signature >> 20 & 0xff);
    vendor.as_flattened() == b"AuthenticAMD" && family == 0x19
}

#[cfg(not(target_arch = "x86_64"))]
fn computes_in_halves() -> bool {
    false
}

fn names_of_this_machine() -> String {
    let names: Vec<&str> = Isa::available().iter().map(|isa| isa.name()).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_errors_list_all_that_the_machine_has() {
        let all = Isa::available();
        assert_eq!(all[0], Isa::portable());
        let best = Isa::avx512().or_else(Isa::avx2).or_else(Isa::neon);
        assert_eq!(Isa::detect().level(), best.unwrap_or(Isa::portable()).level());
        assert_eq!(Isa::neon().is_some(), cfg!(target_arch = "aarch64"));
        let halves = all.iter().filter(|isa| isa.halves()).count();
        assert_eq!(halves, usize::from(Isa::avx512().is_some()));
        for isa in &all {
            assert_eq!(isa.name().parse(), Ok(*isa));
        }
        let unknown = "avx3".parse::<Isa>().unwrap_err();
        assert_eq!(unknown, IsaError::Unknown { name: "avx3".into() });
        for error in [unknown, IsaError::Missing { name: "avx512" }] {
            let names: Vec<&str> = all.iter().map(|isa| isa.name()).collect();
            assert!(error.to_string().contains(&names.join(", ")), "{error}");
        }
    }
}

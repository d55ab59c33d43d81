//! Which instruction set the kernels use, picked at run time.

use std::fmt;
use std::str::FromStr;

/// Environment variable that forces an instruction set: `portable`, `avx2` or `avx512`.
pub const ISA_VARIABLE: &str = "MERISTEM_ISA";

/// An instruction set of the kernels.
///
/// A value other than [`Isa::portable`] exists only if this machine has the instructions, so the
/// kernels may use them without asking again: this is what makes their dispatch sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Isa(Level);

/// The instruction sets, private so that an [`Isa`] cannot be made up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Level {
    /// Plain Rust.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, VL, DQ and BW, besides AVX2 and FMA.
    Avx512,
}

/// Why an instruction set was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IsaError {
    /// No instruction set has this name.
    #[error("`{name}` is no instruction set; MERISTEM_ISA is one of portable, avx2, avx512")]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// This machine lacks the instructions.
    #[error("this machine has no {name}; unset MERISTEM_ISA, or set it to portable")]
    Missing {
        /// What was asked for.
        name: &'static str,
    },
}

impl Isa {
    /// Plain Rust, on every machine.
    pub const fn portable() -> Self {
        Self(Level::Portable)
    }

    /// AVX2 and FMA, if this machine has them.
    pub fn avx2() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Some(Self(Level::Avx2));
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
            return Some(Self(Level::Avx512));
        }
        None
    }

    /// The best one of this machine.
    pub fn detect() -> Self {
        Self::avx512().or_else(Self::avx2).unwrap_or(Self::portable())
    }

    /// All of this machine, portable first; for tests and benchmarks.
    pub fn available() -> Vec<Self> {
        [Some(Self::portable()), Self::avx2(), Self::avx512()].into_iter().flatten().collect()
    }

    /// The one that [`ISA_VARIABLE`] names, or [`Isa::detect`] where it is unset or empty.
    ///
    /// # Errors
    /// The name is unknown, or this machine lacks the instructions.
    pub fn from_env() -> Result<Self, IsaError> {
        match std::env::var_os(ISA_VARIABLE) {
            Some(name) if !name.is_empty() => name.to_string_lossy().parse(),
            _ => Ok(Self::detect()),
        }
    }

    /// `portable`, `avx2` or `avx512`.
    pub const fn name(self) -> &'static str {
        match self.0 {
            Level::Portable => "portable",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
        }
    }

    pub(crate) const fn level(self) -> Level {
        self.0
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
            _ => Err(IsaError::Unknown { name: name.into() }),
        }
    }
}

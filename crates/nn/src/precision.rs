//! Precision of products, and the element type of values.

use std::borrow::Cow;
use std::fmt;

use meristem_device::{DType, DeviceId};
use serde::{Deserialize, Serialize};

/// Rounding of the two factors of each product of a convolution or a linear layer before they are
/// multiplied, forward and backward, and the element type of values in memory. Sums are f32, and so
/// are weights, their gradients, statistics and losses: weights are rounded where they are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// Factors as they are.
    #[default]
    F32,
    /// TF32: 10 bits of mantissa and the range of f32; to nearest, ties away from zero, as CUDA's
    /// `cvt.rna.tf32`.
    Tf32,
    /// bf16: 7 bits of mantissa and the range of f32; to nearest, ties to even. Values in memory
    /// are bf16, too.
    Bf16,
}

/// Element type of the values of a network between its operations, and of their gradients.
/// Operations read them as f32, and round what they write to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ValueType {
    /// 32 bits.
    #[default]
    F32,
    /// 16 bits, rounded to nearest, ties to even.
    Bf16,
}

impl ValueType {
    /// Element type of a tensor of values.
    pub fn dtype(self) -> DType {
        match self {
            ValueType::F32 => DType::F32,
            ValueType::Bf16 => DType::BF16,
        }
    }

    /// Precision of the products of operations whose factors are f32 unless values are bf16.
    pub(crate) fn precision(self) -> Precision {
        match self {
            ValueType::F32 => Precision::F32,
            ValueType::Bf16 => Precision::Bf16,
        }
    }
}

impl Precision {
    /// All of them, the most exact first.
    pub const ALL: [Precision; 3] = [Precision::F32, Precision::Tf32, Precision::Bf16];

    /// Name in settings.
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Tf32 => "tf32",
            Precision::Bf16 => "bf16",
        }
    }

    /// A factor as it is multiplied. NaN stays NaN; values that round beyond the range become
    /// infinite.
    pub fn round(self, value: f32) -> f32 {
        let bits = value.to_bits();
        match self {
            _ if value.is_nan() => value,
            Precision::F32 => value,
            Precision::Tf32 => f32::from_bits((bits + 0x1000) & !0x1FFF),
            Precision::Bf16 => {
                let even = 0x7FFF + (bits >> 16 & 1);
                f32::from_bits((bits + even) & !0xFFFF)
            }
        }
    }

    /// Element type of values in memory.
    pub fn value_type(self) -> ValueType {
        match self {
            Precision::F32 | Precision::Tf32 => ValueType::F32,
            Precision::Bf16 => ValueType::Bf16,
        }
    }

    /// Whether a device can compute in this precision.
    pub fn runs_on(self, device: DeviceId) -> bool {
        match device {
            DeviceId::Cpu(_) => self == Precision::F32,
            DeviceId::Cuda(_) => true,
        }
    }

    /// Factors as they are multiplied.
    pub(crate) fn rounded(self, values: &[f32]) -> Cow<'_, [f32]> {
        match self {
            Precision::F32 => values.into(),
            _ => values.iter().map(|value| self.round(*value)).collect(),
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values between two neighbours, by the mantissa's bits beyond the kept ones.
    #[test]
    fn factors_are_rounded_to_the_nearest() {
        let one = |mantissa: u32| f32::from_bits(1f32.to_bits() | mantissa);
        for (precision, from, to) in [
            (Precision::F32, 0x1FFF, 0x1FFF),
            (Precision::Tf32, 0x0FFF, 0),
            (Precision::Tf32, 0x1000, 0x2000), // a tie goes away from zero
            (Precision::Tf32, 0x3000, 0x4000),
            (Precision::Tf32, 0x7F_F000, 0x80_0000), // into the exponent: 2
            (Precision::Bf16, 0x7FFF, 0),
            (Precision::Bf16, 0x8000, 0), // a tie is rounded to even
            (Precision::Bf16, 0x8001, 0x1_0000),
            (Precision::Bf16, 0x1_8000, 0x2_0000),
        ] {
            let to = f32::from_bits(1f32.to_bits() + to);
            assert_eq!(precision.round(one(from)), to, "{precision}: {from:x}");
            assert_eq!(precision.round(-one(from)), -to, "{precision}: −{from:x}");
        }
    }

    #[test]
    fn zeros_infinities_and_nan_are_what_they_were() {
        for precision in Precision::ALL {
            for value in [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 1.5, -0.25] {
                assert_eq!(precision.round(value).to_bits(), value.to_bits(), "{precision}");
            }
            for bits in [0x7F80_0001, 0x7FFF_FFFF, 0xFFFF_FFFF] {
                assert!(precision.round(f32::from_bits(bits)).is_nan(), "{precision}: {bits:x}");
            }
        }
        assert_eq!(Precision::F32.round(f32::MAX), f32::MAX);
        assert_eq!(Precision::Tf32.round(f32::MAX), f32::INFINITY);
        assert_eq!(Precision::Bf16.round(f32::MIN), f32::NEG_INFINITY);
    }

    #[test]
    fn exact_factors_are_not_copied() {
        assert!(matches!(Precision::F32.rounded(&[1.1]), Cow::Borrowed([_])));
        assert_eq!(*Precision::Bf16.rounded(&[1.0 + 1.0 / 300.0]), [1.0]);
    }
}

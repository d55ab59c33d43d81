//! Element types that can be summed.

use std::fmt::Debug;

use half::bf16;
use meristem_device::{DType, Element};

/// A float type whose elements ranks can sum: f32, f64 or bf16. Every operation rounds to this
/// type; a sum of bf16 is a chain of bf16 additions.
pub trait SumElement: Element + PartialEq + PartialOrd + Debug {
    /// Bits without the sign, ordered by distance from zero: infinities above all finite numbers.
    /// Every NaN has the largest value that [`Magnitude::BITS`] hold, whatever its payload, because
    /// processors and GPUs produce NaN with different payloads.
    type Magnitude: Magnitude;

    /// Zero.
    const ZERO: Self;
    /// Minus zero, the neutral element of addition: adding it changes no bit of any number.
    const NEUTRAL: Self;

    /// Sum of two numbers.
    #[must_use]
    fn plus(self, other: Self) -> Self;
    /// Product of two numbers.
    #[must_use]
    fn times(self, other: Self) -> Self;
    /// This number divided by a count.
    #[must_use]
    fn divided_by(self, count: usize) -> Self;
    /// The nearest number.
    fn from_f64(value: f64) -> Self;
    /// Bits without the sign; those of NaN are all set.
    fn magnitude(self) -> Self::Magnitude;
}

/// Bits of a number without the sign, as an integer.
pub trait Magnitude: Copy + Ord + Send + Sync + Debug + 'static {
    /// Number of bits in use.
    const BITS: u32;
    /// Largest value of the integer type, above the magnitude of every number and NaN.
    const MAX: Self;
    /// Converts to u64.
    fn wide(self) -> u64;
    /// Converts from a u64 whose upper bits are zero.
    fn narrow(bits: u64) -> Self;
}

macro_rules! magnitude {
    ($($int:ty, $bits:literal);*) => {$(
        impl Magnitude for $int {
            const BITS: u32 = $bits;
            const MAX: Self = <$int>::MAX;
            #[inline(always)]
            fn wide(self) -> u64 {
                u64::from(self)
            }
            #[inline(always)]
            fn narrow(bits: u64) -> Self {
                bits as $int
            }
        }
    )*};
}
magnitude!(u16, 15; u32, 31; u64, 63);

macro_rules! number {
    ($($float:ty, $int:ty);*) => {$(
        impl SumElement for $float {
            type Magnitude = $int;
            const ZERO: Self = 0.0;
            const NEUTRAL: Self = -0.0;
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn divided_by(self, count: usize) -> Self {
                self / count as $float
            }
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                value as $float
            }
            #[inline(always)]
            fn magnitude(self) -> $int {
                const ALL: $int = <$int>::MAX >> 1;
                let bits = self.to_bits() & ALL;
                if bits > <$float>::INFINITY.to_bits() { ALL } else { bits }
            }
        }
    )*};
}
number!(f32, u32; f64, u64);

impl SumElement for bf16 {
    type Magnitude = u16;
    const ZERO: Self = bf16::ZERO;
    const NEUTRAL: Self = bf16::NEG_ZERO;
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        bf16::from_f32(self.to_f32() + other.to_f32())
    }
    #[inline(always)]
    fn times(self, other: Self) -> Self {
        bf16::from_f32(self.to_f32() * other.to_f32())
    }
    #[inline(always)]
    fn divided_by(self, count: usize) -> Self {
        bf16::from_f32(self.to_f32() / count as f32)
    }
    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        bf16::from_f64(value)
    }
    #[inline(always)]
    fn magnitude(self) -> u16 {
        let bits = self.to_bits() & 0x7fff;
        if bits > bf16::INFINITY.to_bits() { 0x7fff } else { bits }
    }
}

/// Divides by the number of ranks, if given. For a power of two the reciprocal is exact, so the
/// product has the same bits as the quotient.
#[inline(always)]
pub(crate) fn divide<T: SumElement>(values: &mut [T], divisor: Option<usize>) {
    match divisor {
        Some(n) if n.is_power_of_two() => {
            let reciprocal = T::from_f64(1.0 / n as f64);
            values.iter_mut().for_each(|value| *value = value.times(reciprocal));
        }
        Some(n) => values.iter_mut().for_each(|value| *value = value.divided_by(n)),
        None => {}
    }
}

/// Whether elements of this type can be summed.
pub(crate) fn is_number(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::BF16)
}

/// Evaluates `$body` with `$number` as the Rust type of an element type, or `$other` if
/// [`is_number`] is false for the type.
macro_rules! with_number {
    ($dtype:expr, $number:ident => $body:expr, $other:expr) => {
        match $dtype {
            meristem_device::DType::F32 => {
                type $number = f32;
                $body
            }
            meristem_device::DType::F64 => {
                type $number = f64;
                $body
            }
            meristem_device::DType::BF16 => {
                type $number = half::bf16;
                $body
            }
            _ => $other,
        }
    };
}
pub(crate) use with_number;

#[cfg(test)]
mod tests {
    use super::*;

    fn check<T: SumElement>(numbers: &[T], nans: &[T]) {
        let magnitudes: Vec<u64> = numbers.iter().map(|x| x.magnitude().wide()).collect();
        assert!(magnitudes.is_sorted_by(|a, b| a < b), "{magnitudes:?}");
        let largest = (1 << T::Magnitude::BITS) - 1;
        assert!(*magnitudes.last().unwrap() < largest);
        for nan in nans {
            assert_eq!(nan.magnitude().wide(), largest, "{nan:?}");
        }
    }

    #[test]
    fn every_nan_is_the_largest() {
        let numbers = [0.0, -f64::MIN_POSITIVE, 1.0, -3.0, f64::MAX, f64::NEG_INFINITY];
        let payloads = [0x7ff0_0000_0000_0001, 0xfff8_0000_0000_0000, u64::MAX >> 1, u64::MAX];
        check(&numbers, &payloads.map(f64::from_bits));
        let numbers = [0.0, -f32::MIN_POSITIVE, 1.0, -3.0, f32::MAX, f32::NEG_INFINITY];
        let payloads = [0x7f80_0001, 0xffc0_0000, u32::MAX >> 1, u32::MAX];
        check(&numbers, &payloads.map(f32::from_bits));
        let numbers = [0.0, -1.0, 3.0].map(bf16::from_f32);
        let payloads = [0x7f81, 0xffc0, u16::MAX >> 1, u16::MAX];
        check(
            &[numbers.to_vec(), vec![bf16::MAX, bf16::NEG_INFINITY]].concat(),
            &payloads.map(bf16::from_bits),
        );
    }
}

//! Ranges of numbers.

use std::fmt;

use crate::config::value::LimitedNumber;

/// Range of numbers that a setting accepts, inclusive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NumberRange {
    /// Every value of the type.
    Any,
    /// Whole numbers; `u64::MAX` means no upper limit.
    Whole(u64, u64),
    /// Real numbers.
    Real(f64, f64),
}

impl NumberRange {
    pub(super) fn contains(self, number: LimitedNumber) -> bool {
        match (self, number) {
            (Self::Whole(low, high), LimitedNumber::Whole(number)) => {
                (low..=high).contains(&number)
            }
            (Self::Real(low, high), LimitedNumber::Real(number)) => (low..=high).contains(&number),
            // The bound is rounded like the value, because 0.99 differs between 32 and 64 bits.
            (Self::Real(low, high), LimitedNumber::Single(number)) => {
                (low as f32..=high as f32).contains(&number)
            }
            _ => true,
        }
    }
}

impl fmt::Display for NumberRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Any => Ok(()),
            Self::Whole(low, u64::MAX) => write!(f, "at least {low}"),
            Self::Whole(low, high) => write!(f, "{low} to {high}"),
            Self::Real(low, high) => {
                write_real(f, low)?;
                f.write_str(" to ")?;
                write_real(f, high)
            }
        }
    }
}

/// Writes very small and very large numbers with an exponent.
fn write_real(f: &mut fmt::Formatter<'_>, number: f64) -> fmt::Result {
    match number.abs() {
        size if size == 0.0 || (1e-5..1e10).contains(&size) => write!(f, "{number}"),
        _ => write!(f, "{number:e}"),
    }
}

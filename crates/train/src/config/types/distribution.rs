//! Distributions of a setting's values, for members that are drawn.

use std::fmt;

use meristem_device::random::Rng;

use crate::config::text::BadValue;

/// Factors by which [`Distribution::near`] changes a number, as in Jaderberg et al., "Population
/// Based Training of Neural Networks", 2017, 4.1.1.
const FACTORS: [f64; 2] = [0.8, 1.2];

/// Probability with which [`Distribution::near`] draws a choice again, as in the same paper.
const REDRAWN: f32 = 0.25;

/// Distribution of a setting's values. Numbers are rounded to four significant digits.
#[derive(Clone, Debug, PartialEq)]
pub enum Distribution {
    /// Each of these texts with the same probability.
    Choice(Vec<String>),
    /// A whole number, both bounds included.
    Int(i64, i64),
    /// A number, uniform between two bounds.
    Uniform(f64, f64),
    /// A number whose logarithm is uniform between those of two positive bounds.
    LogUniform(f64, f64),
}

impl Distribution {
    pub(super) const FORMS: &'static str =
        "choice:A|B, int:LOW,HIGH, uniform:LOW,HIGH or log_uniform:LOW,HIGH";

    /// The distribution with this name, for the setting `key`.
    pub(super) fn new(key: &str, name: &str, values: &[String]) -> Result<Self, BadValue> {
        let all = format!("{key}={name}:{}", values.join(","));
        let bounds = || -> Result<(f64, f64), BadValue> {
            let numbers: Vec<f64> = values.iter().filter_map(|v| v.trim().parse().ok()).collect();
            match numbers[..] {
                [low, high]
                    if values.len() == 2 && low < high && low.is_finite() && high.is_finite() =>
                {
                    Ok((low, high))
                }
                _ => Err(BadValue::new(&all, "two finite numbers, the lower first")),
            }
        };
        match name {
            "choice" if values.is_empty() || values.iter().any(|value| value.trim().is_empty()) => {
                Err(BadValue::new(&all, "at least one value, and none that is empty"))
            }
            "choice" => Ok(Self::Choice(values.iter().map(|value| value.trim().into()).collect())),
            "int" => {
                let (low, high) = bounds()?;
                let is_whole = |x: f64| x == x.trunc() && x.abs() <= (1i64 << 53) as f64;
                if !is_whole(low) || !is_whole(high) {
                    return Err(BadValue::new(&all, "whole numbers"));
                }
                Ok(Self::Int(low as i64, high as i64))
            }
            "uniform" => bounds().map(|(low, high)| Self::Uniform(low, high)),
            "log_uniform" => match bounds()? {
                (low, high) if low > 0.0 => Ok(Self::LogUniform(low, high)),
                _ => Err(BadValue::new(&all, "numbers above 0, because they have logarithms")),
            },
            _ => Err(BadValue::new(&all, Self::FORMS)),
        }
    }

    /// The value at `u` in 0..1.
    pub(super) fn at(&self, u: f64) -> String {
        match self {
            Self::Choice(values) => {
                let nth = (u * values.len() as f64) as usize;
                values[nth.min(values.len() - 1)].clone()
            }
            &Self::Int(low, high) => {
                let count = (high - low + 1) as f64;
                (low + (u * count) as i64).min(high).to_string()
            }
            &Self::Uniform(low, high) => rounded(low + u * (high - low), low, high),
            &Self::LogUniform(low, high) => rounded(low * (high / low).powf(u), low, high),
        }
    }

    /// A value near `value`: a number times 0.8 or 1.2, within the bounds; a choice as before, or
    /// drawn again.
    pub(super) fn near(&self, value: &str, random: &mut Rng) -> String {
        let factor = FACTORS[random.below(2) as usize];
        let drawn = random.uniform();
        let again = f64::from(random.uniform());
        let Ok(number) = value.parse::<f64>() else {
            return if drawn < REDRAWN { self.at(again) } else { value.into() };
        };
        let scaled = number * factor;
        match self {
            Self::Choice(_) if drawn < REDRAWN => self.at(again),
            Self::Choice(_) => value.into(),
            &Self::Int(low, high) => {
                // Change whole numbers by at least 1, so that small ones change as well.
                let step = (scaled - number).abs().round().max(1.0).copysign(scaled - number);
                ((number + step) as i64).clamp(low, high).to_string()
            }
            &Self::Uniform(low, high) | &Self::LogUniform(low, high) => rounded(scaled, low, high),
        }
    }
}

/// A number with four significant digits, or the bound that it is beyond.
fn rounded(x: f64, low: f64, high: f64) -> String {
    let rounded = format!("{x:.3e}").parse::<f64>().unwrap_or(x);
    rounded.clamp(low, high).to_string()
}

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Choice(values) => write!(f, "choice:{}", values.join("|")),
            Self::Int(low, high) => write!(f, "int:{low},{high}"),
            Self::Uniform(low, high) => write!(f, "uniform:{low},{high}"),
            Self::LogUniform(low, high) => write!(f, "log_uniform:{low},{high}"),
        }
    }
}

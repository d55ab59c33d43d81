//! Learning rate and optimiser state of parts that are new: the settings and their text forms.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::choice::choice;
use crate::config::text::{BadValue, choose, serde_as_text, unknown};
use crate::config::value::value_as_text;

/// Largest factor of a learning rate.
const FACTOR_MAX: f64 = 1000.0;

/// Learning rates of new parts: features that a layer got, and modules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum GrowthLr {
    /// The rate of old parts.
    #[default]
    Uniform,
    /// `‖W_t‖ / ‖W_0‖` times the rate for the further elements W_t of a parameter W that began with
    /// the elements W_0, from a tenth to ten times (Yuan, Savarese, Maire, "Accelerated Training
    /// via Incrementally Growing Neural Networks", 2023, which has no limits). Modules have the
    /// usual rate.
    Norm,
    /// `factor` times the rate in the first step, falling or rising linearly to the usual rate.
    Age {
        /// Factor in the first step.
        factor: f64,
        /// Steps until the rate is the usual one.
        steps: u32,
    },
}

impl GrowthLr {
    const FORMS: [&'static str; 3] = ["uniform", "norm", "FACTOR:STEPS"];

    /// Factor of the rate of a part that is `age` steps old; 1 unless it depends on the age alone.
    pub(crate) fn of_age(self, age: usize) -> f64 {
        match self {
            Self::Age { factor, steps } => {
                let young = (1.0 - age as f64 / f64::from(steps)).max(0.0);
                1.0 + (factor - 1.0) * young
            }
            Self::Uniform | Self::Norm => 1.0,
        }
    }
}

impl FromStr for GrowthLr {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        match text {
            "uniform" => return Ok(Self::Uniform),
            "norm" => return Ok(Self::Norm),
            _ => {}
        }
        let Some((factor, steps)) = text.split_once(':') else {
            return Err(unknown(text, &Self::FORMS));
        };
        let factor = factor.parse().ok().filter(|f: &f64| (0.0..=FACTOR_MAX).contains(f));
        let steps = steps.parse().ok().filter(|steps| (1..=1_000_000).contains(steps));
        factor.zip(steps).map(|(factor, steps)| Self::Age { factor, steps }).ok_or_else(|| {
            let expected =
                format!("a factor from 0 to {FACTOR_MAX}, a colon, and 1 to 1000000 steps");
            BadValue::new(text, expected)
        })
    }
}

impl fmt::Display for GrowthLr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Norm => f.write_str("norm"),
            Self::Age { factor, steps } => write!(f, "{factor}:{steps}"),
        }
    }
}
serde_as_text!(GrowthLr);
value_as_text!(GrowthLr, GrowthLr::FORMS.join(", "));

/// The state of an env's optimisers when a layer becomes wider.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum GrowthMomentum {
    /// It stays with its parameters; that of new ones is 0.
    #[default]
    Keep,
    /// All of it becomes 0.
    Reset,
}

choice!(GrowthMomentum: "keep" => Keep, "reset" => Reset);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_of_new_parts_round_trip_and_wrong_ones_say_why() {
        for text in ["uniform", "norm", "2:10", "0.1:3"] {
            assert_eq!(text.parse::<GrowthLr>().unwrap().to_string(), text);
        }
        let refused = |text: &str| text.parse::<GrowthLr>().unwrap_err().to_string();
        assert!(refused("unifrom").contains("uniform"));
        for text in ["2:0", "-1:3", "x:3", "2:x", "1e9:2", "NaN:2", ":"] {
            assert!(refused(text).contains("a factor from 0"), "{text}");
        }
    }

    #[test]
    fn the_factor_goes_to_one() {
        let factors = |text: &str| -> Vec<f64> {
            (0..6).map(|age| text.parse::<GrowthLr>().unwrap().of_age(age)).collect()
        };
        assert_eq!(factors("3:4"), [3.0, 2.5, 2.0, 1.5, 1.0, 1.0]);
        assert_eq!(factors("0:2"), [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(factors("uniform"), [1.0; 6]);
        assert_eq!(factors("norm"), [1.0; 6]);
    }
}

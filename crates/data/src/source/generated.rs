//! Options of generated datasets: sizes, noise and difficulty.

use std::fmt::Display;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use crate::error::{Error, Result};

/// Limit of the number of samples of a split.
const SAMPLES_MAX: u32 = 1_000_000;
/// Limit of the number of classes.
const CLASSES_MAX: u32 = 100;

/// A number of an option, compared by its bits.
#[derive(Clone, Copy, Debug)]
pub struct OptionNumber(pub f64);

impl PartialEq for OptionNumber {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for OptionNumber {}

impl Hash for OptionNumber {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

/// Options of a generated dataset. By default every dataset is as its documentation says.
///
/// The text form follows the name of the dataset: `spirals:train=800,noise=2`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Generated {
    /// Seed of the samples: 42.
    pub seed: u64,
    /// Training samples; `None` for the dataset's number.
    pub train: Option<u32>,
    /// Test samples; `None` for the dataset's number.
    pub test: Option<u32>,
    /// Factor of the noise of features, and of the numbers of `friedman`: 1.
    pub noise: OptionNumber,
    /// Share of the training samples whose class is replaced by one drawn from all classes: 0.
    pub label_noise: OptionNumber,
    /// Number of classes of `blobs`, whose centres are then drawn with the seed, and of `spirals`;
    /// `None` for the dataset's classes.
    pub classes: Option<u32>,
    /// Turns of an arm of `spirals`: 1.75.
    pub turns: OptionNumber,
}

impl Default for Generated {
    fn default() -> Self {
        Self {
            seed: 42,
            train: None,
            test: None,
            noise: OptionNumber(1.0),
            label_noise: OptionNumber(0.0),
            classes: None,
            turns: OptionNumber(1.75),
        }
    }
}

impl Generated {
    /// Names of the options.
    pub const OPTIONS: [&str; 7] =
        ["seed", "train", "test", "noise", "label_noise", "classes", "turns"];

    /// Parses the options of a dataset that has the options `known`, such as `train=800,noise=2`.
    ///
    /// # Errors
    /// [`Error::Argument`]: an option that the dataset does not have, or a value outside its range.
    pub fn parse(known: &[&str], text: &str) -> Result<Self> {
        if known.is_empty() {
            let expected = "nothing after the name of a dataset that is not generated";
            return Err(wrong(text, expected.into()));
        }
        let mut options = Self::default();
        for option in text.split(',') {
            let named = option.split_once('=').filter(|(key, _)| known.contains(&key.trim()));
            let Some((key, value)) = named else {
                let known = known.join(", ");
                return Err(wrong(option, format!("OPTION=VALUE with one of {known}")));
            };
            options.set(key.trim(), value.trim())?;
        }
        Ok(options)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let samples = || whole(key, value, 1..=SAMPLES_MAX);
        match key {
            "seed" => self.seed = whole(key, value, 0..=u64::MAX >> 1)?,
            "train" => self.train = Some(samples()?),
            "test" => self.test = Some(samples()?),
            "noise" => self.noise = real(key, value, 0.0, 1000.0)?,
            "label_noise" => self.label_noise = real(key, value, 0.0, 1.0)?,
            "classes" => self.classes = Some(whole(key, value, 2..=CLASSES_MAX)?),
            _ => self.turns = real(key, value, 0.0, 100.0)?,
        }
        Ok(())
    }
}

fn whole<T>(key: &str, value: &str, range: std::ops::RangeInclusive<T>) -> Result<T>
where
    T: FromStr + PartialOrd + Display,
{
    let number = value.parse().ok().filter(|number| range.contains(number));
    let expected = || format!("a whole number from {} to {}", range.start(), range.end());
    number.ok_or_else(|| wrong(format!("{key}={value}"), expected()))
}

fn real(key: &str, value: &str, least: f64, most: f64) -> Result<OptionNumber> {
    let number = value.parse().ok().filter(|number| (least..=most).contains(number));
    let expected = format!("a number from {least} to {most}");
    number.map(OptionNumber).ok_or_else(|| wrong(format!("{key}={value}"), expected))
}

fn wrong(got: impl Display, expected: String) -> Error {
    Error::Argument {
        operation: "dataset",
        argument: "dataset",
        expected,
        got: format!("`{got}`"),
        remedy: "docs/data.md lists the options of generated datasets".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_those_of_the_dataset_and_in_range() {
        let parsed = Generated::parse(&Generated::OPTIONS, "train=800, turns=2.5,seed=7").unwrap();
        let expected = Generated {
            train: Some(800),
            turns: OptionNumber(2.5),
            seed: 7,
            ..Generated::default()
        };
        assert_eq!(parsed, expected);
        for (known, text, words) in [
            (&["seed", "train"][..], "classes=3", "one of seed, train"),
            (&Generated::OPTIONS, "classes=1", "from 2 to 100"),
            (&Generated::OPTIONS, "train=0", "from 1 to"),
            (&Generated::OPTIONS, "noise=-1", "from 0 to 1000"),
            (&Generated::OPTIONS, "noise=NaN", "from 0 to 1000"),
            (&Generated::OPTIONS, "label_noise=1.5", "from 0 to 1"),
            (&Generated::OPTIONS, "", "OPTION=VALUE"),
            (&[], "train=9", "nothing after the name"),
        ] {
            let message = Generated::parse(known, text).unwrap_err().to_string();
            assert!(message.contains(words), "{text}: {message}");
        }
    }
}

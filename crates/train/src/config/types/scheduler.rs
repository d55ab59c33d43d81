//! Rules by which members of a run end early or copy each other: the setting and its text forms.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::config::text::{BadValue, serde_as_text, unknown};
use crate::config::value::value_as_text;

/// Rule by which members end or copy each other. Text form: `none`, or one of the others with its
/// number after a colon, which may be left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Scheduler {
    /// Every member trains all steps.
    #[default]
    None,
    /// Successive halving: one of this many members goes on after each rung.
    Halving(usize),
    /// Several brackets of successive halving with this reduction, side by side.
    Hyperband(usize),
    /// The median stopping rule, after this many steps.
    Median(usize),
    /// A member ends after this many steps without a better score.
    Patience(usize),
    /// Population-based training: after each interval of this many steps the worst members copy the
    /// best.
    Pbt(usize),
}

impl Scheduler {
    const FORMS: [&'static str; 6] =
        ["none", "halving:R", "hyperband:R", "median:STEPS", "patience:STEPS", "pbt:STEPS"];

    /// The keyword of the text form, and the number after it.
    fn parts(self) -> (&'static str, Option<usize>) {
        match self {
            Self::None => ("none", None),
            Self::Halving(reduction) => ("halving", Some(reduction)),
            Self::Hyperband(reduction) => ("hyperband", Some(reduction)),
            Self::Median(steps) => ("median", Some(steps)),
            Self::Patience(steps) => ("patience", Some(steps)),
            Self::Pbt(steps) => ("pbt", Some(steps)),
        }
    }

    /// Whether its decisions depend on the planned number of steps.
    pub(crate) fn looks_ahead(self) -> bool {
        matches!(self, Self::Halving(_) | Self::Hyperband(_))
    }
}

impl FromStr for Scheduler {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let (word, number) = text.split_once(':').map_or((text, None), |(w, n)| (w, Some(n)));
        let (scheduler, usual, least): (fn(usize) -> Self, usize, usize) = match word {
            "none" if number.is_none() => return Ok(Self::None),
            "halving" => (Self::Halving, 3, 2),
            "hyperband" => (Self::Hyperband, 3, 2),
            "median" => (Self::Median, 1, 1),
            "patience" => (Self::Patience, 5, 1),
            "pbt" => (Self::Pbt, 2, 1),
            _ => return Err(unknown(text, &Self::FORMS)),
        };
        let number = number.map_or(Ok(usual), str::parse::<usize>).ok();
        let expected = format!("a whole number from {least} to 1000000 after the colon");
        let number = number.filter(|number| (least..=1_000_000).contains(number));
        number.map(scheduler).ok_or_else(|| BadValue::new(text, expected))
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parts() {
            (word, None) => f.write_str(word),
            (word, Some(number)) => write!(f, "{word}:{number}"),
        }
    }
}
serde_as_text!(Scheduler);
value_as_text!(Scheduler, Scheduler::FORMS.join(", "));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_forms_round_trip_and_have_defaults() {
        for text in ["none", "halving:4", "hyperband:2", "median:3", "patience:1", "pbt:7"] {
            assert_eq!(text.parse::<Scheduler>().unwrap().to_string(), text);
        }
        assert_eq!("halving".parse::<Scheduler>().unwrap(), Scheduler::Halving(3));
    }

    #[test]
    fn wrong_schedulers_say_why() {
        let refused = |text: &str| text.parse::<Scheduler>().unwrap_err().to_string();
        assert!(refused("halfing").contains("halving:R"));
        for text in ["halving:1", "pbt:0", "median:x", "patience:", "hyperband:-3"] {
            assert!(refused(text).contains("a whole number from"), "{text}");
        }
        assert!(refused("none:2").contains("none"), "it has no number");
    }
}

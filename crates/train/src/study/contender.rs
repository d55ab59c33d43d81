//! Contenders of a study.

use std::fmt;
use std::str::FromStr;

use meristem_control::RewardMode;
use serde::{Deserialize, Serialize};

use crate::settings::{BadValue, ControllerKind, choose, serde_as_text, unknown};

/// Prefix of a learning contender's name, before its reward.
const LEARNER: &str = "ppo@";

/// Basis on which a fixed network is compared with the grown one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EqualBudget {
    /// Equal parameters and equal steps.
    Parameters,
    /// Equal parameters, and the number of steps that costs as much as growing did.
    Compute,
}

impl EqualBudget {
    /// The kinds with the prefix of their names, before the other contender.
    const PREFIXES: [(&'static str, Self); 2] =
        [("static@", Self::Parameters), ("static-compute@", Self::Compute)];
}

/// One of the controllers that a study compares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Contender {
    /// A controller that does not learn. Text form: the controller's.
    Controller(ControllerKind),
    /// A new policy for each seed. It learns by PPO for the rounds in the settings, on other hosts,
    /// and is then compared without learning. Text forms: `ppo`, or `ppo@REWARD` with another
    /// reward than in the settings.
    Learner(Option<RewardMode>),
    /// The network that another contender ended with, with the same seed in the same env, trained
    /// from the beginning without a controller. Text forms: `static@CONTENDER`, or
    /// `static-compute@CONTENDER` for equal compute.
    Static(Box<Contender>, EqualBudget),
}

impl Contender {
    /// All text forms, for messages.
    pub const FORMS: [&'static str; 10] = {
        let [heuristic, ppo, policy, greedy, random, fixed, none] = ControllerKind::FORMS;
        let [parameters, compute] = ["static@CONTROLLER", "static-compute@CONTROLLER"];
        [none, random, heuristic, ppo, "ppo@REWARD", policy, greedy, fixed, parameters, compute]
    };

    /// The contender's text form without the file, for the name of its folder.
    pub(super) fn folder_name(&self) -> String {
        let text = self.to_string();
        text.split(':').next().unwrap_or_default().replace('@', "-")
    }
}

impl FromStr for Contender {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        if let Some(name) = text.strip_prefix(LEARNER) {
            return Ok(Self::Learner(Some(choose(name, &RewardMode::NAMES)?)));
        }
        for (prefix, equal) in EqualBudget::PREFIXES {
            if let Some(other) = text.strip_prefix(prefix) {
                return match other.parse()? {
                    Self::Static(..) => Err(BadValue::new(text, "a controller after the @")),
                    other => Ok(Self::Static(Box::new(other), equal)),
                };
            }
        }
        match text.parse() {
            Ok(ControllerKind::Ppo) => Ok(Self::Learner(None)),
            Ok(controller) => Ok(Self::Controller(controller)),
            // If the file is missing, report that.
            Err(error) if text.ends_with(':') => Err(error),
            Err(_) => Err(unknown(text, &Self::FORMS)),
        }
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Controller(controller) => controller.fmt(f),
            Self::Learner(None) => ControllerKind::Ppo.fmt(f),
            Self::Learner(Some(mode)) => write!(f, "{LEARNER}{}", mode.name()),
            Self::Static(other, equal) => {
                write!(f, "{}{other}", EqualBudget::PREFIXES[*equal as usize].0)
            }
        }
    }
}
serde_as_text!(Contender);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_forms_round_trip() {
        let growing = ["none", "random", "heuristic", "ppo:a", "greedy:a", "fixed:a", "ppo"];
        let others = ["ppo@sparse", "static@heuristic", "static-compute@ppo@sparse"];
        for text in growing.into_iter().chain(others) {
            assert_eq!(text.parse::<Contender>().unwrap().to_string(), text);
        }
        assert!("ppo@spares".parse::<Contender>().unwrap_err().to_string().contains("`sparse`?"));
        let refused = |text: &str| text.parse::<Contender>().unwrap_err().to_string();
        assert!(refused("nobody").contains("ppo@REWARD"));
        assert!(refused("heuristics").contains("mean `heuristic`?"));
        assert!(refused("greedy:").contains("a file after the colon"));
        assert_eq!("ppo@sparse".parse::<Contender>().unwrap().folder_name(), "ppo-sparse");
        assert!(refused("static@").contains("static@CONTROLLER"));
        assert!(refused("static@static@none").contains("a controller after the @"));
        assert_eq!("fixed:a/b".parse::<Contender>().unwrap().folder_name(), "fixed");
        assert_eq!("static@fixed:a/b".parse::<Contender>().unwrap().folder_name(), "static-fixed");
    }
}

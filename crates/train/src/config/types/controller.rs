//! Kinds of controllers: the setting and its text forms.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::config::text::{BadValue, serde_as_text, unknown};
use crate::config::types::PolicyStart;
use crate::config::value::value_as_text;

/// Controller that decides where and when a host grows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ControllerKind {
    /// The rules in `docs/control.md`.
    #[default]
    Heuristic,
    /// A policy that learns by PPO from round to round.
    Ppo,
    /// A policy from a file that samples its actions and does not learn. Text form: `ppo:FILE`;
    /// `ppo:general` and `ppo:shipped` are policies that come with the program.
    Policy(PathBuf),
    /// A policy from a file that takes the most probable action and does not learn. Text form:
    /// `greedy:FILE`; `greedy:general` and `greedy:shipped` are policies that come with the
    /// program.
    Greedy(PathBuf),
    /// A uniformly random legal action.
    Random,
    /// A script of actions from a file, the same in every episode. Text form: `fixed:FILE`.
    Fixed(PathBuf),
    /// No controller: hosts are trained and do not grow.
    None,
    /// A controller that a program passes to [`run_with`](crate::run_with). The command line does
    /// not accept it.
    External,
}

impl ControllerKind {
    /// Whether its decisions about an env depend on the other envs: a policy decides about all at
    /// once, and a program may.
    pub(crate) fn sees_all_envs(&self) -> bool {
        self.is_policy() || *self == Self::External
    }

    /// Whether a policy decides, which has memory for a fixed number of envs.
    pub(crate) fn is_policy(&self) -> bool {
        matches!(self, Self::Ppo | Self::Policy(_) | Self::Greedy(_))
    }

    /// All text forms of the command line, for messages.
    pub(crate) const FORMS: [&'static str; 7] =
        ["heuristic", "ppo", "ppo:FILE", "greedy:FILE", "random", "fixed:FILE", "none"];

    /// The controllers without a file.
    const PLAIN: [Self; 5] = [Self::Heuristic, Self::Ppo, Self::Random, Self::None, Self::External];

    /// The controllers with a file.
    const WITH_FILE: [fn(PathBuf) -> Self; 3] = [Self::Policy, Self::Greedy, Self::Fixed];

    /// The path of its file, if it has one; a policy that comes with the program has none.
    pub(crate) fn path_mut(&mut self) -> Option<&mut PathBuf> {
        match self {
            Self::Policy(path) | Self::Greedy(path)
                if matches!(PolicyStart::named(path), PolicyStart::BuiltIn(_)) =>
            {
                None
            }
            Self::Policy(path) | Self::Greedy(path) | Self::Fixed(path) => Some(path),
            Self::Heuristic | Self::Ppo | Self::Random | Self::None | Self::External => None,
        }
    }

    /// The keyword of the text form, and the path after it.
    fn parts(&self) -> (&'static str, Option<&Path>) {
        match self {
            Self::Heuristic => ("heuristic", None),
            Self::Ppo => ("ppo", None),
            Self::Policy(path) => ("ppo", Some(path)),
            Self::Greedy(path) => ("greedy", Some(path)),
            Self::Random => ("random", None),
            Self::Fixed(path) => ("fixed", Some(path)),
            Self::None => ("none", None),
            Self::External => ("external", None),
        }
    }
}

impl FromStr for ControllerKind {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        let (word, path) = text.split_once(':').map_or((text, None), |(w, path)| (w, Some(path)));
        let named = match path {
            None => Self::PLAIN.into_iter().find(|kind| kind.parts().0 == word),
            Some(path) => {
                let mut kinds = Self::WITH_FILE.into_iter().map(|with| with(path.into()));
                kinds.find(|kind| kind.parts().0 == word)
            }
        };
        match (named, path) {
            (Some(_), Some("")) => Err(BadValue::new(text, "the path of a file after the colon")),
            (Some(kind), _) => Ok(kind),
            (None, _) => Err(unknown(text, &Self::FORMS)),
        }
    }
}

impl fmt::Display for ControllerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parts() {
            (word, None) => f.write_str(word),
            (word, Some(path)) => write!(f, "{word}:{}", path.display()),
        }
    }
}
serde_as_text!(ControllerKind);
value_as_text!(ControllerKind, ControllerKind::FORMS.join(", "));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_forms_round_trip() {
        for text in [
            "heuristic",
            "ppo",
            "ppo:a,b:c.st",
            "greedy:p",
            "random",
            "fixed:x",
            "none",
            "external",
        ] {
            assert_eq!(text.parse::<ControllerKind>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_no_controller_is_called_is_answered_with_what_there_is() {
        let refused = |text: &str| text.parse::<ControllerKind>().unwrap_err().to_string();
        let message = refused("heuristics");
        assert!(message.contains("ppo:FILE") && message.contains("mean `heuristic`?"), "{message}");
        for bare in ["fixed:", "ppo:", "greedy:"] {
            assert!(refused(bare).contains("a file after the colon"));
        }
        assert!(refused("greedy").contains("greedy:FILE"));
        assert!(refused("random:x").contains("one of"));
    }
}

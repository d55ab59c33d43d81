//! The policy that a run starts from: the setting and its text forms.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::config::text::{BadValue, serde_as_text};
use crate::config::value::value_as_text;

/// Description of the accepted values.
const KIND: &str = "general, shipped, none, or the path of a policy file";

/// A policy that comes with the program. Its training is described in
/// `crates/train/policies/README.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuiltInPolicy {
    /// A policy of the form `set` for any host, which learned from many tasks. Text form:
    /// `general`.
    General,
    /// A policy of the form `vector` for hosts with three slots and the standard blueprints, which
    /// imitates the heuristic. Text form: `shipped`.
    Shipped,
}

impl BuiltInPolicy {
    const ALL: [Self; 2] = [Self::General, Self::Shipped];

    /// Text form, in every setting that names a policy.
    pub fn name(self) -> &'static str {
        match self {
            Self::General => "general",
            Self::Shipped => "shipped",
        }
    }

    /// The bytes of its safetensors file.
    pub(crate) fn file(self) -> &'static [u8] {
        match self {
            Self::General => include_bytes!("../../../policies/general.safetensors"),
            Self::Shipped => include_bytes!("../../../policies/shipped.safetensors"),
        }
    }
}

/// Policy that a run starts from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PolicyStart {
    /// A new policy. Text form: `none`.
    New,
    /// A policy that comes with the program. Text form: its name.
    BuiltIn(BuiltInPolicy),
    /// The policy in a file. Text form: the path.
    File(PathBuf),
}

impl PolicyStart {
    /// The policy that a controller such as `greedy:FILE` names.
    pub(crate) fn named(file: &Path) -> Self {
        let known = BuiltInPolicy::ALL.into_iter().find(|one| file == Path::new(one.name()));
        known.map_or_else(|| Self::File(file.into()), Self::BuiltIn)
    }
}

impl FromStr for PolicyStart {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        match text {
            "" => Err(BadValue::new(text, KIND)),
            "none" => Ok(Self::New),
            file => Ok(Self::named(Path::new(file))),
        }
    }
}

impl fmt::Display for PolicyStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::New => f.write_str("none"),
            Self::BuiltIn(policy) => f.write_str(policy.name()),
            Self::File(path) => path.display().fmt(f),
        }
    }
}
serde_as_text!(PolicyStart);
value_as_text!(PolicyStart, KIND);

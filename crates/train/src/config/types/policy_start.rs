//! The policy that a run starts from: the setting and its text forms.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::config::text::{BadValue, serde_as_text};
use crate::config::value::value_as_text;

/// Text form of the policy that comes with the program, in every setting that names a policy.
const SHIPPED: &str = "shipped";

/// Description of the accepted values.
const KIND: &str = "shipped, none, or the path of a policy file";

/// Policy that a run starts from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PolicyStart {
    /// A new policy. Text form: `none`.
    New,
    /// The policy that comes with the program. Text form: `shipped`.
    Shipped,
    /// The policy in a file. Text form: the path.
    File(PathBuf),
}

impl PolicyStart {
    /// The policy that a controller such as `greedy:FILE` names.
    pub(crate) fn named(file: &Path) -> Self {
        if file == Path::new(SHIPPED) { Self::Shipped } else { Self::File(file.into()) }
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
            Self::Shipped => f.write_str(SHIPPED),
            Self::File(path) => path.display().fmt(f),
        }
    }
}
serde_as_text!(PolicyStart);
value_as_text!(PolicyStart, KIND);

//! The sources of blueprints: the setting and its text forms.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::config::text::{BadValue, serde_as_text};
use crate::config::value::{FlagForm, SettingValue};

/// Text forms of the blueprints that come with the program.
const STANDARD: &str = "standard";
const VECTORS: &str = "vectors";

/// A source of blueprints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum BlueprintSource {
    /// The seven blueprints that come with the program. Text form: `standard`.
    Standard,
    /// The blueprints for slots of vectors. Text form: `vectors`.
    Vectors,
    /// The blueprints in a TOML or JSON file. Text form: the path.
    File(PathBuf),
}

impl BlueprintSource {
    /// The path of a file.
    pub(crate) fn path_mut(&mut self) -> Option<&mut PathBuf> {
        match self {
            Self::Standard | Self::Vectors => None,
            Self::File(path) => Some(path),
        }
    }
}

impl FromStr for BlueprintSource {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        match text {
            "" => {
                Err(BadValue::new(text, "standard, vectors, or the path of a file of blueprints"))
            }
            STANDARD => Ok(Self::Standard),
            VECTORS => Ok(Self::Vectors),
            file => Ok(Self::File(file.into())),
        }
    }
}

impl fmt::Display for BlueprintSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Standard => f.write_str(STANDARD),
            Self::Vectors => f.write_str(VECTORS),
            Self::File(path) => path.display().fmt(f),
        }
    }
}
serde_as_text!(BlueprintSource);

impl SettingValue for Vec<BlueprintSource> {
    const FORM: FlagForm = FlagForm::List;

    fn kind() -> String {
        "list of standard, vectors and paths of files of blueprints".into()
    }
    fn parse(text: &str) -> Result<Self, BadValue> {
        text.split(',').map(str::parse).collect()
    }
    fn text(&self) -> String {
        self.iter().map(BlueprintSource::to_string).collect::<Vec<_>>().join(",")
    }
}

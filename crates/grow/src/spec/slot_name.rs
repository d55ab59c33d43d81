//! Names of slots.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Name of a slot in its host, such as `r0c1`. Clones share the text.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct SlotName(Arc<str>);

impl SlotName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SlotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&str> for SlotName {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<String> for SlotName {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

impl From<SlotName> for String {
    fn from(name: SlotName) -> Self {
        name.to_string()
    }
}

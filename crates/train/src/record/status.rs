//! Ways in which a run ends.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Way in which a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// All rounds were completed.
    Completed,
    /// The run was asked to stop and ended at a step boundary.
    Interrupted,
    /// The run ended with an error.
    Failed,
}

impl Status {
    /// Name in the file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Interrupted => "interrupted",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

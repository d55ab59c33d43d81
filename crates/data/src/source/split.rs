//! Splits of a dataset.

use std::fmt;

use serde::Serialize;

/// A split of a dataset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Split {
    /// Samples for training.
    Train,
    /// Samples for the final report only.
    Test,
}

impl Split {
    /// Both splits.
    pub const ALL: [Self; 2] = [Self::Train, Self::Test];

    /// The name: `train` or `test`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Test => "test",
        }
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

//! Shape of a host's images and classes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Input and output of a host: the shape of its images and its number of classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskShape {
    /// Image channels.
    pub channels: usize,
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
    /// Classes.
    pub classes: usize,
}

impl fmt::Display for TaskShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}×{}×{}", self.channels, self.height, self.width)
    }
}

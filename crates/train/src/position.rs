//! Position of a step in a run.

use serde::{Deserialize, Serialize};

/// A step of a round, both counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct StepPosition {
    pub(crate) round: usize,
    pub(crate) step: usize,
}

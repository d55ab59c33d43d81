//! Part of the dataset that an env has, in events and in the summary.

use serde::{Deserialize, Serialize};

/// Part of the dataset that an env has, if envs have different parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartSummary {
    /// Number of the fold that the env holds out as its control split, from 0; omitted without
    /// folds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fold: Option<usize>,
    /// Samples that the env trains on; with bootstrap a sample counts as often as it was drawn.
    pub train_samples: usize,
    /// Samples in the env's control split.
    pub control_samples: usize,
}

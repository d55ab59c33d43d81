//! Results of envs and rounds.

use std::path::PathBuf;

use meristem_control::RoundReport;
use meristem_grow::Stage;
use serde::{Deserialize, Serialize};

use crate::record::null_as_nan;
use crate::record::part::PartSummary;
use crate::record::recorded::Recorded;
use crate::statistics::Spread;
use crate::sweep::EndReason;

/// Results of one env at the end of an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EnvSummary {
    /// Number of the env.
    pub env: usize,
    /// Settings of the env's member, such as `lr=0.1; host=baseline`; absent if all envs have the
    /// settings of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<String>,
    /// Number of the env's member; omitted for a run without members, and in older summaries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member_number: Option<usize>,
    /// Steps that the env was trained; omitted for a run without members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<usize>,
    /// The reason for which its member ended before its last step: `rung`, `median`, `patience`,
    /// `diverged`, `planned` or `stopped`; omitted if it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Recorded<EndReason>>,
    /// Part of the dataset that the env has; omitted if all envs have the same samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<PartSummary>,
    /// Mean training loss over the last step; null if it was not finite and the env was rolled
    /// back.
    #[serde(deserialize_with = "null_as_nan")]
    pub train_loss: f64,
    /// Training score over the last step.
    #[serde(
        rename = "train_accuracy",
        alias = "train_f1",
        alias = "train_r2",
        deserialize_with = "null_as_nan"
    )]
    pub train_score: f64,
    /// Control loss; null without a control split.
    pub control_loss: Option<f64>,
    /// Control score; null without a control split.
    #[serde(rename = "control_accuracy", alias = "control_f1", alias = "control_r2")]
    pub control_score: Option<f64>,
    /// Test loss; null without a test split, and if it is not finite.
    pub test_loss: Option<f64>,
    /// Test score; null without a test split.
    #[serde(rename = "test_accuracy", alias = "test_f1", alias = "test_r2")]
    pub test_score: Option<f64>,
    /// Trained parameters of the host with its modules.
    pub parameters: usize,
    /// Trained parameters of the host without modules.
    pub host_parameters: usize,
    /// Trained parameters of the modules that are part of the network.
    pub grown_parameters: usize,
    /// Floating-point operations of training in the episode, counted as in
    /// [`Summary::training_flops`](super::Summary::training_flops); 0 in older summaries.
    #[serde(default)]
    pub training_flops: u64,
    /// Results of the bare twin, if the run trained one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub twin: Option<TwinSummary>,
    /// Modules in the network: fossilized ones and live ones.
    pub modules: Vec<ModuleSummary>,
    /// Counts of modules germinated, pruned and fossilized in the episode.
    pub history: ModuleCounts,
    /// Rollbacks of the env in the episode.
    #[serde(default)]
    pub rollbacks: usize,
    /// Path of the weights file, relative to the run folder.
    pub weights: PathBuf,
}

/// Use of the places of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlacesSummary {
    /// Number of places.
    pub count: usize,
    /// Share of the places with a member in training, as the mean over all steps.
    pub busy: f64,
}

/// Scores of the held-out folds over all envs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FoldSummary {
    /// Number of folds.
    pub count: usize,
    /// Mean of the control scores.
    #[serde(
        rename = "control_accuracy_mean",
        alias = "control_f1_mean",
        alias = "control_r2_mean",
        deserialize_with = "null_as_nan"
    )]
    pub control_score_mean: f64,
    /// Standard deviation of the control scores, with n − 1 in the denominator.
    #[serde(
        rename = "control_accuracy_std",
        alias = "control_f1_std",
        alias = "control_r2_std",
        deserialize_with = "null_as_nan"
    )]
    pub control_score_std: f64,
}

impl FoldSummary {
    /// Scores of `count` folds; `None` if fewer than two envs were measured.
    pub(crate) fn of(count: usize, envs: &[EnvSummary]) -> Option<Self> {
        let scores: Vec<f64> = envs.iter().filter_map(|env| env.control_score).collect();
        let Spread { mean: control_score_mean, std, .. } = Spread::from_values(&scores)?;
        Some(Self { count, control_score_mean, control_score_std: std? })
    }
}

/// Results of the twin of an env at the end of an episode. The twin is the same host without
/// growth, trained on the same batches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TwinSummary {
    /// Control loss; loss and score are null without a control split. All four are null if the
    /// twin diverged.
    pub control_loss: Option<f64>,
    /// Control score.
    #[serde(rename = "control_accuracy", alias = "control_f1", alias = "control_r2")]
    pub control_score: Option<f64>,
    /// Test loss; loss and score are null without a test split.
    pub test_loss: Option<f64>,
    /// Test score.
    #[serde(rename = "test_accuracy", alias = "test_f1", alias = "test_r2")]
    pub test_score: Option<f64>,
    /// Trained parameters.
    pub parameters: usize,
    /// Floating-point operations of training in the episode.
    pub training_flops: u64,
}

/// State of a module at the end of an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleSummary {
    /// Name of the slot.
    pub slot: String,
    /// Name of the blueprint.
    pub blueprint: String,
    /// Stage.
    pub stage: Recorded<Stage>,
    /// Blending factor.
    pub alpha: f64,
    /// Trained parameters.
    pub parameters: usize,
    /// Control score with the module minus without it, in percentage points; null for a module
    /// that does not affect the output yet, and where it was not measured.
    pub contribution: Option<f64>,
}

/// Number of modules germinated, pruned and fossilized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModuleCounts {
    /// Germinated.
    pub germinated: usize,
    /// Pruned.
    pub pruned: usize,
    /// Fossilized.
    pub fossilized: usize,
}

/// Results of one round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoundSummary {
    /// Number of the round.
    pub round: usize,
    /// Steps of its episodes.
    pub steps: usize,
    /// Control score of each env.
    #[serde(rename = "control_accuracy", alias = "control_f1", alias = "control_r2")]
    pub control_score: Vec<Option<f64>>,
    /// Test score of each env; null without a test split.
    #[serde(rename = "test_accuracy", alias = "test_f1", alias = "test_r2")]
    pub test_score: Vec<Option<f64>>,
    /// Trained parameters of each env, host and modules.
    pub parameters: Vec<usize>,
    /// Report of the policy on its actions and its update. Absent without a learning policy, and
    /// for a round that was cut short.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<RoundReport>,
}

//! Results of an env after a step.

use meristem_control::RewardTerms;
use meristem_grow::Stage;
use serde::{Deserialize, Serialize};

use crate::record::null_as_nan;
use crate::record::recorded::Recorded;

/// Results of one env after one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepCompleted {
    /// Number of the env.
    pub env: usize,
    /// Number of the round.
    pub round: usize,
    /// Number of the step.
    pub step: usize,
    /// Mean training loss over the step; each batch is measured before its update.
    #[serde(deserialize_with = "null_as_nan")]
    pub train_loss: f64,
    /// Training score over the step; each batch is measured before its update.
    #[serde(
        rename = "train_accuracy",
        alias = "train_f1",
        alias = "train_r2",
        deserialize_with = "null_as_nan"
    )]
    pub train_score: f64,
    /// Control loss; null without a control split.
    pub control_loss: Option<f64>,
    /// Control score; null without a control split. If the env was rolled back in this step,
    /// loss and score belong to the restored host.
    #[serde(rename = "control_accuracy", alias = "control_f1", alias = "control_r2")]
    pub control_score: Option<f64>,
    /// Mean L2 norm of the host's gradient before clipping; null in steps that
    /// `gradient_stats_every` skips.
    pub host_gradient_norm: Option<f64>,
    /// Trained parameters of the host without modules.
    pub host_parameters: usize,
    /// Trained parameters of the modules.
    pub grown_parameters: usize,
    /// Slots that are not dormant.
    pub slots: Vec<SlotState>,
    /// Action of the controller, in words; it takes effect in the next step.
    pub action: String,
    /// Terms of the action's reward, which is their sum.
    pub reward: RewardTerms,
    /// Seconds from the start of the step until the metrics of all envs are read; null in steps
    /// that `time_every` skips.
    pub step_seconds: Option<f64>,
    /// Images per second of `step_seconds` that all envs and their twins trained; null in the same
    /// steps.
    #[serde(alias = "images_per_second")]
    pub images_per_s: Option<f64>,
    /// Seconds by phase, in the same steps; only with `telemetry` full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phases: Option<PhaseSeconds>,
    /// Gradient statistics of the host and of each module, in steps with `host_gradient_norm`; only
    /// with `telemetry` full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradients: Option<Vec<GradientStatistics>>,
    /// Fingerprint of weights, statistics and, except with exchange `diloco`, optimiser after the
    /// step, if several ranks train the host. It is equal on all ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// Results of the bare twin, if the run trains one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub twin: Option<TwinStep>,
}

/// Results of the twin of an env after one step. The twin is the same host without growth, trained
/// on the same batches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TwinStep {
    /// Mean training loss over the step; each batch is measured before its update. All three
    /// results are null from the step on in which the twin diverged.
    pub train_loss: Option<f64>,
    /// Control loss; null without a control split.
    pub control_loss: Option<f64>,
    /// Control score; null without a control split.
    #[serde(rename = "control_accuracy", alias = "control_f1", alias = "control_r2")]
    pub control_score: Option<f64>,
}

/// Seconds that the host thread spent in each phase of a step, for the envs of one process.
/// Training is enqueued and runs later, so the devices' remaining work is part of `measure`. A
/// trace has the devices' own times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PhaseSeconds {
    /// Updating networks after growth: plans, memory.
    pub open: f64,
    /// Enqueuing all batches of the epoch.
    pub train: f64,
    /// Enqueuing the control split, then waiting for the metrics of all envs.
    pub measure: f64,
    /// Rolling back failed envs and executing the controller's actions.
    pub decide: f64,
}

/// Gradient statistics of one parameter group over a step, before clipping.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradientStatistics {
    /// Name of the group: `host`, or the slot of a module.
    pub group: String,
    /// Mean L2 norm over the batches.
    pub norm: Option<f64>,
    /// L2 norm in the last batch; null if it is not finite.
    pub last_norm: Option<f64>,
    /// Share of gradient tensors, over all batches, with a norm below 1e-7.
    pub vanishing: Option<f64>,
    /// Share of gradient tensors, over all batches, with a norm above 10 or not finite.
    pub exploding: Option<f64>,
}

/// State of a slot that is not dormant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlotState {
    /// Name of the slot.
    pub slot: String,
    /// Stage.
    pub stage: Recorded<Stage>,
    /// Name of the blueprint, while the slot has a module.
    pub blueprint: Option<String>,
    /// Blending factor.
    pub alpha: f64,
    /// Contribution of the module in this step; null if it was not measured.
    pub contribution: Option<f64>,
    /// Gradient health of the module in this step, 0..1; null in steps without
    /// `host_gradient_norm`. Gates and policies use it in every step.
    pub gradient_health: Option<f64>,
}

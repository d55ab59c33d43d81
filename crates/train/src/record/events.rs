//! Events of a run: the lines of `events.jsonl`, one JSON object each. `docs/run-folder.md`
//! describes them.
//!
//! Every line has `v` ([`SCHEMA_VERSION`]), `seq` (counted from 0; a gap means dropped events),
//! `seconds` since the run started, and `event`, the name of a variant of [`Event`] in snake case;
//! the variant's fields follow. Envs, rounds, steps and batches count from 0. Accuracies are shares
//! 0..1, losses mean cross-entropy in nats, contributions percentage points of control accuracy. A
//! number that is not finite, was not measured, or is left out by `telemetry` is `null`. Readers
//! must skip unknown events and fields, and keep the text of an unknown stage, style, status, host,
//! controller, device or instruction set ([`Recorded`]); a change of meaning raises the version.

mod counterfactuals;

use meristem_control::{RewardTerms, RoundReport, TrainingFailure};
use meristem_data::order::EpochMode;
use meristem_device::DeviceId;
use meristem_grow::{Stage, Style};
use meristem_nn::Precision;
use serde::{Deserialize, Serialize};

pub use self::counterfactuals::{
    CounterfactualCost, Counterfactuals, ModuleOff, ModulePair, ModulesOn,
};

use crate::config::types::{Normalize, PolicyStart};
use crate::record::null_as_nan;
pub use crate::record::recorded::Recorded;
use crate::record::status::Status;

/// Version of the format of the lines.
pub const SCHEMA_VERSION: u32 = 2;

/// A line of `events.jsonl`.
#[derive(Debug, Serialize)]
pub struct Record<'a> {
    /// [`SCHEMA_VERSION`].
    pub v: u32,
    /// Number of the event in its run.
    pub seq: u64,
    /// Seconds since the run started.
    pub seconds: f64,
    /// The event.
    #[serde(flatten)]
    pub event: &'a Event,
}

/// Extension of a run to more steps or rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extension {
    /// Round of the first step after it.
    pub round: usize,
    /// The first step after it.
    pub step: usize,
    /// Steps per round from there on.
    pub steps: usize,
    /// Rounds of the extended run.
    pub rounds: usize,
}

/// An event of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// The run starts; the first event of a file.
    RunStarted(RunStarted),
    /// The run was extended on resume, and goes on.
    RunExtended(Extension),
    /// A round starts, with fresh hosts.
    RoundStarted {
        /// Number of the round.
        round: usize,
    },
    /// A batch of one env was trained. Written with `log_batches`.
    BatchCompleted {
        /// Number of the env.
        env: usize,
        /// Number of the round.
        round: usize,
        /// Number of the step.
        step: usize,
        /// Number of the batch in the step.
        batch: usize,
        /// Mean loss before the update.
        #[serde(deserialize_with = "null_as_nan")]
        loss: f64,
    },
    /// One env was trained and evaluated for one step.
    StepCompleted(StepCompleted),
    /// A module was planted in a dormant slot.
    ModuleGerminated {
        /// Number of the env.
        env: usize,
        /// Number of the round.
        round: usize,
        /// Step after which it was planted.
        step: usize,
        /// Name of the slot, such as `r0c1`.
        slot: String,
        /// Name of the blueprint.
        blueprint: String,
        /// Style of blending.
        style: Recorded<Style>,
        /// Trained parameters of the module.
        parameters: usize,
    },
    /// A slot changed its stage.
    StageChanged {
        /// Number of the env.
        env: usize,
        /// Number of the round.
        round: usize,
        /// Number of the step.
        step: usize,
        /// Name of the slot.
        slot: String,
        /// Old stage.
        from: Recorded<Stage>,
        /// New stage.
        to: Recorded<Stage>,
    },
    /// A gate was evaluated.
    GateEvaluated {
        /// Number of the env.
        env: usize,
        /// Number of the round.
        round: usize,
        /// Number of the step.
        step: usize,
        /// Name of the slot.
        slot: String,
        /// Stage that the gate leads to.
        target: Recorded<Stage>,
        /// Whether the module passed.
        passed: bool,
        /// Conditions that failed, in words; empty if it passed.
        reasons: Vec<String>,
    },
    /// A module was removed.
    ModulePruned {
        /// Number of the env.
        env: usize,
        /// Number of the round.
        round: usize,
        /// Number of the step.
        step: usize,
        /// Name of the slot.
        slot: String,
        /// Name of the blueprint.
        blueprint: String,
        /// Last contribution of the module.
        contribution: Option<f64>,
    },
    /// A module became a permanent part of its host.
    ModuleFossilized {
        /// Number of the env.
        env: usize,
        /// Number of the round.
        round: usize,
        /// Number of the step.
        step: usize,
        /// Name of the slot.
        slot: String,
        /// Name of the blueprint.
        blueprint: String,
        /// Last contribution of the module.
        contribution: Option<f64>,
    },
    /// Contributions of an env's live modules.
    Counterfactuals(Counterfactuals),
    /// A checkpoint follows; it covers the events up to this one.
    CheckpointWritten {
        /// Round of the next step.
        round: usize,
        /// Number of the next step.
        step: usize,
    },
    /// A policy learned from a round.
    PolicyUpdated {
        /// Number of the round.
        round: usize,
        /// Returns, entropy of each action head in their order, KL divergence and more.
        #[serde(flatten)]
        report: RoundReport,
    },
    /// An env failed and was restored from its snapshot before the action of this step. Events for
    /// pruned modules follow.
    GovernorRollback {
        /// Number of the env.
        env: usize,
        /// Number of the round.
        round: usize,
        /// Step that failed.
        step: usize,
        /// `not_finite`, `collapse` or `spike`.
        failure: TrainingFailure,
        /// Mean training loss of the step.
        #[serde(deserialize_with = "null_as_nan")]
        train_loss: f64,
        /// Control loss after the step.
        control_loss: Option<f64>,
        /// Step after which the snapshot was taken; null if that was before the first step.
        restored_step: Option<usize>,
        /// Slots whose live modules were removed.
        pruned: Vec<String>,
        /// Penalty added to the reward of the action blamed for the failure; 0 if there is none.
        penalty: f64,
        /// Step of that action: the last one in the trajectory that changed the network, else the
        /// one before this step. Null in the first step of an episode.
        cause_step: Option<usize>,
    },
    /// An anomaly: an env failed again and again.
    Anomaly {
        /// Number of the env.
        env: usize,
        /// Number of the round.
        round: usize,
        /// Number of the step.
        step: usize,
        /// Description.
        what: String,
    },
    /// An env completed its episode and was evaluated on the test split.
    EpisodeEnded {
        /// Number of the env.
        env: usize,
        /// Number of the round.
        round: usize,
        /// Control accuracy.
        control_accuracy: Option<f64>,
        /// Test accuracy; null without a test split.
        test_accuracy: Option<f64>,
        /// Test loss; null without a test split.
        test_loss: Option<f64>,
        /// Trained parameters of the host without modules.
        host_parameters: usize,
        /// Trained parameters of the modules.
        grown_parameters: usize,
    },
    /// The run ends; the last event of a file, unless the process was killed.
    RunEnded {
        /// Way in which the run ended.
        status: Recorded<Status>,
        /// Error of a failed run.
        error: Option<String>,
        /// Steps of all rounds.
        steps: u64,
        /// Images trained, over all envs and rounds.
        images: u64,
        /// Seconds since the run started, including loading.
        wall_seconds: f64,
    },
    /// An event of a later version. It is read, never written.
    #[serde(other, skip_serializing)]
    Unknown,
}

/// Description of a run at its start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunStarted {
    /// Version of meristem.
    #[serde(alias = "version")]
    pub program_version: String,
    /// Name of the dataset.
    pub dataset: String,
    /// Constants that normalise pixels; omitted if they are computed from the training images.
    #[serde(default, skip_serializing_if = "is_data")]
    pub normalize: Normalize,
    /// Samples in the training split, without the control split.
    pub train_samples: usize,
    /// Samples in the control split.
    pub control_samples: usize,
    /// Samples in the test split; null without one.
    pub test_samples: Option<usize>,
    /// Host description.
    pub host: String,
    /// Trained parameters of the host without modules.
    pub host_parameters: usize,
    /// Number of envs.
    pub envs: usize,
    /// Number of rounds.
    pub rounds: usize,
    /// Steps per episode.
    pub steps: usize,
    /// Batches per env and step.
    pub batches: usize,
    /// Share of the training samples that an env gets in a step; `dealt` in runs from before there
    /// was a choice.
    #[serde(default = "dealt")]
    pub epoch: EpochMode,
    /// Least and most images that an env is trained on in a step.
    #[serde(default)]
    pub images_per_step: [usize; 2],
    /// Controller setting.
    pub controller: String,
    /// Policy that a controller which learns starts from; omitted with others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyStart>,
    /// Instruction set of the kernels.
    pub instruction_set: String,
    /// Devices of the envs; omitted if it is only `cpu`.
    #[serde(default = "one_cpu", skip_serializing_if = "is_one_cpu")]
    pub devices: Vec<String>,
    /// Precision of the hosts' products; omitted if it is f32.
    #[serde(default, skip_serializing_if = "is_f32")]
    pub precision: Precision,
    /// Worker threads of each device.
    pub threads: usize,
    /// Ranks that learn a policy or train a host together.
    pub ranks: usize,
    /// Gradient exchange between the ranks.
    pub exchange: String,
    /// Seed of the run.
    pub seed: u64,
}

fn dealt() -> EpochMode {
    EpochMode::Dealt
}

fn is_data(normalize: &Normalize) -> bool {
    *normalize == Normalize::Data
}

fn one_cpu() -> Vec<String> {
    vec![DeviceId::Cpu(0).to_string()]
}

fn is_one_cpu(devices: &Vec<String>) -> bool {
    *devices == one_cpu()
}

fn is_f32(precision: &Precision) -> bool {
    *precision == Precision::F32
}

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
    /// Training accuracy over the step; each batch is measured before its update.
    pub train_accuracy: f64,
    /// Control loss; null without a control split.
    pub control_loss: Option<f64>,
    /// Control accuracy; null without a control split. If the env was rolled back in this step,
    /// both are of the restored host.
    pub control_accuracy: Option<f64>,
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
    /// Seconds that the step took, for all envs together; null in steps that `time_every` skips.
    pub step_seconds: Option<f64>,
    /// Training images per second of `step_seconds`, for all envs together; null in the same steps.
    #[serde(alias = "images_per_second")]
    pub images_per_s: Option<f64>,
    /// Seconds by phase, in the same steps; only with `telemetry` full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phases: Option<PhaseSeconds>,
    /// Gradient statistics of the host and of each module, in steps with `host_gradient_norm`; only
    /// with `telemetry` full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradients: Option<Vec<GradientStatistics>>,
    /// Fingerprint of weights, statistics and optimiser after the step, if several ranks train the
    /// host. It is equal on all ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// Results of the bare twin, if the run trains one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub twin: Option<TwinStep>,
}

/// Results of an env's twin after one step: of the same host without growth, trained on the same
/// batches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TwinStep {
    /// Mean training loss over the step; each batch is measured before its update. Null from the
    /// step on in which the twin diverged, as are the others.
    pub train_loss: Option<f64>,
    /// Control loss; null without a control split.
    pub control_loss: Option<f64>,
    /// Control accuracy; null without a control split.
    pub control_accuracy: Option<f64>,
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
    /// Last contribution of the module.
    pub contribution: Option<f64>,
    /// Gradient health of the module in this step, 0..1; null in steps without
    /// `host_gradient_norm`. Gates and policies see it in every step.
    pub gradient_health: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_documented_form() {
        let event = Event::StageChanged {
            env: 1,
            round: 0,
            step: 7,
            slot: "r0c1".into(),
            from: Stage::Training.into(),
            to: Stage::Blending.into(),
        };
        let record = Record { v: SCHEMA_VERSION, seq: 3, seconds: 1.5, event: &event };
        assert_eq!(
            serde_json::to_string(&record).unwrap(),
            concat!(
                r#"{"v":2,"seq":3,"seconds":1.5,"event":"stage_changed","env":1,"round":0,"#,
                r#""step":7,"slot":"r0c1","from":"training","to":"blending"}"#
            )
        );
    }

    /// Keys that have been renamed since.
    #[test]
    fn lines_of_older_runs_are_read() {
        let started = r#"{"v": 1, "seq": 0, "seconds": 0.1, "event": "run_started",
            "version": "0.1.0", "dataset": "embedded", "train_samples": 9000,
            "control_samples": 1000, "test_samples": 2500, "host": "baseline",
            "host_parameters": 6274, "envs": 4, "rounds": 1, "steps": 20, "batches": 18,
            "controller": "ppo", "instruction_set": "avx2", "threads": 2, "ranks": 1,
            "exchange": "dense", "seed": 42}"#;
        let completed = r#"{"v": 1, "seq": 1, "seconds": 0.2, "event": "step_completed", "env": 0,
            "round": 0, "step": 0, "train_loss": 2.0, "train_accuracy": 0.2, "control_loss": 2.0,
            "control_accuracy": 0.3, "host_gradient_norm": 1.0, "host_parameters": 6274,
            "grown_parameters": 0, "slots": [], "action": "WAIT", "reward": {"gain": 0.0,
            "rent": 0.0, "potential": 0.0, "fossilize": 0.0, "prune": 0.0, "op": 0.0,
            "result": 0.0}, "step_seconds": 0.5, "images_per_second": 4608.0}"#;
        let Event::RunStarted(started) = serde_json::from_str(started).unwrap() else { panic!() };
        assert_eq!((started.program_version.as_str(), started.epoch), ("0.1.0", EpochMode::Dealt));
        let Event::StepCompleted(step) = serde_json::from_str(completed).unwrap() else { panic!() };
        assert_eq!((step.step_seconds, step.images_per_s), (Some(0.5), Some(4608.0)));
    }

    #[test]
    fn a_loss_keeps_every_bit_and_a_missing_one_is_null() {
        let loss = 1.0_f64 / 3.0;
        let event = Event::BatchCompleted { env: 0, round: 0, step: 0, batch: 0, loss };
        let value = serde_json::to_value(&event).unwrap();
        assert_eq!(value["loss"].as_f64().unwrap().to_bits(), loss.to_bits());
        let event = Event::BatchCompleted { env: 0, round: 0, step: 0, batch: 0, loss: f64::NAN };
        assert!(serde_json::to_value(&event).unwrap()["loss"].is_null());
    }
}

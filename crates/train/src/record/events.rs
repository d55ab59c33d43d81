//! The events of a run (`docs/run-folder.md`): what `events.jsonl` holds, one JSON object a line.
//!
//! Every line has `v` ([`SCHEMA_VERSION`]), `seq` (numbered from 0; a gap means dropped events),
//! `seconds` since the run started, and `event`, the name in snake case of a variant of [`Event`],
//! whose fields follow beside it. Envs, rounds, steps and batches count from 0. Accuracies are
//! shares 0..1, losses mean cross-entropy in nats, contributions percentage points of control
//! accuracy. A number that is not finite, or was not measured, is `null`; so is what `telemetry`
//! leaves out. A reader must skip events and fields that it does not know; a change of meaning
//! raises the version.

use meristem_control::{Failure, RewardTerms, RoundReport};
use meristem_device::DeviceId;
use serde::{Deserialize, Serialize};

/// Version of the lines' form.
pub const SCHEMA_VERSION: u32 = 1;

/// One line of `events.jsonl`.
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

/// An event of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// The run begins: first event of a file.
    RunStarted(RunStarted),
    /// Fresh hosts begin an episode.
    RoundStarted {
        /// Round.
        round: usize,
    },
    /// One batch of one env was trained (with `log_batches`).
    BatchCompleted {
        /// Env.
        env: usize,
        /// Round.
        round: usize,
        /// Step.
        step: usize,
        /// Batch of the step.
        batch: usize,
        /// Mean loss before the update.
        loss: f64,
    },
    /// One env has trained and been evaluated for one step.
    StepCompleted(StepCompleted),
    /// A module was placed in an empty slot.
    ModuleGerminated {
        /// Env.
        env: usize,
        /// Round.
        round: usize,
        /// Step after which it was placed.
        step: usize,
        /// Slot, such as `r0c1`.
        slot: String,
        /// Blueprint.
        blueprint: String,
        /// How it is blended in.
        style: String,
        /// Trained parameters it adds.
        parameters: usize,
    },
    /// A slot went from one stage to another.
    StageChanged {
        /// Env.
        env: usize,
        /// Round.
        round: usize,
        /// Step.
        step: usize,
        /// Slot.
        slot: String,
        /// Stage left.
        from: String,
        /// Stage entered.
        to: String,
    },
    /// A gate was asked.
    GateEvaluated {
        /// Env.
        env: usize,
        /// Round.
        round: usize,
        /// Step.
        step: usize,
        /// Slot.
        slot: String,
        /// Stage that the gate guards.
        target: String,
        /// Whether it let the module pass.
        passed: bool,
        /// Conditions that held it back, in words; empty when it passed.
        reasons: Vec<String>,
    },
    /// A module was taken out.
    ModulePruned {
        /// Env.
        env: usize,
        /// Round.
        round: usize,
        /// Step.
        step: usize,
        /// Slot.
        slot: String,
        /// Blueprint.
        blueprint: String,
        /// Its last contribution.
        contribution: Option<f64>,
    },
    /// A module became a part of its host for good.
    ModuleFossilized {
        /// Env.
        env: usize,
        /// Round.
        round: usize,
        /// Step.
        step: usize,
        /// Slot.
        slot: String,
        /// Blueprint.
        blueprint: String,
        /// Its last contribution.
        contribution: Option<f64>,
    },
    /// Contributions of the live modules of an env.
    Counterfactuals(Counterfactuals),
    /// Everything up to this line can be resumed from (U4).
    CheckpointWritten {
        /// Round of the next step.
        round: usize,
        /// The next step.
        step: usize,
    },
    /// A policy has learned from a round.
    PolicyUpdated {
        /// Round.
        round: usize,
        /// Returns, entropy per head (in the order of the action heads), KL and the rest.
        #[serde(flatten)]
        report: RoundReport,
    },
    /// An env had failed, and was brought back to its snapshot before the action of this step. What
    /// was pruned is told of by events of its own, which follow.
    GovernorRollback {
        /// Env.
        env: usize,
        /// Round.
        round: usize,
        /// Step that failed.
        step: usize,
        /// `not_finite`, `collapse` or `spike`.
        failure: Failure,
        /// Mean training loss of the step.
        train_loss: f64,
        /// Control loss after it.
        control_loss: Option<f64>,
        /// Step after which the snapshot was taken; null: as the episode began.
        restored_step: Option<usize>,
        /// Slots whose live modules are gone.
        pruned: Vec<String>,
        /// Penalty added to the reward of the action that the failure is put down to; 0 if there is
        /// none.
        penalty: f64,
        /// Step of that action: the last since the episode or the last rollback that changed
        /// something, else the one before this step; null in an episode's first step.
        cause_step: Option<usize>,
    },
    /// Something that should not be: an env that fails again and again.
    Anomaly {
        /// Env.
        env: usize,
        /// Round.
        round: usize,
        /// Step.
        step: usize,
        /// Description.
        what: String,
    },
    /// An env has finished its episode and was read against the test set.
    EpisodeEnded {
        /// Env.
        env: usize,
        /// Round.
        round: usize,
        /// Control accuracy.
        control_accuracy: Option<f64>,
        /// Test accuracy.
        test_accuracy: f64,
        /// Test loss.
        test_loss: f64,
        /// Trained parameters of the bare host.
        host_parameters: usize,
        /// Trained parameters of its modules.
        grown_parameters: usize,
    },
    /// The run ends: last event of a file, unless the process was killed.
    RunEnded {
        /// `completed`, `interrupted` or `failed`.
        status: String,
        /// Why, when it failed.
        error: Option<String>,
        /// Steps of all rounds.
        steps: u64,
        /// Images trained by all envs.
        images: u64,
        /// Seconds spent in training and evaluation.
        wall_seconds: f64,
    },
}

/// The run begins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunStarted {
    /// Version of the program.
    pub version: String,
    /// Dataset.
    pub dataset: String,
    /// Training samples that hosts learn from.
    pub train_samples: usize,
    /// Training samples that only the controller sees.
    pub control_samples: usize,
    /// Test samples.
    pub test_samples: usize,
    /// Host description.
    pub host: String,
    /// Trained parameters of the bare host.
    pub host_parameters: usize,
    /// Envs.
    pub envs: usize,
    /// Rounds.
    pub rounds: usize,
    /// Steps of an episode.
    pub steps: usize,
    /// Batches of a step, per env.
    pub batches: usize,
    /// Controller.
    pub controller: String,
    /// Instruction set of the kernels.
    pub instruction_set: String,
    /// Devices of the envs; left out where it is `cpu` alone.
    #[serde(default = "one_cpu", skip_serializing_if = "is_one_cpu")]
    pub devices: Vec<String>,
    /// Worker threads of each.
    pub threads: usize,
    /// Ranks that learn a policy or train a host together.
    pub ranks: usize,
    /// How they exchange gradients.
    pub exchange: String,
    /// Seed.
    pub seed: u64,
}

fn one_cpu() -> Vec<String> {
    vec![DeviceId::Cpu(0).to_string()]
}

fn is_one_cpu(devices: &Vec<String>) -> bool {
    *devices == one_cpu()
}

/// One env after one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepCompleted {
    /// Env.
    pub env: usize,
    /// Round.
    pub round: usize,
    /// Step.
    pub step: usize,
    /// Mean training loss over the step, before each update.
    pub train_loss: f64,
    /// Training accuracy over the step, before each update.
    pub train_accuracy: f64,
    /// Control loss; null without a control split.
    pub control_loss: Option<f64>,
    /// Control accuracy. Of an env that was rolled back in this step, both are those of the
    /// restored host.
    pub control_accuracy: Option<f64>,
    /// Mean L2 norm of the host's gradient before clipping; every so many steps
    /// (`gradient_stats_every`).
    pub host_gradient_norm: Option<f64>,
    /// Trained parameters of the bare host.
    pub host_parameters: usize,
    /// Trained parameters of its modules.
    pub grown_parameters: usize,
    /// Slots that are not dormant.
    pub slots: Vec<SlotState>,
    /// Action of the controller, in words; it takes effect with the next step.
    pub action: String,
    /// Terms of the reward for it; the reward is their sum.
    pub reward: RewardTerms,
    /// Seconds that the step took, for all envs together; every so many steps (`time_every`).
    pub step_seconds: Option<f64>,
    /// Images per second of training, all envs together; in the same steps.
    pub images_per_second: Option<f64>,
    /// Where the time went, in the same steps; with `telemetry` full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phases: Option<PhaseSeconds>,
    /// The gradients of the host and of each module in the network; with `telemetry` full, in the
    /// steps of `host_gradient_norm`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradients: Option<Vec<GradientStatistics>>,
    /// Fingerprint of weights, statistics and optimiser after the step, where several ranks train
    /// the host: the same on all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
}

/// Seconds of the phases of a step on the clock of the host, which waits nowhere for them. Training
/// is enqueued before it is done, so what the devices still had to do when all was enqueued is in
/// `measure`; a trace shows what they did when. For the envs of the process that has the env.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PhaseSeconds {
    /// Until networks had followed their hosts: growth, plans, memory.
    pub open: f64,
    /// Until all batches of the epoch were enqueued.
    pub train: f64,
    /// Until the control split was enqueued and the metrics of all envs were read back.
    pub measure: f64,
    /// Until envs that failed were rolled back, and the controller's actions were done.
    pub decide: f64,
}

/// Gradients of one parameter group over a step, before clipping.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradientStatistics {
    /// `host`, or the slot of a module.
    pub group: String,
    /// Mean over the batches of its L2 norm.
    pub norm: Option<f64>,
    /// L2 norm in the last batch; null where it is not finite.
    pub last_norm: Option<f64>,
    /// Share of the tensors of all batches whose norm was below 1e-7.
    pub vanishing: Option<f64>,
    /// Share of the tensors of all batches whose norm was above 10 or not finite.
    pub exploding: Option<f64>,
}

/// A slot that is not dormant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlotState {
    /// Slot.
    pub slot: String,
    /// Stage.
    pub stage: String,
    /// Blueprint, while it has a module.
    pub blueprint: Option<String>,
    /// Alpha.
    pub alpha: f64,
    /// Last contribution.
    pub contribution: Option<f64>,
    /// Health of the module's gradient in this step, 0..1; in the steps of `host_gradient_norm`.
    /// Gates and policies see it in every step.
    pub gradient_health: Option<f64>,
}

/// Contributions of the live modules of an env: control accuracies in this step's configurations
/// (`docs/growth.md`, Contributions), and what follows from them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Counterfactuals {
    /// Env.
    pub env: usize,
    /// Round.
    pub round: usize,
    /// Step.
    pub step: usize,
    /// Accuracy with every module as it is.
    pub accuracy: f64,
    /// Each live module whose alpha is above 0.
    pub modules: Vec<ModuleOff>,
    /// Interactions: contributions of pairs beyond those of each module alone.
    pub interactions: Vec<ModulePair>,
    /// Everything that was evaluated, each set of modules once; the first has all of them on.
    pub configurations: Vec<ModulesOn>,
    /// Cost of the validation.
    pub cost: ValidationCost,
}

/// Contribution of a module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleOff {
    /// Slot.
    pub slot: String,
    /// Control accuracy without it.
    pub accuracy_without: f64,
    /// Accuracy with it minus accuracy without it, in percentage points.
    pub contribution: f64,
    /// Shapley value, in percentage points: what it adds over all orders of switching modules on;
    /// they sum to accuracy with all minus accuracy with none. Exact up to four modules; beyond
    /// that an estimate, at the last step of an episode only.
    pub shapley: Option<f64>,
}

/// Two modules.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModulePair {
    /// Their slots.
    pub slots: [String; 2],
    /// Accuracy with both, minus that with each alone, plus that with neither, in percentage
    /// points.
    pub interaction: f64,
}

/// A configuration: which of the live modules are on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModulesOn {
    /// Their slots.
    pub on: Vec<String>,
    /// Control accuracy.
    pub accuracy: f64,
    /// Control loss.
    pub loss: f64,
}

/// Cost of validating an env in many configurations, and of validating them one by one (C3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidationCost {
    /// Configurations asked for.
    pub configurations: usize,
    /// Different ones among them, which were evaluated.
    pub evaluated: usize,
    /// Images.
    pub images: u64,
    /// Floating-point operations per image of the one pass.
    pub flops: u64,
    /// The same, of one full pass for each configuration asked for.
    pub flops_separate: u64,
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
            from: "training".into(),
            to: "blending".into(),
        };
        let record = Record { v: SCHEMA_VERSION, seq: 3, seconds: 1.5, event: &event };
        assert_eq!(
            serde_json::to_string(&record).unwrap(),
            r#"{"v":1,"seq":3,"seconds":1.5,"event":"stage_changed","env":1,"round":0,"step":7,"slot":"r0c1","from":"training","to":"blending"}"#
        );
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

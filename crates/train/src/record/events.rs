//! Events of a run: the lines of `events.jsonl`, one JSON object each. `docs/run-folder.md`
//! describes them.
//!
//! Every line has `v` ([`SCHEMA_VERSION`]), `seq` (counted from 0; a gap means dropped events),
//! `seconds` since the run started, and `event`, the name of a variant of [`Event`] in snake case;
//! the variant's fields follow. Envs, rounds, steps and batches count from 0. Scores are the
//! task's: accuracies and F1 in 0..1, R² at most 1. Losses are means of the task's loss, such as
//! cross-entropy in nats, contributions percentage points of the control score. A number that is
//! not finite, was not measured, or is left out by `telemetry` is `null`. Readers must skip unknown
//! events and fields, and keep the text of an unknown stage, style, status, host, controller,
//! device or instruction set ([`Recorded`]); a change of meaning raises the version.

mod counterfactuals;
mod run_started;
mod step_completed;

use meristem_control::{RoundReport, TrainingFailure};
use meristem_grow::{Stage, Style};
use serde::{Deserialize, Serialize};

pub use self::counterfactuals::{
    CounterfactualCost, Counterfactuals, ModuleOff, ModulePair, ModulesOn,
};
pub use self::run_started::RunStarted;
pub use self::step_completed::{
    GradientStatistics, PhaseSeconds, SlotState, StepCompleted, TwinStep,
};
use crate::record::null_as_nan;
pub use crate::record::recorded::Recorded;
use crate::record::status::Status;
use crate::sweep::EndReason;

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
    /// A layer of the host got further features.
    LayerWidened {
        /// Number of the env.
        env: usize,
        /// Number of the round.
        round: usize,
        /// Step after which it became wider.
        step: usize,
        /// Name of the layer, such as `blocks.1.conv`.
        layer: String,
        /// Features before.
        from: usize,
        /// Features now.
        to: usize,
        /// Trained parameters of the host without its modules now.
        host_parameters: usize,
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
    /// Members ended after this step: their envs are not trained any more.
    MembersEnded {
        /// Numbers of the members.
        members: Vec<usize>,
        /// Number of the round.
        round: usize,
        /// Their last step.
        step: usize,
        /// `rung`, `median`, `patience`, `diverged`, `planned`, `complete` (with places) or
        /// `stopped` (by a program).
        reason: Recorded<EndReason>,
        /// Number of members that have not ended.
        left: usize,
    },
    /// A member begins with this step, because a place is free, or with settings that a program
    /// chose.
    MemberBegun {
        /// Number of the member.
        member: usize,
        /// Number of the round.
        round: usize,
        /// Its first step.
        step: usize,
        /// Its settings.
        settings: String,
    },
    /// A member became a copy of another after this step, with changed settings (population-based
    /// training).
    MemberCopied {
        /// Number of the member.
        member: usize,
        /// Number of the member that it is a copy of.
        from: usize,
        /// Number of the round.
        round: usize,
        /// Number of the step.
        step: usize,
        /// Its settings from now on.
        settings: String,
    },
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
    /// An env failed too often without a snapshot in between. The run ends with an error; in a run
    /// with several members only the member of the env ends, unless the controller is a policy or a
    /// program.
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
        /// Control score.
        #[serde(rename = "control_accuracy", alias = "control_f1", alias = "control_r2")]
        control_score: Option<f64>,
        /// Test score; null without a test split.
        #[serde(rename = "test_accuracy", alias = "test_f1", alias = "test_r2")]
        test_score: Option<f64>,
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
        /// Images trained, over all envs, their twins and all rounds.
        images: u64,
        /// Seconds since the run started, including loading.
        wall_seconds: f64,
    },
    /// An event of a later version. It is read, never written.
    #[serde(other, skip_serializing)]
    Unknown,
}

#[cfg(test)]
mod tests {
    use meristem_data::order::EpochMode;

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
    fn texts_of_a_run_are_kept_if_this_version_knows_them_or_not() {
        let read = |texts: [&str; 4]| {
            let [host, controller, instruction_set, device] = texts;
            let event = serde_json::json!({
                "event": "run_started", "program_version": "1.0.0", "dataset": "embedded",
                "train_samples": 1, "control_samples": 1, "test_samples": null, "host": host,
                "host_parameters": 1, "envs": 1, "rounds": 1, "steps": 1, "batches": 1,
                "controller": controller, "instruction_set": instruction_set,
                "devices": [device], "threads": 1, "ranks": 1, "exchange": "dense", "seed": 1,
            });
            let event = serde_json::from_value(event).unwrap();
            let written = serde_json::to_value(&event).unwrap();
            let keys = ["host", "controller", "instruction_set"];
            assert_eq!(keys.map(|key| written[key].as_str().unwrap()), texts[..3]);
            assert_eq!(written["devices"], serde_json::json!([device]));
            let Event::RunStarted(started) = event else { panic!() };
            let RunStarted { host, controller, instruction_set, devices, .. } = started;
            [
                host.known().is_some(),
                controller.known().is_some(),
                instruction_set.known().is_some(),
                devices[0].known().is_some(),
            ]
        };
        assert_eq!(read(["baseline", "ppo:a.st", "portable", "cuda:0"]), [true; 4]);
        assert_eq!(read(["ring:9", "oracle", "sve2", "tpu:1"]), [false; 4]);
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

//! The summary of a run: `summary.json`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use meristem_control::RoundReport;
use meristem_device::{Counts, Device};
use serde::{Deserialize, Serialize};

use crate::record::events::ValidationCost;
use crate::record::trace::TraceSummary;

/// Version of the form of `summary.json`.
pub const SUMMARY_VERSION: u32 = 1;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// All rounds.
    Completed,
    /// Asked to stop; ended at a step boundary.
    Interrupted,
    /// By an error.
    Failed,
}

impl Status {
    /// As in the file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Interrupted => "interrupted",
            Self::Failed => "failed",
        }
    }
}

/// The whole of `summary.json`. Accuracies are shares 0..1, losses mean cross-entropy in nats,
/// contributions percentage points, sizes bytes, times seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// [`SUMMARY_VERSION`].
    pub version: u32,
    /// Version of the program.
    pub program_version: String,
    /// How it ended.
    pub status: Status,
    /// Why, when it failed.
    pub error: Option<String>,
    /// The run's folder.
    pub run_dir: PathBuf,
    /// Host description.
    pub host: String,
    /// Controller.
    pub controller: String,
    /// Seed.
    pub seed: u64,
    /// Dataset.
    pub dataset: DatasetSummary,
    /// Instruction set of the kernels.
    pub instruction_set: String,
    /// Worker threads of each device.
    pub threads: usize,
    /// Ranks that learned a policy or trained a host together; 0 in a summary from before there was
    /// a word of it.
    #[serde(default)]
    pub ranks: usize,
    /// How they exchanged gradients.
    #[serde(default)]
    pub exchange: String,
    /// Rounds that ended.
    pub rounds: usize,
    /// Steps (epochs of host training) over all rounds.
    pub steps: u64,
    /// Training steps (one batch of one env) over all envs and rounds.
    pub training_steps: u64,
    /// Images trained, over all envs and rounds.
    pub images: u64,
    /// Images trained per second of [`Summary::step_seconds`].
    pub images_per_s: f64,
    /// The whole run, loading included.
    pub wall_seconds: f64,
    /// The steps alone: training and evaluation on the control split.
    pub step_seconds: f64,
    /// Memory on devices, and of the process.
    pub memory: MemorySummary,
    /// Cost of the inner loop per training step.
    pub hot_path: HotPath,
    /// Counterfactual validation.
    #[serde(default)]
    pub validation: Validation,
    /// Rollbacks of all envs, over all rounds.
    #[serde(default)]
    pub rollbacks: u64,
    /// Events that did not reach `events.jsonl`.
    pub events_dropped: u64,
    /// The trace, if one was asked for.
    pub trace: Option<TraceSummary>,
    /// The envs of the last round.
    pub envs: Vec<EnvSummary>,
    /// Every round.
    pub round_results: Vec<RoundSummary>,
}

/// The dataset of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DatasetSummary {
    /// Name.
    pub name: String,
    /// Samples trained on.
    pub train_samples: usize,
    /// Samples that only the controller saw.
    pub control_samples: usize,
    /// Test samples.
    pub test_samples: usize,
    /// Files left out because they do not decode.
    pub skipped: usize,
    /// Image channels, rows, columns.
    pub image: [usize; 3],
    /// Class names.
    pub classes: Vec<String>,
    /// Per channel of the training images, pixels in 0..1: subtracted.
    pub mean: Vec<f32>,
    /// Likewise: divided by.
    pub std: Vec<f32>,
    /// CRC-32 of images and labels as they lie on the device, of the training split and of the test split. Runs from
    /// before there was a word of it have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checksums: Vec<String>,
}

/// Memory in bytes (V3), of all processes of a run together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemorySummary {
    /// In tensors at the end, over all devices.
    pub current: usize,
    /// The most in tensors: of each device its own peak, summed.
    pub peak: usize,
    /// The most taken from the system for tensors, rounding and free blocks included.
    pub reserved_peak: usize,
    /// The most pages that each process held, summed, where the system tells (Linux). Memory of
    /// tensors that was never written takes none, so that this may be less than what is in tensors.
    pub process_peak: Option<usize>,
    /// By owner, every owner of [`meristem_device::Owner::ALL`] by its name.
    pub owners: BTreeMap<String, OwnerMemory>,
}

/// Memory of one owner, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerMemory {
    /// In tensors at the end.
    pub current: usize,
    /// The most in its tensors; the peaks of owners need not fall together.
    pub peak: usize,
}

impl MemorySummary {
    /// Memory that the devices and the process took so far.
    pub fn of(devices: &[Device]) -> Self {
        let mut memory = Self { process_peak: process_peak(), ..Self::default() };
        for report in devices.iter().map(Device::memory) {
            memory.current += report.current;
            memory.peak += report.peak;
            memory.reserved_peak += report.reserved_peak;
            for owner in report.owners {
                let total = memory.owners.entry(owner.owner.name().into()).or_default();
                total.current += owner.current;
                total.peak += owner.peak;
            }
        }
        memory
    }

    /// As much as both together.
    pub(crate) fn with(mut self, other: Self) -> Self {
        self.current += other.current;
        self.peak += other.peak;
        self.reserved_peak += other.reserved_peak;
        self.process_peak = self.process_peak.zip(other.process_peak).map(|(a, b)| a + b);
        for (owner, of_other) in other.owners {
            let total = self.owners.entry(owner).or_default();
            total.current += of_other.current;
            total.peak += of_other.peak;
        }
        self
    }
}

/// The largest resident size of this process so far: `VmHWM` of `/proc/self/status`.
fn process_peak() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Counts of the inner loop (gather and train, one batch of one env after another) of every epoch
/// but the first of each process, which makes what the others use again, per training step (H4,
/// D5). A run of one step counts nothing. All zero, or something is wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HotPath {
    /// Training steps measured.
    pub training_steps: u64,
    /// Copies from a device.
    pub copies_to_host: f64,
    /// Copies to a device.
    pub copies_to_device: f64,
    /// Waits of the host for a device.
    pub synchronizations: f64,
    /// Requests for device memory.
    pub allocations: f64,
}

/// Validation of envs with live modules in many configurations, over all steps: what the one pass
/// cost, and what one full pass for each configuration would have cost (C3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Configurations asked for.
    pub configurations: u64,
    /// Different ones, which were evaluated.
    pub evaluated: u64,
    /// Floating-point operations.
    pub flops: u64,
    /// The same, of one full pass for each configuration asked for.
    pub flops_separate: u64,
}

impl Validation {
    /// Adds one env's step.
    pub(crate) fn add(&mut self, cost: &ValidationCost) {
        self.configurations += cost.configurations as u64;
        self.evaluated += cost.evaluated as u64;
        self.flops += cost.images * cost.flops;
        self.flops_separate += cost.images * cost.flops_separate;
    }

    /// Adds what other envs, or other steps, came to.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.configurations += other.configurations;
        self.evaluated += other.evaluated;
        self.flops += other.flops;
        self.flops_separate += other.flops_separate;
    }

    /// Share of the separate passes' cost that was spent; `None` if no env had a live module.
    pub fn share(&self) -> Option<f64> {
        (self.flops_separate > 0).then(|| self.flops as f64 / self.flops_separate as f64)
    }
}

/// Running totals behind a [`HotPath`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct HotTotals {
    training_steps: u64,
    copies_to_host: u64,
    copies_to_device: u64,
    synchronizations: u64,
    allocations: u64,
}

impl HotTotals {
    /// Adds an epoch, with what it cost on each device.
    pub(crate) fn add(&mut self, training_steps: u64, spent: impl Iterator<Item = Counts>) {
        self.training_steps += training_steps;
        for spent in spent {
            self.copies_to_host += spent.copies_to_host;
            self.copies_to_device += spent.copies_to_device;
            self.synchronizations += spent.synchronizations;
            self.allocations += spent.allocations;
        }
    }

    /// Adds what other envs, or other steps, came to.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.training_steps += other.training_steps;
        self.copies_to_host += other.copies_to_host;
        self.copies_to_device += other.copies_to_device;
        self.synchronizations += other.synchronizations;
        self.allocations += other.allocations;
    }

    /// Per training step.
    pub(crate) fn per_step(&self) -> HotPath {
        let per_step = |count: u64| count as f64 / self.training_steps.max(1) as f64;
        HotPath {
            training_steps: self.training_steps,
            copies_to_host: per_step(self.copies_to_host),
            copies_to_device: per_step(self.copies_to_device),
            synchronizations: per_step(self.synchronizations),
            allocations: per_step(self.allocations),
        }
    }
}

/// One env at the end of an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EnvSummary {
    /// Env.
    pub env: usize,
    /// Mean training loss over the last step; null if it was not finite, and the env was rolled
    /// back.
    #[serde(deserialize_with = "null_as_nan")]
    pub train_loss: f64,
    /// Training accuracy over the last step.
    pub train_accuracy: f64,
    /// Control loss; null without a control split.
    pub control_loss: Option<f64>,
    /// Control accuracy.
    pub control_accuracy: Option<f64>,
    /// Test loss; null if it is not finite.
    #[serde(deserialize_with = "null_as_nan")]
    pub test_loss: f64,
    /// Test accuracy; null in runs from before an empty test split was an error.
    #[serde(deserialize_with = "null_as_nan")]
    pub test_accuracy: f64,
    /// Trained parameters, host and modules.
    pub parameters: usize,
    /// Trained parameters of the bare host.
    pub host_parameters: usize,
    /// Trained parameters of the modules that take part in the network.
    pub grown_parameters: usize,
    /// Modules that grew, fossilized or still live.
    pub modules: Vec<ModuleSummary>,
    /// Modules germinated, pruned and fossilized in the episode.
    pub history: ModuleCounts,
    /// How often the governor rolled it back in the episode.
    #[serde(default)]
    pub rollbacks: usize,
    /// The weights file, relative to the run's folder.
    pub weights: PathBuf,
}

/// JSON has no NaN.
fn null_as_nan<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

fn nulls_as_nan<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
    let values: Vec<Option<f64>> = Vec::deserialize(deserializer)?;
    Ok(values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect())
}

/// A module at the end of an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleSummary {
    /// Slot.
    pub slot: String,
    /// Blueprint.
    pub blueprint: String,
    /// Stage.
    pub stage: String,
    /// Alpha.
    pub alpha: f64,
    /// Trained parameters.
    pub parameters: usize,
    /// Leave-one-out: control accuracy with it minus without it, percentage points; null for a
    /// module that has no part in the output yet.
    pub contribution: Option<f64>,
}

/// How many modules came and went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModuleCounts {
    /// Germinated.
    pub germinated: usize,
    /// Pruned.
    pub pruned: usize,
    /// Fossilized.
    pub fossilized: usize,
}

/// One round in short.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoundSummary {
    /// Round.
    pub round: usize,
    /// Steps that its episode had.
    pub steps: usize,
    /// Control accuracy of each env.
    pub control_accuracy: Vec<Option<f64>>,
    /// Test accuracy of each env; null as in [`EnvSummary`].
    #[serde(deserialize_with = "nulls_as_nan")]
    pub test_accuracy: Vec<f64>,
    /// Parameters of each env, host and modules.
    pub parameters: Vec<usize>,
    /// Report of the policy: its actions, and its update at the end; absent without one that
    /// learns, and of a round that was cut short.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<RoundReport>,
}

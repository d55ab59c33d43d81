//! Summary of a run: `summary.json`.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use meristem_control::RoundReport;
use meristem_data::path_text;
use meristem_device::{Counts, Device};
use meristem_nn::{Precision, ROUNDING};
use serde::{Deserialize, Serialize};

use crate::config::TrainConfig;
use crate::config::types::Normalize;
use crate::input_file::InputFile;
use crate::position::StepPosition;
use crate::record::directory::Directory;
use crate::record::events::{CounterfactualCost, Extension};
use crate::record::null_as_nan;
use crate::record::sealed::{self, Seal};
use crate::record::trace::TraceSummary;

/// File of the results in a run folder.
pub(crate) const SUMMARY: &str = "summary.json";

/// Version of the format of `summary.json`.
pub const SUMMARY_VERSION: u32 = 2;

/// Way in which a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// All rounds were completed.
    Completed,
    /// The run was asked to stop and ended at a step boundary.
    Interrupted,
    /// The run ended with an error.
    Failed,
}

/// Largest summary that is read: that of a thousand envs over a thousand rounds is smaller.
const BYTES_MAX: u64 = 256_000_000;

/// Reads the `summary.json` in the folder of a run. `None` if there is none.
///
/// # Errors
/// It cannot be read, is larger than 256 MB, differs from its checksum, or is no summary of this
/// version or an earlier one.
pub(crate) fn read(run: &Path) -> io::Result<Option<Summary>> {
    match Directory::open(run) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        folder => read_in(&folder?),
    }
}

/// Reads the `summary.json` of an open folder, as [`read`] does.
pub(crate) fn read_in(folder: &Directory) -> io::Result<Option<Summary>> {
    let Some(text) = folder.read(SUMMARY, BYTES_MAX)? else { return Ok(None) };
    let summary: Summary = serde_json::from_slice(&text).map_err(io::Error::other)?;
    if sealed::check(&text, SUMMARY_VERSION) == Seal::Broken {
        return Err(io::Error::other(sealed::BROKEN));
    }
    match summary.v {
        0..=SUMMARY_VERSION => Ok(Some(summary)),
        v => Err(io::Error::other(format!(
            "its format has version {v}, this program reads version {SUMMARY_VERSION}"
        ))),
    }
}

impl Status {
    /// Name in the file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Interrupted => "interrupted",
            Self::Failed => "failed",
        }
    }
}

/// Steps of a run that were computed alike, up to the next stretch or the end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stretch {
    /// Round of the first step.
    pub round: usize,
    /// The first step.
    pub step: usize,
    /// Devices of the envs.
    pub devices: Vec<String>,
    /// Precision of products.
    pub precision: Precision,
    /// Revision of the kernels' rounding ([`meristem_nn::ROUNDING`]); 0 before it was recorded.
    #[serde(default)]
    pub rounding: u32,
}

impl Stretch {
    /// The stretch that begins at a position.
    pub(crate) fn new(StepPosition { round, step }: StepPosition, config: &TrainConfig) -> Self {
        let (devices, precision) = (config.devices.clone(), config.precision);
        Self { round, step, devices, precision, rounding: ROUNDING }
    }

    /// Whether it has steps before a position.
    pub(crate) fn is_before(&self, next: StepPosition) -> bool {
        (self.round, self.step) < (next.round, next.step)
    }

    /// Whether the steps of a run with these settings belong to it.
    pub(crate) fn goes_on(&self, config: &TrainConfig) -> bool {
        let now = (&config.devices, config.precision, ROUNDING);
        (&self.devices, self.precision, self.rounding) == now
    }
}

/// Contents of `summary.json`. Accuracies are shares 0..1, losses mean cross-entropy in nats,
/// contributions percentage points, sizes bytes, times seconds. Aliases are the names of keys in
/// older files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// [`SUMMARY_VERSION`].
    #[serde(alias = "version")]
    pub v: u32,
    /// Version of meristem.
    pub program_version: String,
    /// Way in which the run ended.
    pub status: Status,
    /// Error of a failed run.
    pub error: Option<String>,
    /// Path of the run folder.
    #[serde(serialize_with = "path_text::serialize")]
    pub run_dir: PathBuf,
    /// Whether the path is not UTF-8, so that its text in JSON is not the path.
    #[serde(default, skip_serializing_if = "path_text::is_exact")]
    pub path_is_lossy: bool,
    /// Host description.
    pub host: String,
    /// Controller setting.
    pub controller: String,
    /// Seed of the run.
    pub seed: u64,
    /// Dataset of the run.
    pub dataset: DatasetSummary,
    /// Files that settings name, and that hosts and controllers are made from; absent in older
    /// summaries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub input_files: Vec<InputFile>,
    /// Instruction set of the kernels.
    pub instruction_set: String,
    /// Worker threads of each device.
    pub threads: usize,
    /// Devices, precision and rounding, each from a step on: more than one if they changed when the
    /// run was resumed. Older summaries have none if they did not change.
    #[serde(default)]
    pub computed: Vec<Stretch>,
    /// Extensions of the run, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extended: Vec<Extension>,
    /// Ranks that learned a policy or trained a host together; 0 in older summaries, which lack it.
    #[serde(default)]
    pub ranks: usize,
    /// Gradient exchange between the ranks.
    #[serde(default)]
    pub exchange: String,
    /// Number of completed rounds.
    pub rounds: usize,
    /// Steps over all rounds. A step is one epoch of host training.
    pub steps: u64,
    /// Training steps over all envs, their twins and all rounds. A training step is one batch of
    /// one of them.
    pub training_steps: u64,
    /// Images trained, over all envs, their twins and all rounds.
    pub images: u64,
    /// Floating-point operations of training, over the same: three times those of an
    /// evaluation for every image trained (forward, and backward with respect to activations and to
    /// weights), once for every image with which running statistics are recomputed.
    #[serde(default)]
    pub training_flops: u64,
    /// Images trained per second of [`Summary::step_seconds_total`].
    pub images_per_s: f64,
    /// Seconds of the whole run, including loading.
    pub wall_seconds: f64,
    /// Seconds in all steps: training and evaluation on the control split.
    #[serde(alias = "step_seconds")]
    pub step_seconds_total: f64,
    /// Memory of the devices and of the processes.
    pub memory: MemorySummary,
    /// Cost of the inner loop, per training step.
    pub hot_path: HotPath,
    /// Cost of the counterfactual evaluations of all envs and steps.
    #[serde(default, alias = "validation")]
    pub counterfactual_cost: CounterfactualTotals,
    /// Rollbacks of all envs, over all rounds.
    #[serde(default)]
    pub rollbacks: u64,
    /// Events missing from `events.jsonl`.
    pub events_dropped: u64,
    /// The trace, if one was requested.
    pub trace: Option<TraceSummary>,
    /// Results of the envs in the last round.
    pub envs: Vec<EnvSummary>,
    /// Results of every round.
    pub round_results: Vec<RoundSummary>,
}

impl Summary {
    /// Whether all of the run was computed by kernels that round as those of this build.
    pub fn rounds_as_now(&self) -> bool {
        let alike = self.computed.iter().all(|stretch| stretch.rounding == ROUNDING);
        alike && !self.computed.is_empty()
    }
}

/// Dataset of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DatasetSummary {
    /// Name.
    pub name: String,
    /// Samples in the training split, without the control split.
    pub train_samples: usize,
    /// Samples in the control split.
    pub control_samples: usize,
    /// Samples in the test split; null without one.
    pub test_samples: Option<usize>,
    /// Images left out by `skip_bad`.
    pub skipped: usize,
    /// Channels, rows and columns of an image.
    pub image: [usize; 3],
    /// Class names.
    pub classes: Vec<String>,
    /// Setting `normalize`; `data` in older summaries, which lack it.
    #[serde(default = "data")]
    pub normalize: String,
    /// Mean that each channel was normalised with, with pixels in 0..1: with `normalize` data that
    /// of the training images.
    pub mean: Vec<f32>,
    /// Standard deviation of each channel, likewise.
    pub std: Vec<f32>,
    /// CRC-32 of images and labels, as stored on the device, of the training split and of the test
    /// split. Empty in older summaries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checksums: Vec<String>,
}

fn data() -> String {
    Normalize::Data.to_string()
}

/// Memory in bytes, summed over all processes of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemorySummary {
    /// Memory in tensors at the end, over all devices.
    pub current: usize,
    /// Sum of the devices' peaks of memory in tensors.
    pub peak: usize,
    /// Sum of the devices' peaks of memory taken from the system for tensors, including rounding
    /// and free blocks.
    pub reserved_peak: usize,
    /// Sum of the processes' peak resident sizes, where the system reports them (Linux). Memory
    /// that was never written is not resident, so that this may be less than the memory in tensors.
    pub process_peak: Option<usize>,
    /// Memory by owner, with the name of every owner of [`meristem_device::Owner::ALL`].
    pub owners: BTreeMap<String, OwnerMemory>,
}

/// Memory of one owner, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerMemory {
    /// Memory in its tensors at the end.
    pub current: usize,
    /// Peak of memory in its tensors. Owners may peak at different times.
    pub peak: usize,
}

impl MemorySummary {
    /// Memory of the devices and of this process so far.
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

    /// The sum of two summaries.
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

/// Peak resident size of this process: `VmHWM` in `/proc/self/status`.
fn process_peak() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Counts of the inner loop per training step, over every epoch but the first of each process,
/// which allocates what the others reuse. The inner loop gathers and trains one batch of one env
/// after another. A run of one step counts nothing. All counts are zero unless there is a bug.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HotPath {
    /// Number of training steps measured.
    pub training_steps: u64,
    /// Copies from a device to the host.
    pub copies_to_host: f64,
    /// Copies from the host to a device.
    pub copies_to_device: f64,
    /// Waits of the host for a device.
    pub synchronizations: f64,
    /// Requests for device memory.
    pub allocations: f64,
}

/// Cost of evaluating envs with live modules in several configurations, over all steps: of the
/// single pass, and of one full pass per configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CounterfactualTotals {
    /// Number of requested configurations.
    pub configurations: u64,
    /// Number of distinct ones, which were evaluated.
    pub evaluated: u64,
    /// Floating-point operations of the single passes.
    pub flops: u64,
    /// Floating-point operations of one full pass for each requested configuration.
    pub flops_separate: u64,
}

impl CounterfactualTotals {
    /// Adds a step of one env.
    pub(crate) fn add(&mut self, cost: &CounterfactualCost) {
        self.configurations += cost.configurations as u64;
        self.evaluated += cost.evaluated as u64;
        self.flops += cost.images * cost.flops;
        self.flops_separate += cost.images * cost.flops_separate;
    }

    /// Adds the totals of other envs or steps.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.configurations += other.configurations;
        self.evaluated += other.evaluated;
        self.flops += other.flops;
        self.flops_separate += other.flops_separate;
    }

    /// Ratio of the cost to that of separate passes; `None` if no env had a live module.
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
    /// Adds an epoch, with its counts on each device.
    pub(crate) fn add(&mut self, training_steps: u64, spent: impl Iterator<Item = Counts>) {
        self.training_steps += training_steps;
        for spent in spent {
            self.copies_to_host += spent.copies_to_host;
            self.copies_to_device += spent.copies_to_device;
            self.synchronizations += spent.synchronizations;
            self.allocations += spent.allocations;
        }
    }

    /// Adds the totals of other envs or steps.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.training_steps += other.training_steps;
        self.copies_to_host += other.copies_to_host;
        self.copies_to_device += other.copies_to_device;
        self.synchronizations += other.synchronizations;
        self.allocations += other.allocations;
    }

    /// The counts per training step.
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

/// Results of one env at the end of an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EnvSummary {
    /// Number of the env.
    pub env: usize,
    /// Mean training loss over the last step; null if it was not finite and the env was rolled
    /// back.
    #[serde(deserialize_with = "null_as_nan")]
    pub train_loss: f64,
    /// Training accuracy over the last step.
    pub train_accuracy: f64,
    /// Control loss; null without a control split.
    pub control_loss: Option<f64>,
    /// Control accuracy; null without a control split.
    pub control_accuracy: Option<f64>,
    /// Test loss; null without a test split, and if it is not finite.
    pub test_loss: Option<f64>,
    /// Test accuracy; null without a test split.
    pub test_accuracy: Option<f64>,
    /// Trained parameters of the host with its modules.
    pub parameters: usize,
    /// Trained parameters of the host without modules.
    pub host_parameters: usize,
    /// Trained parameters of the modules that are part of the network.
    pub grown_parameters: usize,
    /// Floating-point operations of training in the episode, counted as in
    /// [`Summary::training_flops`]; 0 in older summaries.
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

/// Results of an env's twin at the end of an episode: of the same host without growth, trained on
/// the same batches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TwinSummary {
    /// Control loss; null without a control split, as the accuracy. All four are null if the twin
    /// diverged.
    pub control_loss: Option<f64>,
    /// Control accuracy.
    pub control_accuracy: Option<f64>,
    /// Test loss; null without a test split, as the accuracy.
    pub test_loss: Option<f64>,
    /// Test accuracy.
    pub test_accuracy: Option<f64>,
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
    pub stage: String,
    /// Blending factor.
    pub alpha: f64,
    /// Trained parameters.
    pub parameters: usize,
    /// Control accuracy with the module minus without it, in percentage points; null for a module
    /// that does not affect the output yet.
    pub contribution: Option<f64>,
}

/// Counts of modules by what happened to them.
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
    /// Control accuracy of each env.
    pub control_accuracy: Vec<Option<f64>>,
    /// Test accuracy of each env; null without a test split.
    pub test_accuracy: Vec<Option<f64>>,
    /// Trained parameters of each env, host and modules.
    pub parameters: Vec<usize>,
    /// Report of the policy on its actions and its update. Absent without a learning policy, and
    /// for a round that was cut short.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<RoundReport>,
}

//! Summary of a run: `summary.json`.

mod cost;
mod episode;
mod leaderboard;

use std::io;
use std::path::{Path, PathBuf};

use meristem_data::{TargetKind, path_text};
use meristem_nn::{Precision, ROUNDING};
use serde::{Deserialize, Serialize};

pub(crate) use self::cost::HotTotals;
pub use self::cost::{CounterfactualTotals, HotPath, MemorySummary, OwnLossTotals, OwnerMemory};
pub use self::episode::{
    EnvSummary, FoldSummary, ModuleCounts, ModuleSummary, PlacesSummary, RoundSummary, TwinSummary,
};
pub use self::leaderboard::Place;
use crate::config::TrainConfig;
use crate::config::types::{Normalize, TaskKind};
use crate::input_file::InputFile;
use crate::position::StepPosition;
use crate::record::directory::Directory;
use crate::record::events::Extension;
pub use crate::record::part::PartSummary;
use crate::record::sealed::{self, Seal};
pub use crate::record::status::Status;
use crate::record::trace::TraceSummary;

/// File of the results in a run folder.
pub(crate) const SUMMARY: &str = "summary.json";

/// Version of the format of `summary.json`.
pub const SUMMARY_VERSION: u32 = 2;

/// Largest summary that is read; one of a thousand envs over a thousand rounds is smaller.
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

/// Consecutive steps of a run with the same devices, precision and rounding.
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

    /// Whether further steps of a run with these settings, computed by this build, belong to it.
    pub(crate) fn goes_on(&self, config: &TrainConfig) -> bool {
        let now = (&config.devices, config.precision, ROUNDING);
        (&self.devices, self.precision, self.rounding) == now
    }
}

/// Contents of `summary.json`. Accuracies are shares 0..1, losses the mean loss of the task
/// (cross-entropy in nats for classes), contributions percentage points, sizes bytes, times
/// seconds. Aliases are the names of keys in older files.
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
    /// Task of the run. Absent for `classify`; with another task, keys with `accuracy` in their
    /// names have the score of the task instead, such as `test_r2`.
    #[serde(default = "TaskKind::classify", skip_serializing_if = "TaskKind::is_classify")]
    pub task: TaskKind,
    /// Host description.
    pub host: String,
    /// Controller setting.
    pub controller: String,
    /// Seed of the run.
    pub seed: u64,
    /// Dataset of the run.
    pub dataset: DatasetSummary,
    /// Input files that settings name, from which hosts and controllers are built; absent in older
    /// summaries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub input_files: Vec<InputFile>,
    /// Instruction set of the kernels.
    pub instruction_set: String,
    /// Worker threads of each device.
    pub threads: usize,
    /// Stretches of the run: more than one if devices, precision or rounding changed when it was
    /// resumed. May be empty in older summaries of runs without such a change.
    #[serde(default)]
    pub computed: Vec<Stretch>,
    /// Extensions of the run, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extended: Vec<Extension>,
    /// Ranks that learned a policy or trained a host together; 0 in older summaries, which lack it.
    #[serde(default)]
    pub ranks: usize,
    /// Exchange between the ranks.
    #[serde(default)]
    pub exchange: String,
    /// Bytes that all ranks together sent to exchange gradients or weights of a host that they
    /// train together, without overhead of the transport; absent if there were none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exchange_bytes: Option<u64>,
    /// Number of rounds in [`Summary::round_results`]: the completed ones, and the round in which
    /// the run was stopped, if it was stopped within a round.
    pub rounds: usize,
    /// Steps over all rounds. A step is one epoch of host training.
    pub steps: u64,
    /// Training steps over all envs, their twins and all rounds. A training step is one batch of
    /// one of them.
    pub training_steps: u64,
    /// Images trained, over all envs, their twins and all rounds.
    pub images: u64,
    /// Floating-point operations of training, over all envs, their twins and all rounds. A trained
    /// image counts as three evaluations (forward, and backward with respect to activations and to
    /// weights), an image for running statistics as one. The batches that growth in width measures
    /// count, too.
    #[serde(default)]
    pub training_flops: u64,
    /// Images trained per second of [`Summary::step_seconds_total`].
    pub images_per_s: f64,
    /// Seconds of the whole run, including loading.
    pub wall_seconds: f64,
    /// Seconds in all steps: training, growth in width and evaluation on the control split.
    #[serde(alias = "step_seconds")]
    pub step_seconds_total: f64,
    /// Memory of the devices and of the processes.
    pub memory: MemorySummary,
    /// Cost of the inner loop, per training step.
    pub hot_path: HotPath,
    /// Cost of the counterfactual evaluations of all envs and steps.
    #[serde(default, alias = "validation")]
    pub counterfactual_cost: CounterfactualTotals,
    /// Cost of the program's loss; omitted if the loss is built in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_loss: Option<OwnLossTotals>,
    /// Rollbacks of all envs, over all rounds.
    #[serde(default)]
    pub rollbacks: u64,
    /// Events missing from `events.jsonl`.
    pub events_dropped: u64,
    /// The trace, if one was requested.
    pub trace: Option<TraceSummary>,
    /// Use of the places; omitted without the setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub places: Option<PlacesSummary>,
    /// Scores of the held-out folds in the last round; omitted without folds, and with members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folds: Option<FoldSummary>,
    /// Results of the envs in the last round.
    pub envs: Vec<EnvSummary>,
    /// Results of every round, also of one that was cut short.
    pub round_results: Vec<RoundSummary>,
}

impl Summary {
    /// Whether kernels with the rounding of this build computed the whole run.
    pub(crate) fn rounds_as_now(&self) -> bool {
        let alike = self.computed.iter().all(|stretch| stretch.rounding == ROUNDING);
        alike && !self.computed.is_empty()
    }
}

/// Dataset of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DatasetSummary {
    /// Name.
    pub name: String,
    /// Samples in the training split, without the control split; if envs have different parts, of
    /// env 0.
    pub train_samples: usize,
    /// Samples in the control split, likewise.
    pub control_samples: usize,
    /// Samples in the test split; null without one.
    pub test_samples: Option<usize>,
    /// Images left out by `skip_bad`.
    pub skipped: usize,
    /// Channels, rows and columns of an image.
    pub image: [usize; 3],
    /// Kind of the targets. Absent for classes.
    #[serde(default, skip_serializing_if = "are_classes")]
    pub targets: TargetKind,
    /// Names of the classes, of the labels, or of the numbers.
    pub classes: Vec<String>,
    /// Setting `normalize`; `data` in older summaries, which lack it.
    #[serde(default = "data")]
    pub normalize: String,
    /// Normalisation mean of each channel, for pixels in 0..1; with `normalize` data, the mean of
    /// the training images.
    pub mean: Vec<f32>,
    /// Normalisation standard deviation of each channel, likewise.
    pub std: Vec<f32>,
    /// Mean of the training targets of each output, if they are numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub target_mean: Vec<f64>,
    /// Standard deviation of the training targets of each output, if they are numbers. The networks
    /// learn (target − mean)/deviation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub target_std: Vec<f64>,
    /// CRC-32 of images and labels, as stored on the device, of the training split and of the test
    /// split. Empty in older summaries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checksums: Vec<String>,
}

fn are_classes(targets: &TargetKind) -> bool {
    *targets == TargetKind::Classes
}

fn data() -> String {
    Normalize::Data.to_string()
}

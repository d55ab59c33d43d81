//! The first event of a run: its settings, data and machine.

use meristem_data::order::EpochMode;
use meristem_device::{DeviceId, Isa};
use meristem_grow::HostSpec;
use meristem_nn::Precision;
use serde::{Deserialize, Serialize};

use crate::config::types::{ControllerKind, Normalize, PolicyStart, TaskKind};
use crate::record::part::PartSummary;
use crate::record::recorded::{Recorded, as_host, as_text, as_texts};

/// Description of a run at its start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunStarted {
    /// Version of meristem.
    #[serde(alias = "version")]
    pub program_version: String,
    /// Name of the dataset.
    pub dataset: String,
    /// Task. Absent for `classify`; with another task, keys with `accuracy` in their names have the
    /// score of the task instead, such as `control_r2`, in all events of the run.
    #[serde(default = "TaskKind::classify", skip_serializing_if = "TaskKind::is_classify")]
    pub task: TaskKind,
    /// Constants that normalise pixels; omitted if they are computed from the training images.
    #[serde(default, skip_serializing_if = "is_data")]
    pub normalize: Normalize,
    /// Samples in the training split, without the control split; if envs have different parts, of
    /// env 0.
    pub train_samples: usize,
    /// Samples in the control split, likewise.
    pub control_samples: usize,
    /// Samples in the test split; null without one.
    pub test_samples: Option<usize>,
    /// Part of each env; omitted if all envs have the same samples.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<PartSummary>,
    /// Host, as the name of a preset or a description.
    #[serde(with = "as_host")]
    pub host: Recorded<HostSpec>,
    /// Trained parameters of the host without modules.
    pub host_parameters: usize,
    /// Number of envs.
    pub envs: usize,
    /// Settings of each member, such as `lr=0.1; host=baseline`; omitted if all envs have the
    /// settings of the run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<String>,
    /// Number of rounds.
    pub rounds: usize,
    /// Steps per episode; with places, the most that there may be.
    pub steps: usize,
    /// Members in training at a time, if fewer than all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub places: Option<usize>,
    /// Batches per step of the env with the most.
    pub batches: usize,
    /// Share of the training samples that an env gets in a step; absent in older runs, which dealt
    /// the samples out.
    #[serde(default = "dealt")]
    pub epoch: EpochMode,
    /// Minimum and maximum number of training images of an env in a step.
    #[serde(default)]
    pub images_per_step: [usize; 2],
    /// Controller setting.
    #[serde(with = "as_text")]
    pub controller: Recorded<ControllerKind>,
    /// Initial policy of a learning controller; omitted for other controllers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyStart>,
    /// Instruction set of the kernels.
    #[serde(with = "as_text")]
    pub instruction_set: Recorded<Isa>,
    /// Devices of the envs, and of ranks that train one host; omitted for the single device `cpu`.
    #[serde(default = "one_cpu", skip_serializing_if = "is_one_cpu", with = "as_texts")]
    pub devices: Vec<Recorded<DeviceId>>,
    /// Precision of the hosts' products; omitted if it is f32.
    #[serde(default, skip_serializing_if = "is_f32")]
    pub precision: Precision,
    /// Worker threads of each device.
    pub threads: usize,
    /// Ranks that learn a policy or train a host together.
    pub ranks: usize,
    /// Exchange of gradients or weights between the ranks.
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

fn one_cpu() -> Vec<Recorded<DeviceId>> {
    vec![DeviceId::Cpu(0).into()]
}

fn is_one_cpu(devices: &Vec<Recorded<DeviceId>>) -> bool {
    *devices == one_cpu()
}

fn is_f32(precision: &Precision) -> bool {
    *precision == Precision::F32
}

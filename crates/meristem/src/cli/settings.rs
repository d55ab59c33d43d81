//! The settings of training that every command which trains takes.

use std::path::PathBuf;

use clap::Args;
use meristem::grow::Tempo;
use meristem::train::config::Layer;
use meristem::train::settings::{
    Augmentations, ByteSize, ClipNorm, HotScopePolicy, Limit, Preset, Switch, tempo,
};
use meristem::train::{self, config_file};

use super::{DatasetArguments, GovernorArguments, PolicyArguments};

/// How hosts are trained. A flag left out is decided by the configuration file, then by the preset.
#[derive(Debug, Args)]
pub(crate) struct SettingArguments {
    /// Starting point of the settings: default, quick or full
    #[arg(long, help_heading = "Run")]
    preset: Option<Preset>,
    /// Settings from a TOML or JSON file; flags override it
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    pub(crate) config: Option<PathBuf>,
    /// Everything random follows from it
    #[arg(long, help_heading = "Run")]
    seed: Option<u64>,
    /// Worker threads of each device, 0 for one per core; results do not depend on it
    #[arg(long, value_name = "N", help_heading = "Devices")]
    threads: Option<usize>,
    /// Episodes, each with fresh hosts; a policy learns at the end of each
    #[arg(long, value_name = "N", help_heading = "Run")]
    rounds: Option<usize>,
    /// Epochs of host training in an episode
    #[arg(long, value_name = "N", help_heading = "Run")]
    steps: Option<usize>,
    /// Copies, waits and allocations on the hot path, from the second step on: off (count them), warn, or deny (end the run) [default: deny]
    #[arg(long, value_name = "POLICY", help_heading = "Run")]
    hot_scope: Option<HotScopePolicy>,

    #[command(flatten, next_help_heading = "Data")]
    dataset: DatasetArguments,
    /// Bytes of a device that a split may take, such as 64MiB; more is streamed
    #[arg(long, value_name = "SIZE", help_heading = "Data")]
    data_budget: Option<ByteSize>,
    /// Share of the training set kept for the controller [default: 0.1, without a controller 0]
    #[arg(long, value_name = "SHARE", help_heading = "Data")]
    control_split: Option<f64>,
    /// Shuffle every epoch, or serve file order: on or off
    #[arg(long, value_name = "on|off", help_heading = "Data")]
    shuffle: Option<Switch>,
    /// none, or any of crop,flip,cutout
    #[arg(long, value_name = "LIST", help_heading = "Data")]
    augment: Option<Augmentations>,
    /// Samples per env and batch
    #[arg(long, value_name = "N", help_heading = "Data")]
    batch: Option<usize>,
    /// Batches per env and step, or all
    #[arg(long, value_name = "N", help_heading = "Data")]
    max_batches: Option<Limit>,

    /// Preset (baseline, wide, deep, large, impaired, minimal) or cnn:channels=12,blocks=4,kernel=5,pools=3
    #[arg(long, help_heading = "Hosts")]
    host: Option<String>,
    /// Hosts trained side by side
    #[arg(long, value_name = "N", help_heading = "Hosts")]
    envs: Option<usize>,
    /// Devices that the envs are dealt out to, in order and evenly, such as cpu:0,cpu:1; each has its own memory,
    /// workers and order of samples (this version has the CPU only) [default: cpu]
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "Devices")]
    devices: Option<Vec<String>>,
    /// Device of the policy, one of --devices [default: the first]
    #[arg(long, value_name = "DEVICE", help_heading = "Devices")]
    policy_device: Option<String>,
    /// Most memory that each device may take, such as 64MiB; results do not depend on it [default: no limit]
    #[arg(long, value_name = "LIMIT", help_heading = "Devices")]
    device_memory: Option<ByteSize>,
    /// Weights that every env starts from (safetensors, PyTorch names)
    #[arg(long, value_name = "FILE", help_heading = "Hosts")]
    init: Option<PathBuf>,
    /// Learning rate of the host
    #[arg(long, value_name = "RATE", help_heading = "Hosts")]
    lr: Option<f32>,
    /// Momentum of the host
    #[arg(long, value_name = "M", help_heading = "Hosts")]
    momentum: Option<f32>,
    /// Weight decay of the host
    #[arg(long, value_name = "W", help_heading = "Hosts")]
    weight_decay: Option<f32>,
    /// Largest gradient norm of the host and of each module, or off
    #[arg(long, value_name = "NORM", help_heading = "Hosts")]
    clip_norm: Option<ClipNorm>,

    /// Slots that may grow: names (r0c1), regions (r0, r1) or all
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "Growth")]
    slots: Option<Vec<String>>,
    /// Modules that an env may hold
    #[arg(long, value_name = "N", help_heading = "Growth")]
    max_modules: Option<usize>,
    /// Steps in Training before a module may blend
    #[arg(long, value_name = "N", help_heading = "Growth")]
    min_training_steps: Option<u32>,
    /// Percentage points that a module must contribute to become permanent
    #[arg(long, value_name = "PP", help_heading = "Growth")]
    min_contribution: Option<f64>,
    /// Steps in a row that must gain little before the heuristic grows something
    #[arg(long, value_name = "N", help_heading = "Growth")]
    plateau_steps: Option<usize>,
    /// Less than this many percentage points a step is little
    #[arg(long, value_name = "PP", help_heading = "Growth")]
    plateau_gain: Option<f64>,
    /// How long a module is blended in: fast, standard or slow
    #[arg(long, value_parser = tempo, help_heading = "Growth")]
    tempo: Option<Tempo>,
    #[command(flatten)]
    policy: PolicyArguments,
    #[command(flatten)]
    governor: GovernorArguments,
}

impl SettingArguments {
    /// The settings of the configuration file, if one was given.
    ///
    /// # Errors
    /// As [`config_file::read`].
    pub(crate) fn file(&self) -> Result<Layer, train::Error> {
        self.config.as_deref().map_or_else(|| Ok(Layer::default()), config_file::read)
    }

    /// The settings that were given as flags.
    pub(crate) fn layer(&self) -> Layer {
        Layer {
            preset: self.preset,
            seed: self.seed,
            dataset: self.dataset.dataset.clone(),
            data_root: self.dataset.data_root.clone().map(Some),
            skip_bad: self.dataset.skip_bad.then_some(true),
            data_budget: self.data_budget.map(Some),
            control_split: self.control_split.map(Some),
            shuffle: self.shuffle,
            augment: self.augment,
            host: self.host.clone(),
            init: self.init.clone().map(Some),
            envs: self.envs,
            devices: self.devices.clone(),
            policy_device: self.policy_device.clone().map(Some),
            device_memory: self.device_memory.map(Some),
            threads: self.threads,
            rounds: self.rounds,
            steps: self.steps,
            batch: self.batch,
            max_batches: self.max_batches,
            lr: self.lr,
            momentum: self.momentum,
            weight_decay: self.weight_decay,
            clip_norm: self.clip_norm,
            slots: self.slots.clone(),
            max_modules: self.max_modules,
            min_training_steps: self.min_training_steps,
            min_contribution: self.min_contribution,
            plateau_steps: self.plateau_steps,
            plateau_gain: self.plateau_gain,
            tempo: self.tempo,
            hot_scope: self.hot_scope,
            ..self.governor.over(self.policy.layer())
        }
    }
}

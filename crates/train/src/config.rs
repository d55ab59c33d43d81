//! The configuration of a run: what can be set, and how presets, a file and flags combine (U3).
//!
//! The keys of a configuration file are the flags' names with `_` for `-`. A [`Layer`] is what one
//! source says (a preset, a file, the flags); [`TrainConfig::resolve`] lays them over each other.
//! Files are read by `config_file`; values are turned into working objects by `setup`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use meristem_comm::CommOptions;
use meristem_control::{GovernorConfig, PpoConfig, RewardMode};
use meristem_device::{DeviceOptions, Trace};
use meristem_grow::Tempo;
use serde::{Deserialize, Serialize};

use crate::devices::Devices;
use crate::error::{Error, Result};
use crate::settings::{
    Augmentations, ByteSize, ClipNorm, CommKind, ControllerKind, ExchangeKind, HotScopePolicy,
    Limit, Preset, Switch, Telemetry,
};
use crate::{preset, ranks};

/// Declares every setting once: [`TrainConfig`] with its value, [`Layer`] with it or nothing.
macro_rules! settings {
    ($( $(#[doc = $doc:literal])+ $key:ident : $type:ty ),* $(,)?) => {
        /// Every setting of a run, resolved.
        #[derive(Clone, Debug, PartialEq, Serialize)]
        pub struct TrainConfig {
            $( $(#[doc = $doc])+ pub $key: $type, )*
        }

        /// The settings that one source gives; what it leaves out is decided below it.
        #[derive(Clone, Debug, Default, PartialEq, Deserialize)]
        #[serde(default)]
        pub struct Layer {
            $( $(#[doc = $doc])+ pub $key: Option<$type>, )*
        }

        impl Layer {
            /// Every known key, in the order of the documentation.
            pub const KEYS: &'static [&'static str] = &[$( stringify!($key) ),*];
        }

        impl TrainConfig {
            /// Lets `layer` override what it names.
            pub fn apply(&mut self, layer: Layer) {
                $( if let Some(value) = layer.$key { self.$key = value; } )*
            }
        }
    };
}

settings! {
    /// The starting point of the other settings.
    preset: Preset,
    /// Last part of the default run folder's name; host and dataset when absent.
    name: Option<String>,
    /// The run folder; `runs/<time>-<name>` when absent. It must not exist.
    run_dir: Option<PathBuf>,
    /// Every random number of the run follows from it.
    seed: u64,
    /// Dataset: embedded, fashion-mnist, cifar10, cifar100, folder, arrays.
    dataset: String,
    /// Folder (or file) of the dataset.
    data_root: Option<PathBuf>,
    /// Count and leave out images that do not decode, instead of stopping.
    skip_bad: bool,
    /// Bytes that the dataset may take on a device; a larger one is streamed (D7).
    data_budget: Option<ByteSize>,
    /// Share of the training set that only the controller sees. When absent: 0.1 with a controller, and
    /// 0 without one, because then nobody would read it.
    control_split: Option<f64>,
    /// Shuffle the training set every epoch; off: file order.
    shuffle: Switch,
    /// Augmentations: none, or any of crop,flip,cutout.
    augment: Augmentations,
    /// A host preset, or a description such as cnn:channels=12,blocks=4,kernel=5,pools=3.
    host: String,
    /// Weights (safetensors, PyTorch names) that every env starts from.
    init: Option<PathBuf>,
    /// Where the best env's weights are written besides the run folder.
    export: Option<PathBuf>,
    /// Where a trace of the run is written, for Perfetto (H8).
    trace: Option<PathBuf>,
    /// Hosts trained side by side.
    envs: usize,
    /// Devices, each once: cpu, cpu:1, …. The envs are dealt out to them evenly and in order, the first devices one more.
    devices: Vec<String>,
    /// The device of the policy, one of those; the first when absent. Results do not depend on it.
    policy_device: Option<String>,
    /// The most bytes that each device takes from the system; no limit when absent. Results do not depend on it.
    device_memory: Option<ByteSize>,
    /// Worker threads of each device; 0: as many as there are cores. Results do not depend on it.
    threads: usize,
    /// Episodes, each with fresh hosts.
    rounds: usize,
    /// Epochs of host training in an episode, each followed by one action per env.
    steps: usize,
    /// Samples per env and batch; with data_parallel those of all ranks together.
    batch: usize,
    /// Batches per env and step, or all.
    max_batches: Limit,
    /// Host's learning rate.
    lr: f32,
    /// Host's momentum.
    momentum: f32,
    /// Host's weight decay.
    weight_decay: f32,
    /// Largest gradient norm of the host and of each module, or off.
    clip_norm: ClipNorm,
    /// Who decides where and when hosts grow.
    controller: ControllerKind,
    /// What a policy is rewarded for: basic, contribution or sparse.
    reward: RewardMode,
    /// A policy (safetensors) that controller ppo starts from; a new one when absent.
    policy: Option<PathBuf>,
    /// Width of the policy. When absent: that of the file it starts from; of a new one 128, with preset full 512.
    policy_hidden: Option<usize>,
    /// What ranks are: threads, of one process, or mpi, processes that mpirun started together.
    comm: CommKind,
    /// Ranks over which a policy learns, each with as many envs and a copy of the policy; or that train one host. When
    /// absent: as many as there are processes over mpi, otherwise 1.
    ranks: Option<usize>,
    /// Seconds that ranks wait for each other, to be longer than a step may take.
    comm_deadline: usize,
    /// How they exchange gradients: dense, topk:D, gtopk:D, ok-topk:D, auto:D, with the share D that each sends.
    exchange: ExchangeKind,
    /// Ranks train one host together, each on its part of every batch, instead of sharing out envs and policy.
    data_parallel: bool,
    /// Passes of a policy update over a round.
    ppo_epochs: usize,
    /// Adam's learning rate for the policy.
    ppo_lr: f32,
    /// Adam's ε.
    ppo_adam_eps: f32,
    /// Largest norm of the policy's gradient.
    ppo_clip_norm: f32,
    /// Discount of rewards, γ; also that of the stage potential in the reward.
    ppo_gamma: f64,
    /// λ of the advantages.
    ppo_lambda: f64,
    /// How far a ratio of probabilities may leave 1.
    ppo_clip: f32,
    /// Weight of the value loss.
    ppo_value_weight: f32,
    /// Weight of the entropy bonus.
    ppo_entropy_weight: f32,
    /// An update stops before the step that follows a KL above 1.5 times this.
    ppo_target_kl: f64,
    /// Advantages are divided by their standard deviation, and by this at least.
    ppo_advantage_std_floor: f64,
    /// So many skipped updates in a row end the run.
    ppo_skips_max: usize,
    /// Slots that may grow: names such as r0c1, or regions r0 and r1, or all.
    slots: Vec<String>,
    /// Modules that an env may hold at once, fossilized ones included.
    max_modules: usize,
    /// Steps in Training before a module may blend.
    min_training_steps: u32,
    /// Contribution in percentage points that fossilizing takes.
    min_contribution: f64,
    /// Steps in a row that must gain little before the heuristic grows something.
    plateau_steps: usize,
    /// Less than this many percentage points a step is little.
    plateau_gain: f64,
    /// How long a module is blended in: fast (3 steps), standard (5) or slow (8).
    tempo: Tempo,
    /// A loss this close to ln(classes), as a share of it, is that of guessing.
    governor_collapse_width: f64,
    /// An env has learned once its mean loss is below this share of ln(classes); guessing is a failure from then on.
    governor_learned_share: f64,
    /// The loss of a spike is above this.
    governor_spike_loss: f64,
    /// The loss of a spike is also so many standard deviations above the running mean.
    governor_spike_sigmas: f64,
    /// The loss of a spike is also so many times the running mean.
    governor_spike_factor: f64,
    /// So many spikes in a row are a failure.
    governor_spike_patience: u32,
    /// Steps between the snapshots that an env which has failed goes back to.
    governor_snapshot_steps: u32,
    /// So many failures of an env with no snapshot between them end the run.
    governor_failures_max: u32,
    /// What a failure adds to the reward of the action that is to blame.
    governor_penalty: f64,
    /// Report every batch's loss.
    log_batches: bool,
    /// Detail of events beyond what happened and what decided: off, basic or full.
    telemetry: Telemetry,
    /// Gradient statistics are told of every so many steps, from the first of a round on.
    gradient_stats_every: usize,
    /// Times are told of every so many steps, from the first of a round on.
    time_every: usize,
    /// Copies, waits and allocations on the hot path: off (count them), warn, or deny (end the run).
    hot_scope: HotScopePolicy,
    /// Steps between two checkpoints, with one after the run's first step; 0: only between rounds, and where a run
    /// is stopped.
    checkpoint_every: usize,
}

impl TrainConfig {
    /// Combines, from the lowest: the preset that `flags` or else `file` names, `file`, `flags`.
    ///
    /// # Errors
    /// A value outside its range, named with what was expected.
    pub fn resolve(file: Layer, flags: Layer) -> Result<Self> {
        let preset = flags.preset.or(file.preset).unwrap_or_default();
        let controller = flags.controller.clone().or(file.controller.clone()).unwrap_or_default();
        let mut config = preset::base(preset, controller);
        if flags.data_parallel.or(file.data_parallel).unwrap_or(false) {
            config.envs = 1;
        }
        config.apply(file);
        config.apply(flags);
        config.preset = preset;
        config.validate()?;
        Ok(config)
    }

    /// The control split in force: the one set, else what the controller needs.
    pub fn control_share(&self) -> f64 {
        self.control_split.unwrap_or(match self.controller {
            ControllerKind::None => 0.0,
            _ => 0.1,
        })
    }

    /// The width of the policy: the one set, else that of a new one.
    pub(crate) fn policy_width(&self) -> usize {
        self.policy_hidden.unwrap_or_else(|| preset::policy_width(self.preset))
    }

    /// The file of the policy that it starts from.
    pub(crate) fn policy_file(&self) -> Option<&Path> {
        match &self.controller {
            ControllerKind::Policy(path) | ControllerKind::Greedy(path) => Some(path),
            ControllerKind::Ppo => self.policy.as_deref(),
            _ => None,
        }
    }

    /// Ranks of the policy: the number set, else that of a process alone.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks.unwrap_or(1)
    }

    /// Options that its devices are opened with.
    pub(crate) fn device_options(&self, trace: Option<Trace>) -> DeviceOptions {
        let memory_limit = self.device_memory.map(|limit| limit.0);
        DeviceOptions { threads: self.threads, memory_limit, trace, ..DeviceOptions::default() }
    }

    /// How ranks deal with each other.
    pub(crate) fn comm_options(&self) -> CommOptions {
        CommOptions { deadline: Duration::from_secs(self.comm_deadline as u64) }
    }

    /// The run's name: the one set, else host and dataset.
    pub fn run_name(&self) -> String {
        let name = self.name.clone().unwrap_or_else(|| format!("{}-{}", self.host, self.dataset));
        let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
        name.chars().map(plain).take(60).collect()
    }

    /// The text that is written into the run folder: what is left open is filled in, and the folder
    /// itself and the trace are left out, and paths begin at the root, so that the file starts a new run as it
    /// is, from any working directory.
    pub fn resolved_toml(&self) -> String {
        let mut written = self.clone();
        let paths = [&mut written.data_root, &mut written.init, &mut written.export];
        let paths = paths.into_iter().chain([&mut written.policy]).flatten();
        for path in paths.chain(written.controller.path_mut()) {
            // It fails for an empty path only, which is no file anywhere.
            *path = std::path::absolute(&*path).unwrap_or_else(|_| path.clone());
        }
        written.run_dir = None;
        written.trace = None;
        written.name = Some(self.run_name());
        written.control_split = Some(self.control_share());
        written.policy_hidden = Some(self.policy_width());
        if self.comm == CommKind::Threads {
            written.ranks = Some(self.ranks());
        }
        toml::to_string(&written).unwrap_or_default()
    }

    /// What results depend on, as text: equal texts, equal runs on the same data and machine, whatever ranks are.
    pub(crate) fn identity(&self) -> String {
        let (comm, ranks) = (CommKind::default(), Some(self.ranks()));
        let (telemetry, gradient_stats_every, time_every) = (Telemetry::default(), 1, 1);
        let telling = Self { telemetry, gradient_stats_every, time_every, ..self.clone() };
        Self { checkpoint_every: 0, comm, ranks, ..telling }.in_common()
    }

    /// What is the same in all processes of a run, as text.
    pub(crate) fn in_common(&self) -> String {
        let (threads, export, comm_deadline) = (0, None, preset::COMM_DEADLINE);
        let hot_scope = HotScopePolicy::default();
        let (policy_device, device_memory) = (None, None);
        let written = Self { threads, export, comm_deadline, hot_scope, ..self.clone() };
        let written = Self { policy_device, device_memory, ..written };
        as_older_runs_have_it(&written.resolved_toml())
    }

    /// Ranks that share out the envs, and learn a policy together.
    pub(crate) fn policy_ranks(&self) -> usize {
        if self.data_parallel { 1 } else { self.ranks() }
    }

    /// Ranks that each have a replica of every host.
    pub(crate) fn replicas(&self) -> usize {
        if self.data_parallel { self.ranks() } else { 1 }
    }

    /// Settings of the policy.
    pub(crate) fn ppo(&self) -> PpoConfig {
        PpoConfig {
            hidden: self.policy_width(),
            epochs: self.ppo_epochs,
            lr: self.ppo_lr,
            adam_eps: self.ppo_adam_eps,
            clip_norm: self.ppo_clip_norm,
            gamma: self.ppo_gamma,
            lambda: self.ppo_lambda,
            clip: self.ppo_clip,
            value_weight: self.ppo_value_weight,
            entropy_weight: self.ppo_entropy_weight,
            target_kl: self.ppo_target_kl,
            advantage_std_floor: self.ppo_advantage_std_floor,
            skips_max: self.ppo_skips_max,
        }
    }

    /// The governor's rules.
    pub(crate) fn governor(&self) -> GovernorConfig {
        GovernorConfig {
            collapse_width: self.governor_collapse_width,
            learned_share: self.governor_learned_share,
            spike_loss: self.governor_spike_loss,
            spike_sigmas: self.governor_spike_sigmas,
            spike_factor: self.governor_spike_factor,
            spike_patience: self.governor_spike_patience,
            snapshot_steps: self.governor_snapshot_steps,
            failures_max: self.governor_failures_max,
            penalty: self.governor_penalty,
        }
    }

    /// Checks every number against its range, and what settings say together.
    pub(crate) fn validate(&self) -> Result<()> {
        self.validate_whole()?;
        self.validate_real()?;
        self.validate_together()
    }

    fn validate_whole(&self) -> Result<()> {
        let whole = [
            ("envs", self.envs, 1, 4096),
            ("threads", self.threads, 0, 1024),
            ("rounds", self.rounds, 1, 1_000_000),
            ("steps", self.steps, 1, 1_000_000),
            ("batch", self.batch, 1, 65_536),
            ("max-batches", self.max_batches.count().unwrap_or(1), 1, 1_000_000_000),
            ("policy-hidden", self.policy_width(), 1, 65_536),
            ("ranks", self.ranks(), 1, ranks::RANKS_MAX),
            ("comm-deadline", self.comm_deadline, 1, 10_000_000),
            ("ppo-epochs", self.ppo_epochs, 1, 1000),
            ("ppo-skips-max", self.ppo_skips_max, 1, 1_000_000),
            ("max-modules", self.max_modules, 0, 64),
            ("min-training-steps", self.min_training_steps as usize, 1, 1_000_000),
            ("plateau-steps", self.plateau_steps, 1, 1_000_000),
            ("governor-spike-patience", self.governor_spike_patience as usize, 1, 1_000_000),
            ("governor-snapshot-steps", self.governor_snapshot_steps as usize, 1, 1_000_000),
            ("governor-failures-max", self.governor_failures_max as usize, 1, 1_000_000),
            ("checkpoint-every", self.checkpoint_every, 0, 1_000_000),
            ("device-memory", self.device_memory.map_or(1, |b| b.0), 1, usize::MAX),
            ("gradient-stats-every", self.gradient_stats_every, 1, 1_000_000),
            ("time-every", self.time_every, 1, 1_000_000),
            ("data-budget", self.data_budget.map_or(1, |b| b.0), 1, usize::MAX),
        ];
        for (key, got, low, high) in whole {
            if !(low..=high).contains(&got) {
                let expected = match high {
                    usize::MAX => format!("at least {low}"),
                    _ => format!("{low} to {high}"),
                };
                return Err(Error::value(key, got, expected));
            }
        }
        // TOML, in which the run is written down, has signed integers.
        match i64::try_from(self.seed) {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::value("seed", self.seed, format!("0 to {}", i64::MAX))),
        }
    }

    fn validate_real(&self) -> Result<()> {
        let real = [
            ("lr", f64::from(self.lr), 0.0, 1e6),
            ("momentum", f64::from(self.momentum), 0.0, 0.999_999),
            ("weight-decay", f64::from(self.weight_decay), 0.0, 1e6),
            ("control-split", self.control_share(), 0.0, 0.9),
            ("min-contribution", self.min_contribution, -100.0, 100.0),
            ("plateau-gain", self.plateau_gain, -100.0, 100.0),
            ("ppo-lr", f64::from(self.ppo_lr), 0.0, f64::from(f32::MAX)),
            ("ppo-adam-eps", f64::from(self.ppo_adam_eps), 1e-30, 1.0),
            ("ppo-clip-norm", f64::from(self.ppo_clip_norm), 1e-6, 1e6),
            ("ppo-gamma", self.ppo_gamma, 0.0, 1.0),
            ("ppo-lambda", self.ppo_lambda, 0.0, 1.0),
            ("ppo-clip", f64::from(self.ppo_clip), 1e-6, 1.0),
            ("ppo-value-weight", f64::from(self.ppo_value_weight), 0.0, 1e6),
            ("ppo-entropy-weight", f64::from(self.ppo_entropy_weight), 0.0, 1e6),
            ("ppo-target-kl", self.ppo_target_kl, 1e-9, 1e6),
            ("ppo-advantage-std-floor", self.ppo_advantage_std_floor, 1e-9, 1e6),
            ("governor-collapse-width", self.governor_collapse_width, 0.0, 1.0),
            ("governor-learned-share", self.governor_learned_share, 0.0, 1.0),
            ("governor-spike-loss", self.governor_spike_loss, 0.0, 1e9),
            ("governor-spike-sigmas", self.governor_spike_sigmas, 0.0, 1e9),
            ("governor-spike-factor", self.governor_spike_factor, 0.0, 1e9),
            ("governor-penalty", self.governor_penalty, -1e6, 0.0),
        ];
        for (key, got, low, high) in real {
            if !(low..=high).contains(&got) {
                return Err(Error::value(key, got, format!("{low} to {high}")));
            }
        }
        Ok(())
    }

    fn validate_together(&self) -> Result<()> {
        if self.controller != ControllerKind::None && self.control_share() == 0.0 {
            let expected = "above 0: the controller judges modules on the control split";
            return Err(Error::value("control-split", 0, expected));
        }
        if self.policy.is_some() && self.controller != ControllerKind::Ppo {
            let expected = "ppo, the only one that starts from a `policy`";
            return Err(Error::value("controller", &self.controller, expected));
        }
        if self.trace.is_some() && self.trace == self.export {
            let got = self.trace.as_deref().unwrap_or(Path::new("")).display();
            return Err(Error::value("trace", got, "another file than that of `export`"));
        }
        ranks::check(self)?;
        Devices::of(self).map(drop)
    }
}

/// What the names of settings begin with that the files of older runs lack. These ran with the defaults.
const LATER: [&str; 6] = [
    "governor_",
    "comm_deadline",
    "data_parallel",
    "telemetry",
    "gradient_stats_every",
    "time_every",
];

/// A resolved configuration without the later settings that have their defaults.
pub(crate) fn as_older_runs_have_it(toml: &str) -> String {
    let defaults = preset::base(Preset::default(), ControllerKind::default()).resolved_toml();
    let later = |line: &&str| LATER.iter().any(|name| line.starts_with(name));
    let defaults: Vec<&str> = defaults.lines().filter(later).collect();
    toml.lines().filter(|line| !defaults.contains(line)).flat_map(|line| [line, "\n"]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(file: Layer, flags: Layer) -> Result<TrainConfig> {
        TrainConfig::resolve(file, flags)
    }

    #[test]
    fn flags_lie_over_the_file_and_the_file_over_the_preset() {
        let file = Layer { batch: Some(64), envs: Some(2), ..Layer::default() };
        let flags = Layer { batch: Some(32), preset: Some(Preset::Quick), ..Layer::default() };
        let config = resolve(file, flags).unwrap();
        assert_eq!((config.batch, config.envs, config.preset), (32, 2, Preset::Quick));
        assert_eq!(config.steps, preset::base(Preset::Quick, ControllerKind::Ppo).steps);
    }

    /// Rounds are for who learns from one to the next; the others have all their steps in one.
    #[test]
    fn a_preset_divides_its_steps_by_who_decides() {
        for (name, preset) in Preset::NAMES {
            let [learns, rules] = [ControllerKind::Ppo, ControllerKind::Heuristic]
                .map(|controller| preset::base(preset, controller));
            assert!(learns.rounds > 1 && rules.rounds == 1, "{name}");
        }
        let file = Layer { controller: Some(ControllerKind::Random), ..Layer::default() };
        assert_eq!(resolve(file, Layer::default()).unwrap().rounds, 1);
    }

    #[test]
    fn absurd_values_are_named_with_their_range() {
        let bad = [
            (Layer { batch: Some(0), ..Layer::default() }, "batch"),
            (Layer { envs: Some(0), ..Layer::default() }, "envs"),
            (Layer { steps: Some(0), ..Layer::default() }, "steps"),
            (Layer { max_batches: Some(Limit::Count(0)), ..Layer::default() }, "max-batches"),
            (Layer { lr: Some(f32::NAN), ..Layer::default() }, "lr"),
            (Layer { lr: Some(-1.0), ..Layer::default() }, "lr"),
            (Layer { momentum: Some(1.0), ..Layer::default() }, "momentum"),
            (Layer { control_split: Some(Some(1.0)), ..Layer::default() }, "control-split"),
            (Layer { control_split: Some(Some(0.0)), ..Layer::default() }, "control-split"),
            (Layer { devices: Some(vec![]), ..Layer::default() }, "devices"),
            (Layer { ppo_gamma: Some(1.5), ..Layer::default() }, "ppo-gamma"),
            (Layer { ppo_clip: Some(0.0), ..Layer::default() }, "ppo-clip"),
            (Layer { ppo_lr: Some(f32::INFINITY), ..Layer::default() }, "ppo-lr"),
            (Layer { governor_penalty: Some(1.0), ..Layer::default() }, "governor-penalty"),
            (Layer { governor_failures_max: Some(0), ..Layer::default() }, "governor-failures-max"),
            (Layer { ppo_epochs: Some(0), ..Layer::default() }, "ppo-epochs"),
            (Layer { gradient_stats_every: Some(0), ..Layer::default() }, "gradient-stats-every"),
            (Layer { time_every: Some(0), ..Layer::default() }, "time-every"),
        ];
        for (layer, key) in bad {
            let message = resolve(Layer::default(), layer).unwrap_err().to_string();
            assert!(message.contains(key), "{message}");
        }
    }

    /// A run from before a setting came into being has its default, whatever its files lack.
    #[test]
    fn later_settings_are_told_where_they_are_not_the_default() {
        for preset in [Preset::Default, Preset::Quick] {
            let of = |flags| resolve(Layer::default(), Layer { preset: Some(preset), ..flags });
            let before = of(Layer::default()).unwrap();
            assert!(before.resolved_toml().contains("\ngovernor_penalty = -10.0\n"));
            assert!(!before.identity().contains("governor"), "{}", before.identity());
            let other = of(Layer { governor_penalty: Some(-5.0), ..Layer::default() }).unwrap();
            let told = other.identity();
            let lines: Vec<&str> = told.lines().filter(|l| l.contains("governor")).collect();
            assert_eq!(lines, ["governor_penalty = -5.0"]);
        }
    }

    #[test]
    fn without_a_controller_the_whole_training_set_is_used() {
        let none = Layer { controller: Some(ControllerKind::None), ..Layer::default() };
        assert_eq!(resolve(Layer::default(), none).unwrap().control_share(), 0.0);
        assert_eq!(resolve(Layer::default(), Layer::default()).unwrap().control_share(), 0.1);
    }

    #[test]
    fn a_written_configuration_means_the_same_files_everywhere() {
        let flags = Layer {
            data_root: Some(Some("data".into())),
            init: Some(Some("w.safetensors".into())),
            controller: Some(ControllerKind::Fixed("script.jsonl".into())),
            ..Layer::default()
        };
        let text = resolve(Layer::default(), flags).unwrap().resolved_toml();
        let here = std::env::current_dir().unwrap();
        for (key, before, name) in [
            ("data_root", "", "data"),
            ("init", "", "w.safetensors"),
            ("controller", "fixed:", "script.jsonl"),
        ] {
            let line = format!("{key} = \"{before}{}\"", here.join(name).display());
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn the_name_of_a_run_is_a_plain_file_name() {
        let host = Some("cnn:channels=12,blocks=4".to_string());
        let config = resolve(Layer::default(), Layer { host, ..Layer::default() }).unwrap();
        assert_eq!(config.run_name(), "cnn-channels-12-blocks-4-embedded");
    }
}

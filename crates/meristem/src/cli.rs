//! The command line: pure parsing. What the flags mean together is decided in `commands` and in the training
//! crate's configuration.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use meristem::control::RewardMode;
use meristem::grow::Tempo;
use meristem::train::config::Layer;
use meristem::train::settings::{
    Augmentations, ByteSize, ClipNorm, ControllerKind, HotScopePolicy, Limit, Preset, Switch,
    reward, tempo,
};

use crate::environment::HELP;

/// Train fleets of small neural networks that grow while they train.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100, disable_help_subcommand = true, after_help = HELP)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train hosts side by side and let them grow.
    ///
    /// Flags override the configuration file, which overrides the preset. The config.toml in a run's folder shows
    /// every setting that was in force.
    Train(Box<TrainArguments>),
    /// Evaluate a weights file on a split of a dataset.
    Eval(EvalArguments),
    /// Look at datasets: what is there, is it sound, convert it, in which order is it served.
    #[command(subcommand)]
    Data(DataCommand),
    /// Check this machine and this build: one line a check, ok or FAIL with what to do.
    ///
    /// Residency, memory format, aliasing, determinism, streams under stress, leaks, hot scopes. The exit code is 0
    /// only if all hold.
    Check(CheckArguments),
    /// Measure speed on this machine.
    #[command(subcommand)]
    Bench(BenchCommand),
}

/// What `train` takes. A flag left out is decided by the configuration file, then by the preset; of a flag
/// that is given twice the last counts, so that a script can be varied at its end.
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true, args_override_self = true)]
pub(crate) struct TrainArguments {
    /// Where the run is written; must not exist [default: runs/<time>-<name>]
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    run_dir: Option<PathBuf>,
    /// Last part of the default run folder's name
    #[arg(long, help_heading = "Run")]
    name: Option<String>,
    /// Starting point of the settings: default, quick or full
    #[arg(long, help_heading = "Run")]
    preset: Option<Preset>,
    /// Settings from a TOML or JSON file; flags override it
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    pub(crate) config: Option<PathBuf>,
    /// Everything random follows from it
    #[arg(long, help_heading = "Run")]
    seed: Option<u64>,
    /// Worker threads, 0 for one per core; results do not depend on it
    #[arg(long, value_name = "N", help_heading = "Run")]
    threads: Option<usize>,
    /// Episodes, each with fresh hosts
    #[arg(long, value_name = "N", help_heading = "Run")]
    rounds: Option<usize>,
    /// Epochs of host training in an episode
    #[arg(long, value_name = "N", help_heading = "Run")]
    steps: Option<usize>,
    /// Steps between two checkpoints; 0: only between rounds, and where a run is stopped
    #[arg(long, value_name = "N", help_heading = "Run")]
    checkpoint_every: Option<usize>,
    /// Go on with a run that was stopped or killed, from its last checkpoint to the same bits
    #[arg(long, value_name = "RUN", help_heading = "Run")]
    pub(crate) resume: Option<PathBuf>,
    /// Print nothing but errors
    #[arg(long, help_heading = "Run")]
    pub(crate) quiet: bool,
    /// Print the summary as JSON on stdout; progress goes to stderr
    #[arg(long, help_heading = "Run")]
    pub(crate) json: bool,
    /// One line per batch and env with its loss
    #[arg(long, help_heading = "Run")]
    log_batches: bool,
    /// Write what happened when, for ui.perfetto.dev or chrome://tracing
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    trace: Option<PathBuf>,
    /// Print who used how much device memory
    #[arg(long, help_heading = "Run")]
    pub(crate) memory: bool,
    /// Copies, waits and allocations on the hot path: off (count them), warn, or deny (end the run) [default: deny]
    #[arg(long, value_name = "POLICY", help_heading = "Run")]
    hot_scope: Option<HotScopePolicy>,

    /// embedded, fashion-mnist, cifar10, cifar100, folder or arrays
    #[arg(long, help_heading = "Data")]
    dataset: Option<String>,
    /// Folder (or file) of the dataset
    #[arg(long, value_name = "DIR", help_heading = "Data")]
    data_root: Option<PathBuf>,
    /// Count and leave out images that do not decode
    #[arg(long, help_heading = "Data")]
    skip_bad: bool,
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
    /// One device for all envs, or one for each, such as cpu,cpu (this version has the CPU only)
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "Hosts")]
    devices: Option<Vec<String>>,
    /// Weights that every env starts from (safetensors, PyTorch names)
    #[arg(long, value_name = "FILE", help_heading = "Hosts")]
    init: Option<PathBuf>,
    /// Write the best env's weights here too
    #[arg(long, value_name = "FILE", help_heading = "Hosts")]
    export: Option<PathBuf>,
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

    /// Who decides what grows: heuristic, ppo, random, none, or fixed:FILE with an action script
    #[arg(long, help_heading = "Growth")]
    controller: Option<ControllerKind>,
    /// What a policy is rewarded for: basic, contribution or sparse
    #[arg(long, value_parser = reward, help_heading = "Growth")]
    reward: Option<RewardMode>,
    /// Policy that controller ppo starts from; a new one when absent
    #[arg(long, value_name = "FILE", help_heading = "Growth")]
    policy: Option<PathBuf>,
    /// Width of a new policy
    #[arg(long, value_name = "N", help_heading = "Growth")]
    policy_hidden: Option<usize>,
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
}

impl TrainArguments {
    /// The settings that were given as flags.
    pub(crate) fn layer(&self) -> Layer {
        Layer {
            preset: self.preset,
            name: self.name.clone().map(Some),
            run_dir: self.run_dir.clone().map(Some),
            seed: self.seed,
            dataset: self.dataset.clone(),
            data_root: self.data_root.clone().map(Some),
            skip_bad: self.skip_bad.then_some(true),
            data_budget: self.data_budget.map(Some),
            control_split: self.control_split.map(Some),
            shuffle: self.shuffle,
            augment: self.augment,
            host: self.host.clone(),
            init: self.init.clone().map(Some),
            export: self.export.clone().map(Some),
            trace: self.trace.clone().map(Some),
            envs: self.envs,
            devices: self.devices.clone(),
            threads: self.threads,
            rounds: self.rounds,
            steps: self.steps,
            batch: self.batch,
            max_batches: self.max_batches,
            lr: self.lr,
            momentum: self.momentum,
            weight_decay: self.weight_decay,
            clip_norm: self.clip_norm,
            controller: self.controller.clone(),
            reward: self.reward,
            policy: self.policy.clone().map(Some),
            policy_hidden: self.policy_hidden,
            slots: self.slots.clone(),
            max_modules: self.max_modules,
            min_training_steps: self.min_training_steps,
            min_contribution: self.min_contribution,
            plateau_steps: self.plateau_steps,
            plateau_gain: self.plateau_gain,
            tempo: self.tempo,
            log_batches: self.log_batches.then_some(true),
            hot_scope: self.hot_scope,
            checkpoint_every: self.checkpoint_every,
        }
    }
}

/// A look inside.
#[derive(Debug, Args)]
pub(crate) struct InsightArguments {
    /// Write what happened when, for ui.perfetto.dev or chrome://tracing
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Print who used how much device memory
    #[arg(long)]
    pub(crate) memory: bool,
}

/// Which dataset.
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct DatasetArguments {
    /// embedded, fashion-mnist, cifar10, cifar100, folder or arrays
    #[arg(long, default_value = "embedded")]
    pub(crate) dataset: String,
    /// Folder (or file) of the dataset
    #[arg(long, value_name = "DIR")]
    pub(crate) data_root: Option<PathBuf>,
    /// Count and leave out images that do not decode
    #[arg(long)]
    pub(crate) skip_bad: bool,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct EvalArguments {
    /// Weights file (safetensors)
    #[arg(long, value_name = "FILE")]
    pub(crate) weights: PathBuf,
    /// Host; needed only for a file without topology [default: the file's]
    #[arg(long)]
    pub(crate) host: Option<String>,
    #[command(flatten)]
    pub(crate) dataset: DatasetArguments,
    /// train or test
    #[arg(long, default_value = "test")]
    pub(crate) split: String,
    /// Samples in a batch
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) batch: usize,
    /// Device
    #[arg(long, default_value = "cpu")]
    pub(crate) device: String,
    /// Worker threads, 0 for one per core
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) threads: usize,
    #[command(flatten)]
    pub(crate) insight: InsightArguments,
    /// Print {"loss":…,"accuracy":…,"samples":…}
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// Say what a dataset holds; without --dataset, what there is.
    Info(InfoArguments),
    /// Decode every image, and list what is damaged.
    Verify(VerifyArguments),
    /// Convert class folders (train/CLASS/*, test/CLASS/*) into the CIFAR-10 binary layout.
    Import(ImportArguments),
    /// Print which samples each env gets: the order that training follows.
    Plan(PlanArguments),
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct InfoArguments {
    /// embedded, fashion-mnist, cifar10, cifar100, folder or arrays
    #[arg(long)]
    pub(crate) dataset: Option<String>,
    /// Folder (or file) of the dataset
    #[arg(long, value_name = "DIR")]
    pub(crate) data_root: Option<PathBuf>,
    /// Count and leave out images that do not decode
    #[arg(long)]
    pub(crate) skip_bad: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct VerifyArguments {
    #[command(flatten)]
    pub(crate) dataset: DatasetArguments,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct ImportArguments {
    /// Folder with train/CLASS/* and test/CLASS/*
    #[arg(long, value_name = "DIR", alias = "data-root")]
    pub(crate) from: PathBuf,
    /// Folder to write into
    #[arg(long, value_name = "DIR", alias = "out")]
    pub(crate) to: PathBuf,
    /// Count and leave out images that do not decode
    #[arg(long)]
    pub(crate) skip_bad: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct PlanArguments {
    /// Samples in the dataset
    #[arg(long, value_name = "N")]
    pub(crate) len: usize,
    /// Samples per env and batch
    #[arg(long, value_name = "N")]
    pub(crate) batch: usize,
    /// Device of each env
    #[arg(long, value_name = "LIST", value_delimiter = ',', required = true)]
    pub(crate) devices: Vec<String>,
    /// Seed of the order
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// Epochs to print
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) epochs: u64,
    /// Leave out a last batch that is not full
    #[arg(long)]
    pub(crate) drop_last: bool,
    /// Shuffle every epoch, or serve file order: on or off
    #[arg(long, value_name = "on|off", default_value = "on")]
    pub(crate) shuffle: Switch,
    /// Batches of an epoch, or all
    #[arg(long, value_name = "N", default_value = "all")]
    pub(crate) max_batches: Limit,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArguments {
    /// Print [{"name":…,"ok":…,"figure":…,"remedy":…,"seconds":…}, …]
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Images per second of training: gather, forward, backward and update, on resident data.
    Host(BenchHostArguments),
    /// Validation of a host in all configurations of its modules: in one pass, and in a pass each.
    Counterfactual(BenchCounterfactualArguments),
    /// Microseconds per gathered batch of 128 images of 3x32x32 bytes.
    Gather(BenchGatherArguments),
    /// The convolutions of a host in NHWC, which training uses, and in NCHW: that results agree, and both times.
    Format(BenchFormatArguments),
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct BenchHostArguments {
    /// Host description
    #[arg(long, default_value = "baseline")]
    pub(crate) host: String,
    /// Hosts trained side by side
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) envs: usize,
    /// Samples per env and batch
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) batch: usize,
    /// Worker threads, 0 for one per core
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) threads: usize,
    /// Seconds to measure, after a warm-up
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    pub(crate) seconds: f64,
    #[command(flatten)]
    pub(crate) insight: InsightArguments,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct BenchCounterfactualArguments {
    /// Host description
    #[arg(long, default_value = "baseline")]
    pub(crate) host: String,
    /// Slots with a live module
    #[arg(long, value_name = "LIST", default_value = "r0c0,r0c1,r0c2")]
    pub(crate) slots: String,
    /// What grows in them
    #[arg(long, default_value = "conv_light")]
    pub(crate) blueprint: String,
    /// Samples in a batch
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) batch: usize,
    /// Seconds to measure, after a warm-up
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    pub(crate) seconds: f64,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct BenchGatherArguments {
    /// Samples in a batch
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) batch: usize,
    /// Seconds to measure, after a warm-up
    #[arg(long, value_name = "S", default_value_t = 3.0)]
    pub(crate) seconds: f64,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct BenchFormatArguments {
    /// Host description
    #[arg(long, default_value = "baseline")]
    pub(crate) host: String,
    /// Samples in a batch
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) batch: usize,
    /// Seconds to measure, after a warm-up
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    pub(crate) seconds: f64,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_setting_of_a_file_is_a_flag() {
        let command = Arguments::command();
        let train = command.find_subcommand("train").unwrap();
        for key in Layer::KEYS {
            let flag = key.replace('_', "-");
            assert!(train.get_arguments().any(|a| a.get_long() == Some(&flag)), "--{flag}");
        }
    }
}

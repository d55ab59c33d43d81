//! The command line: parsing only. `commands` and the configuration of the training crate check
//! combinations of flags.

mod base_path;
mod bench;
mod control;
mod data;
mod export;
mod growth;
mod host;
mod runs;
mod settings;
mod sweep;
mod train;

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use meristem::data::{DatasetSpec, MissingValues, Source, TableOptions};
use meristem::device::DeviceId;
use meristem::nn::Precision;
use meristem::train::config::check_precision;
use meristem::train::dataset_spec;
use meristem::train::settings::Normalize;

#[cfg(feature = "serve")]
pub(crate) use self::base_path::BasePath;
pub(crate) use self::bench::{
    BenchCommArguments, BenchCommand, BenchCounterfactualArguments, BenchGatherArguments,
    BenchHostArguments, Transport,
};
pub(crate) use self::control::{ControlCommand, ControlEvalArguments, TrainPolicyArguments};
pub(crate) use self::data::{
    CacheArguments, DataCommand, ImportArguments, InfoArguments, PlanArguments, VerifyArguments,
};
pub(crate) use self::export::{
    CsvArguments, ExportCommand, OnnxArguments, ParquetArguments, Table, TensorboardArguments,
};
pub(crate) use self::growth::{GrowthBenchArguments, GrowthCommand};
pub(crate) use self::host::{HostCommand, HostShowArguments};
pub(crate) use self::runs::{
    CompareArguments, ReportArguments, RunsArguments, RunsCommand, ServeArguments,
    VerifyRunsArguments, WatchArguments,
};
pub(crate) use self::settings::SettingArguments;
pub(crate) use self::sweep::{ReplayArguments, SweepArguments, SweepCommand};
pub(crate) use self::train::TrainArguments;
use crate::environment::HELP;
use crate::failure::EXIT_CODES;
use crate::plain::listed;

/// Train fleets of small neural networks that grow while they train.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100, after_help = format!("{HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train hosts side by side and let them grow.
    ///
    /// Flags override the configuration file, and the file overrides the preset. The config.toml in
    /// the run folder has all settings of the run.
    Train(Box<TrainArguments>),
    /// Train members with different settings side by side, and rank them.
    ///
    /// A sweep is a run whose envs are members with different settings: given, or drawn from a
    /// space. A scheduler ends the worst early, or lets them copy the best. The run ends with a
    /// leaderboard.
    Sweep(Box<SweepArguments>),
    /// List runs, compare them, and write reports about them.
    ///
    /// A run is running, complete, stopped, failed, or killed (its process ended without a
    /// summary). `train --resume` continues stopped and killed runs. Accuracies and parameters are
    /// means over the envs. Run folders are not changed.
    Runs(RunsArguments),
    /// Show a run on the terminal, also in progress: envs, hosts, curves, policy, incidents.
    ///
    /// The view only reads the run folder, so it does not slow the run and works over a shared
    /// folder. The last line lists the keys.
    Watch(WatchArguments),
    /// Show runs in the browser: a list, live pages of runs, comparisons.
    ///
    /// The command needs a build with `--features serve`. The server only reads run folders. By
    /// default it accepts connections from this machine only; for another --bind address, and with
    /// --token, it prints a URL with an access token. Ctrl-C ends the server.
    Serve(ServeArguments),
    /// Export runs and networks to other tools.
    #[command(subcommand)]
    Export(ExportCommand),
    /// Evaluate weights on a split of a dataset: those of a file, or of all networks of a run.
    ///
    /// With --weights the dataset is the embedded one by default. With --ensemble it is the run's;
    /// the mean of the networks' predictions is compared with the single networks, by score, loss
    /// and expected calibration error.
    Eval(Box<EvalArguments>),
    /// Compare controllers, which decide what grows.
    #[command(subcommand)]
    Control(ControlCommand),
    /// Measure what growth is worth.
    #[command(subcommand)]
    Growth(GrowthCommand),
    /// Inspect datasets: describe, verify, convert, print the order of samples.
    #[command(subcommand)]
    Data(DataCommand),
    /// Describe hosts, the networks in which modules grow.
    #[command(subcommand)]
    Host(HostCommand),
    /// Check this machine and this build: one line per check, ok or FAIL with a remedy.
    ///
    /// The checks cover residency, memory format, aliasing, determinism, streams under load, memory
    /// leaks and hot scopes. The exit code is 0 only if all checks pass.
    Check(CheckArguments),
    /// Measure speed on this machine.
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Print completions for a shell, such as: meristem completions bash > ~/.bash_completion.
    Completions {
        /// Shell to complete commands and flags in
        shell: Shell,
    },
    /// Write a manual page for every command.
    Man {
        /// Folder to write the pages to
        #[arg(value_name = "DIR", default_value = "man")]
        folder: PathBuf,
    },
}

impl Command {
    /// Whether to print only warnings and errors.
    pub(crate) fn is_quiet(&self) -> bool {
        match self {
            Command::Train(arguments) => arguments.quiet,
            Command::Sweep(arguments) => arguments.train().quiet,
            Command::Control(ControlCommand::Eval(arguments)) => arguments.quiet,
            Command::Control(ControlCommand::TrainPolicy(arguments)) => arguments.quiet,
            Command::Growth(GrowthCommand::Bench(arguments)) => arguments.quiet,
            _ => false,
        }
    }

    /// Whether to log the operations of transports between ranks.
    pub(crate) fn comm_debug(&self) -> bool {
        match self {
            Command::Train(arguments) => arguments.comm_debug,
            Command::Sweep(arguments) => arguments.train().comm_debug,
            Command::Bench(BenchCommand::Comm(arguments)) => arguments.comm_debug,
            _ => false,
        }
    }
}

/// Flags for a trace and for memory by owner.
#[derive(Debug, Args)]
pub(crate) struct InsightArguments {
    /// File to write a trace to, for ui.perfetto.dev or chrome://tracing; must not exist
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Print the device memory of each owner
    #[arg(long)]
    pub(crate) memory: bool,
}

/// Flag for the device of a command.
#[derive(Debug, Args)]
pub(crate) struct DeviceArguments {
    /// Device: cpu, or cuda:N in a build with --features cuda
    #[arg(long, default_value = "cpu")]
    device: String,
}

impl DeviceArguments {
    /// The device.
    ///
    /// # Errors
    /// The flag's value is not the name of a device.
    pub(crate) fn id(&self) -> Result<DeviceId, meristem::device::Error> {
        self.device.parse()
    }
}

/// Flags for the device and the precision of a command that runs networks.
#[derive(Debug, Args)]
pub(crate) struct NetworkArguments {
    #[command(flatten)]
    device: DeviceArguments,
    /// Precision of products, and with bf16 of values in memory; tf32 and bf16 need --device cuda:N
    #[arg(long, default_value = "f32", value_parser = precision())]
    pub(crate) precision: Precision,
}

impl NetworkArguments {
    /// The device.
    ///
    /// # Errors
    /// The flag's value is not the name of a device, or the device does not support the precision.
    pub(crate) fn device(&self) -> meristem::train::Result<DeviceId> {
        let id = self.device.id()?;
        check_precision(self.precision, [id])?;
        Ok(id)
    }
}

fn precision() -> impl TypedValueParser<Value = Precision> {
    let named = |text: String| Precision::ALL.into_iter().find(|known| known.name() == text);
    PossibleValuesParser::new(Precision::ALL.map(Precision::name))
        .map(move |text| named(text).unwrap_or_default())
}

fn missing() -> impl TypedValueParser<Value = MissingValues> {
    let known = MissingValues::NAMES;
    PossibleValuesParser::new(known.map(|(name, _)| name)).map(move |text| {
        let named = known.into_iter().find(|(name, _)| *name == text);
        named.map_or_else(MissingValues::default, |(_, missing)| missing)
    })
}

/// Flags that select a dataset.
#[derive(Debug, Args)]
pub(crate) struct DatasetArguments {
    #[arg(long, help = format!("Dataset: {}", listed(Source::ALL.map(Source::name))))]
    pub(crate) dataset: Option<String>,
    /// Folder of the dataset; with --dataset csv, arrays or table, the file
    #[arg(long, value_name = "DIR")]
    pub(crate) data_root: Option<PathBuf>,
    /// Target columns, with --dataset table; all other columns are features
    #[arg(long, value_name = "COLUMNS", value_delimiter = ',')]
    pub(crate) target: Vec<String>,
    /// Missing values of features, with --dataset table: refuse, or fill
    #[arg(long, value_name = "RULE", default_value_t = MissingValues::Refuse,
        value_parser = missing())]
    pub(crate) missing: MissingValues,
    /// Skip and count images that do not decode and CIFAR records with an invalid label
    #[arg(long)]
    pub(crate) skip_bad: bool,
    /// Rows and columns of all images, with --dataset folder or csv: images of other sizes are cut
    /// to their central square and scaled
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) resize: Option<u32>,
    /// Decode image files without reading or writing the cache of decoded images
    #[arg(long)]
    pub(crate) no_cache: bool,
}

impl DatasetArguments {
    /// The selected dataset, by default the embedded one.
    ///
    /// # Errors
    /// An unknown name.
    pub(crate) fn spec(&self) -> Result<DatasetSpec, meristem::train::Error> {
        let name = self.dataset.as_deref().unwrap_or(Source::Embedded.name());
        dataset_spec(name, self.options())
    }

    /// Whether an option other than the name was given.
    pub(crate) fn is_changed(&self) -> bool {
        let Self { data_root, target, missing, skip_bad, resize, no_cache, .. } = self;
        let by_value = data_root.is_some() || !target.is_empty() || resize.is_some();
        by_value || *missing != MissingValues::Refuse || *skip_bad || *no_cache
    }

    /// Options of the dataset, without its source.
    pub(crate) fn options(&self) -> DatasetSpec {
        let &Self { ref data_root, ref target, missing, skip_bad, resize, no_cache, .. } = self;
        let (root, target) = (data_root.clone(), target.clone());
        let table = TableOptions { target, missing, ..TableOptions::default() };
        DatasetSpec { root, skip_bad, resize, no_cache, table, ..DatasetSpec::embedded() }
    }
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct EvalArguments {
    /// Weights file (safetensors)
    #[arg(long, value_name = "FILE", required_unless_present = "ensemble")]
    pub(crate) weights: Option<PathBuf>,
    /// Run, a folder or its name in the folder runs, whose networks are evaluated as an ensemble:
    /// by default those of the members that made all steps
    #[arg(long, value_name = "RUN")]
    #[arg(conflicts_with_all = ["weights", "host", "normalize", "logits", "trace", "memory"])]
    pub(crate) ensemble: Option<PathBuf>,
    /// Numbers of the members of the ensemble; in a run without members, numbers of envs
    #[arg(long, value_name = "LIST", value_delimiter = ',', requires = "ensemble")]
    #[arg(conflicts_with = "weights")]
    pub(crate) members: Vec<usize>,
    /// Only the K networks with the best control scores
    #[arg(long, value_name = "K", requires = "ensemble", conflicts_with = "weights")]
    pub(crate) top: Option<usize>,
    /// Host of the weights; required only if the file has no topology [default: the file's]
    #[arg(long)]
    pub(crate) host: Option<String>,
    #[command(flatten)]
    pub(crate) dataset: DatasetArguments,
    /// Split to evaluate on: train or test
    #[arg(long, default_value = "test")]
    pub(crate) split: String,
    /// Normalisation of the pixels: data, cifar10, imagenet or 'mean=A,B,C;std=D,E,F' [default: the
    /// constants in the weights file; without them, data]
    #[arg(long, value_name = "CONSTANTS")]
    pub(crate) normalize: Option<Normalize>,
    /// File to write the logits to, as .npy: f32 [samples, classes], in the order of the split;
    /// must not exist
    #[arg(long, value_name = "FILE")]
    pub(crate) logits: Option<PathBuf>,
    /// Samples in a batch
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) batch: usize,
    #[command(flatten)]
    pub(crate) network: NetworkArguments,
    /// Worker threads; 0 means one per core
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) threads: usize,
    #[command(flatten)]
    pub(crate) insight: InsightArguments,
    /// Print {"loss":…,"accuracy":…,"samples":…,"normalization":…}, where normalization is the
    /// source of mean and standard deviation: weights, dataset or given; with --ensemble
    /// {"split":…,"samples":…,"ensemble":…,"best":…,"mean_of_singles":…,"envs":…,"left_out":…}
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArguments {
    /// Names of the checks to run, such as residency or "hot scopes" [default: all]
    #[arg(value_name = "CHECK")]
    pub(crate) checks: Vec<String>,
    #[command(flatten)]
    pub(crate) device: DeviceArguments,
    /// Print [{"name":…,"ok":…,"figure":…,"remedy":…,"seconds":…}, …]
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use meristem::train::config::{FlagForm, all};

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_setting_is_a_flag_whose_help_says_the_default() {
        let command = Arguments::command();
        let train = command.find_subcommand("train").unwrap();
        for setting in all() {
            let flag = train.get_arguments().find(|a| a.get_long() == Some(&setting.flag));
            let help = flag.unwrap().get_help().unwrap().to_string();
            let said = help.contains("[default: ");
            assert_eq!(said, setting.form != FlagForm::Switch, "--{}: {help}", setting.flag);
        }
    }

    /// `control eval` has its own default seed; other defaults differ from `train` only if a
    /// controller learns.
    #[test]
    fn the_help_of_control_eval_has_its_own_defaults() {
        let command = Arguments::command();
        let control = command.find_subcommand("control").unwrap();
        let eval = control.find_subcommand("eval").unwrap();
        let help = |flag: &str| {
            let flag = eval.get_arguments().find(|a| a.get_long() == Some(flag)).unwrap();
            flag.get_help().unwrap().to_string()
        };
        let seed = help("seed");
        assert!(seed.ends_with("[default: 1000]"), "{seed}");
        assert!(help("control-split").ends_with("[default: 0.1]"));
        assert!(help("steps").ends_with("[default: 15, quick 10, full 60]"), "{}", help("steps"));
        for argument in eval.get_arguments() {
            let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
            assert!(!help.contains("does not learn:"), "{help}");
        }
    }

    #[test]
    fn the_help_of_resume_lists_every_setting_that_may_change() {
        let command = Arguments::command();
        let train = command.find_subcommand("train").unwrap();
        let resume = train.get_arguments().find(|a| a.get_long() == Some("resume")).unwrap();
        let help = resume.get_help().unwrap().to_string();
        for setting in all() {
            let flag = format!("--{}", setting.flag);
            let listed = help.split([' ', ',']).any(|word| word == flag);
            assert_eq!(listed, setting.on_resume, "{}: {help}", setting.flag);
        }
    }
}

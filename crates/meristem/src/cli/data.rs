//! Arguments of `meristem data`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use meristem::data::order::EpochMode;
use meristem::train::settings::{BatchLimit, Normalize, Switch, TaskKind};

use super::DatasetArguments;

#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// Describe a dataset; without --dataset, list all datasets and their required files.
    Info(InfoArguments),
    /// Read every sample of a dataset, by default the embedded one, and list the damaged ones.
    Verify(VerifyArguments),
    /// Convert class folders (train/CLASS/*, test/CLASS/*) to the binary layout of CIFAR-10.
    Import(ImportArguments),
    /// Print the samples of each env and batch; `train` with the same --epoch has the same order.
    Plan(PlanArguments),
    /// Show the size of the cache of decoded images on disk, or clear it.
    Cache(CacheArguments),
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct InfoArguments {
    #[command(flatten)]
    pub(crate) dataset: DatasetArguments,
    /// Normalisation to describe: data, cifar10, imagenet or 'mean=A,B,C;std=D,E,F'
    #[arg(long, value_name = "CONSTANTS", default_value_t = Normalize::Data)]
    pub(crate) normalize: Normalize,
    /// Task of the targets: auto, classify, multilabel or regress; an error if the targets have
    /// another. With regress, one target column of whole numbers in a table has numbers, not
    /// classes
    #[arg(long, value_name = "TASK", default_value_t = TaskKind::Auto)]
    pub(crate) task: TaskKind,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct VerifyArguments {
    #[command(flatten)]
    pub(crate) dataset: DatasetArguments,
    /// Task of the targets: auto, classify, multilabel or regress; an error if the targets have
    /// another. With regress, one target column of whole numbers in a table has numbers, not
    /// classes
    #[arg(long, value_name = "TASK", default_value_t = TaskKind::Auto)]
    pub(crate) task: TaskKind,
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
    /// Folder to write to
    #[arg(long, value_name = "DIR", alias = "out")]
    pub(crate) to: PathBuf,
    /// Skip and count images that do not decode
    #[arg(long)]
    pub(crate) skip_bad: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CacheArguments {
    /// Remove all decoded images
    #[arg(long)]
    pub(crate) clear: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct PlanArguments {
    /// Number of samples in the dataset
    #[arg(long, value_name = "N")]
    pub(crate) len: usize,
    /// Samples in a batch of one env
    #[arg(long, value_name = "N")]
    pub(crate) batch: usize,
    /// Device of each env, in the order of the envs: cpu,cpu is two envs on one device. (--devices
    /// of `train` lists each device once.)
    #[arg(long, value_name = "LIST", value_delimiter = ',', required = true)]
    pub(crate) devices: Vec<String>,
    /// Samples of an env in an epoch. full: all samples, in a separate order for each env. dealt:
    /// the samples are divided among the envs of a device
    #[arg(long, value_name = "full|dealt", default_value_t = EpochMode::Full)]
    pub(crate) epoch: EpochMode,
    /// Seed of the order
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// Number of epochs to print
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) epochs: u64,
    /// Leave out an incomplete last batch
    #[arg(long)]
    pub(crate) drop_last: bool,
    /// Shuffle every epoch; off: the order of the files
    #[arg(long, value_name = "on|off", default_value = "on")]
    pub(crate) shuffle: Switch,
    /// Maximum number of batches per epoch, or all
    #[arg(long, value_name = "N", default_value = "all")]
    pub(crate) max_batches: BatchLimit,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

//! What `meristem data` takes.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use meristem::train::settings::{Limit, Switch};

use super::DatasetArguments;

#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// Say what a dataset holds; without --dataset, what there is.
    Info(InfoArguments),
    /// Decode every image (without --dataset: of the embedded one), and list what is damaged.
    Verify(VerifyArguments),
    /// Convert class folders (train/CLASS/*, test/CLASS/*) into the CIFAR-10 binary layout.
    Import(ImportArguments),
    /// Print which samples each env gets: the order that training follows.
    Plan(PlanArguments),
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct InfoArguments {
    #[command(flatten)]
    pub(crate) dataset: DatasetArguments,
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

//! What `meristem bench` takes.

use clap::{Args, Subcommand};

use super::InsightArguments;

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

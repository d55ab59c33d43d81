//! What `meristem bench` takes.

use clap::{Args, Subcommand, ValueEnum};
use meristem::train::settings::ByteSize;

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
    /// Sums over ranks, dense and sparse: time, bandwidth and bytes sent by size and density, every result checked.
    ///
    /// The exit code is not 0 if an element is wrong.
    Comm(BenchCommArguments),
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct BenchCommArguments {
    /// What ranks are; mpi is for builds with that feature: mpirun -n 4 meristem bench comm --comm mpi
    #[arg(long, value_enum, default_value_t = Transport::Threads)]
    pub(crate) comm: Transport,
    /// Number of ranks [default: 2; with mpi as many as were started]
    #[arg(long, value_name = "N")]
    pub(crate) ranks: Option<usize>,
    /// Smallest tensor, in bytes of f32; the next is twice as large
    #[arg(long, value_name = "SIZE", default_value = "1KiB")]
    pub(crate) min_size: ByteSize,
    /// Largest tensor
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub(crate) max_size: ByteSize,
    /// Shares of the elements that each rank sends, of sparse sums; k, the number of them, is rounded down to as many
    /// of each of --ranks regions
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0.001,0.01,0.1")]
    pub(crate) density: Vec<f64>,
    /// Sums of each kind, after one to warm up [default: 5 to 50, by size]
    #[arg(long, value_name = "N")]
    pub(crate) rounds: Option<usize>,
    /// Print how much device memory a first sum of each kind takes, phase by phase
    #[arg(long)]
    pub(crate) memory: bool,
    /// Log to stderr what ranks exchange, and what the MPI library says of it
    #[arg(long)]
    pub(crate) comm_debug: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// What ranks are.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Transport {
    /// Threads of this process
    Threads,
    /// Processes under mpirun
    Mpi,
}

impl Transport {
    /// As on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Transport::Threads => "threads",
            Transport::Mpi => "mpi",
        }
    }
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

//! Arguments of `meristem bench`.

use clap::{Args, Subcommand, ValueEnum};
use meristem::train::settings::ByteSize;

use super::{DeviceArguments, InsightArguments, NetworkArguments};

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Training speed in images per second: gather, forward, backward and update on resident data.
    Host(BenchHostArguments),
    /// Evaluation of a host in all configurations of its modules: in one shared pass, and in
    /// separate passes.
    Counterfactual(BenchCounterfactualArguments),
    /// Gather speed in microseconds per batch of 3x32x32 images.
    Gather(BenchGatherArguments),
    /// Sums over ranks, dense and sparse: time, bandwidth and bytes sent, by size and density.
    ///
    /// Every result is checked; the exit code is 1 if an element is wrong.
    Comm(BenchCommArguments),
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct BenchCommArguments {
    /// Kind of ranks. For mpi, which needs a build with --features mpi, start the command with
    /// mpirun, such as: mpirun -n 4 meristem bench comm --comm mpi. For nccl, with --features cuda,
    /// every process is a rank with the GPU of --device; start the processes with torchrun
    #[arg(long, value_enum, default_value_t = Transport::Threads)]
    pub(crate) comm: Transport,
    /// Number of ranks [default: 2; with mpi and nccl, the number of processes]
    #[arg(long, value_name = "N")]
    pub(crate) ranks: Option<usize>,
    /// Size of the smallest tensor of f32; each further tensor is twice as large
    #[arg(long, value_name = "SIZE", default_value = "1KiB")]
    pub(crate) min_size: ByteSize,
    /// Size of the largest tensor
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub(crate) max_size: ByteSize,
    /// Densities of sparse sums: shares of the elements that each rank sends. The number k of sent
    /// elements is rounded down to a multiple of the number of ranks
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0.001,0.01,0.1")]
    pub(crate) density: Vec<f64>,
    /// Number of measured sums of each kind, after one warm-up [default: 5 to 50, by size]
    #[arg(long, value_name = "N")]
    pub(crate) rounds: Option<usize>,
    #[command(flatten)]
    pub(crate) device: DeviceArguments,
    /// Print the device memory after each phase of the first sum of each kind
    #[arg(long)]
    pub(crate) memory: bool,
    /// Log the exchanges between ranks, and the messages of the MPI library and of NCCL, to stderr
    #[arg(long)]
    pub(crate) comm_debug: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Kind of ranks.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Transport {
    /// Threads of one process
    Threads,
    /// Processes started by mpirun
    Mpi,
    /// Processes with a GPU each, started by torchrun or mpirun
    Nccl,
}

impl Transport {
    /// Name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Transport::Threads => "threads",
            Transport::Mpi => "mpi",
            Transport::Nccl => "nccl",
        }
    }
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct BenchHostArguments {
    /// Host: a preset or a description
    #[arg(long, default_value = "baseline")]
    pub(crate) host: String,
    /// Live modules of each host, such as r0c0=conv_heavy,r0c1=attention:training; modules are in
    /// stage holding by default
    #[arg(long, value_name = "LIST")]
    pub(crate) modules: Option<String>,
    /// Measure validation instead of training: forward pass, loss and accuracy
    #[arg(long)]
    pub(crate) validate: bool,
    /// Read the loss of each env after each batch, as loops in Python often do: the host waits for
    /// the device each time
    #[arg(long)]
    pub(crate) read_losses: bool,
    /// Number of hosts that run concurrently
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) envs: usize,
    /// Samples in a batch of one env
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) batch: usize,
    /// Worker threads; 0 means one per core
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) threads: usize,
    #[command(flatten)]
    pub(crate) network: NetworkArguments,
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
    /// Host: a preset or a description
    #[arg(long, default_value = "baseline")]
    pub(crate) host: String,
    /// Slots that have a live module
    #[arg(long, value_name = "LIST", default_value = "r0c0,r0c1,r0c2")]
    pub(crate) slots: String,
    /// Blueprint of the modules
    #[arg(long, default_value = "conv_light")]
    pub(crate) blueprint: String,
    /// Samples in a batch
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) batch: usize,
    #[command(flatten)]
    pub(crate) network: NetworkArguments,
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
    #[command(flatten)]
    pub(crate) device: DeviceArguments,
    /// Seconds to measure, after a warm-up
    #[arg(long, value_name = "S", default_value_t = 3.0)]
    pub(crate) seconds: f64,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

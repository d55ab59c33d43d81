//! What `meristem train` takes.

use std::path::PathBuf;

use clap::Args;
use meristem::train::config::Layer;
use meristem::train::settings::{CommKind, ControllerKind, ExchangeKind, Telemetry};

use super::SettingArguments;

/// What `train` takes: the settings, and what is the run's own. Of a flag that is given twice the last counts,
/// so that a script can be varied at its end.
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true, args_override_self = true)]
pub(crate) struct TrainArguments {
    /// Where the run is written; must not exist [default: runs/<time>-<name>]
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    run_dir: Option<PathBuf>,
    /// Last part of the default run folder's name
    #[arg(long, help_heading = "Run")]
    name: Option<String>,
    /// Steps between two checkpoints, after one that follows the first step; 0: only between rounds, and where a run is stopped
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
    /// Detail of times and gradient statistics in events: off, basic, or full, which adds the phases of a step and
    /// the gradients of every group. Results do not depend on it: gates and policies see gradients at every level
    /// [default: basic]
    #[arg(long, value_name = "LEVEL", help_heading = "Run")]
    telemetry: Option<Telemetry>,
    /// Steps of a round between two reports of gradient statistics [default: 1]
    #[arg(long, value_name = "N", help_heading = "Run")]
    gradient_stats_every: Option<usize>,
    /// Steps of a round between two reports of times; taking them waits for no device [default: 1]
    #[arg(long, value_name = "N", help_heading = "Run")]
    time_every: Option<usize>,
    /// Write what happened when, for ui.perfetto.dev or chrome://tracing; must not exist
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    trace: Option<PathBuf>,
    /// Print who used how much device memory
    #[arg(long, help_heading = "Run")]
    pub(crate) memory: bool,
    /// Who decides what grows: ppo (learns from round to round), heuristic, random, none, ppo:FILE or greedy:FILE (a policy that does not learn: it
    /// draws its actions, or takes the most probable), or fixed:FILE with an action script
    #[arg(long, help_heading = "Growth")]
    controller: Option<ControllerKind>,
    /// Policy that controller ppo starts from; a new one when absent
    #[arg(long, value_name = "FILE", help_heading = "Growth")]
    policy: Option<PathBuf>,
    /// What ranks are: threads, of this process, or mpi: the processes that mpirun started (in a build with --features mpi)
    #[arg(long, help_heading = "Growth")]
    comm: Option<CommKind>,
    /// Ranks over which controller ppo learns: each acts in its part of the envs, and all exchange gradients; over mpi
    /// there are as many as processes. Or ranks that train one host (--data-parallel)
    #[arg(long, value_name = "N", help_heading = "Growth")]
    ranks: Option<usize>,
    /// What they exchange: dense, or topk:D, gtopk:D, ok-topk:D, auto:D with the share that each rank sends
    #[arg(long, help_heading = "Growth")]
    exchange: Option<ExchangeKind>,
    /// How long ranks wait for each other; give more than a step may take
    #[arg(long, value_name = "SECONDS", help_heading = "Growth")]
    comm_deadline: Option<usize>,
    /// Log to stderr what ranks exchange, and what the MPI library says of it
    #[arg(long, help_heading = "Growth")]
    pub(crate) comm_debug: bool,
    /// Train one host over all ranks, each on its part of every batch; they exchange its gradients
    #[arg(long, help_heading = "Growth")]
    data_parallel: bool,
    #[command(flatten)]
    pub(crate) settings: SettingArguments,
    /// Write the best env's weights here too; must not exist
    #[arg(long, value_name = "FILE", help_heading = "Hosts")]
    export: Option<PathBuf>,
}

impl TrainArguments {
    /// The settings that were given as flags.
    pub(crate) fn layer(&self) -> Layer {
        Layer {
            name: self.name.clone().map(Some),
            run_dir: self.run_dir.clone().map(Some),
            export: self.export.clone().map(Some),
            trace: self.trace.clone().map(Some),
            controller: self.controller.clone(),
            policy: self.policy.clone().map(Some),
            comm: self.comm,
            ranks: self.ranks.map(Some),
            comm_deadline: self.comm_deadline,
            exchange: self.exchange,
            data_parallel: self.data_parallel.then_some(true),
            log_batches: self.log_batches.then_some(true),
            telemetry: self.telemetry,
            gradient_stats_every: self.gradient_stats_every,
            time_every: self.time_every,
            checkpoint_every: self.checkpoint_every,
            ..self.settings.layer()
        }
    }
}

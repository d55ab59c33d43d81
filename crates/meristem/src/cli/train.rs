//! Flags of `meristem train`.

use std::path::PathBuf;

use clap::Args;

use super::SettingArguments;

/// Settings, and flags about this call alone. Of a flag that is given twice the last counts, so that a script can be
/// varied at its end.
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true, args_override_self = true)]
pub(crate) struct TrainArguments {
    /// Go on with a run that was stopped or killed, from its last checkpoint to the same bits
    #[arg(long, value_name = "RUN", help_heading = "Run")]
    pub(crate) resume: Option<PathBuf>,
    /// Print the settings in force as TOML and exit, without a run
    #[arg(long, help_heading = "Run", conflicts_with = "resume")]
    pub(crate) print_config: bool,
    /// Print nothing but errors
    #[arg(long, help_heading = "Run")]
    pub(crate) quiet: bool,
    /// Show what a policy learned in each round: KL, explained variance, entropies of its heads, actions
    #[arg(long, help_heading = "Run")]
    pub(crate) verbose: bool,
    /// Print the summary as JSON on stdout; progress goes to stderr
    #[arg(long, help_heading = "Run")]
    pub(crate) json: bool,
    /// Print how much device memory each owner used
    #[arg(long, help_heading = "Run")]
    pub(crate) memory: bool,
    #[command(flatten)]
    pub(crate) settings: SettingArguments<true>,
    /// Log to stderr the exchanges of ranks, and the messages of the MPI library
    #[arg(long, help_heading = "Ranks")]
    pub(crate) comm_debug: bool,
}

//! Arguments of `meristem train`.

use std::path::PathBuf;

use clap::Args;
use meristem::train::config::all;

use super::SettingArguments;

/// Settings, and flags that apply to this process only.
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct TrainArguments {
    #[arg(long, value_name = "RUN", help_heading = "Run", help = resume_help())]
    pub(crate) resume: Option<PathBuf>,
    /// Print the resolved settings as TOML and exit
    #[arg(long, help_heading = "Run", conflicts_with = "resume")]
    pub(crate) print_config: bool,
    /// Show the run on the whole terminal, as `meristem watch` does. q closes the view, and the run
    /// continues with its usual progress output; Ctrl-C stops the run, which can be resumed. The
    /// view ends with the run
    #[arg(long, help_heading = "Run", conflicts_with_all = ["quiet", "json", "print_config"])]
    pub(crate) watch: bool,
    /// Print only warnings and errors
    #[arg(long, help_heading = "Run", overrides_with = "quiet")]
    pub(crate) quiet: bool,
    /// Print statistics of the policy after each round: KL divergence, explained variance,
    /// entropies, actions
    #[arg(long, help_heading = "Run")]
    pub(crate) verbose: bool,
    /// Print the summary as JSON on stdout, and progress on stderr
    #[arg(long, help_heading = "Run")]
    pub(crate) json: bool,
    /// Print the device memory of each owner
    #[arg(long, help_heading = "Run")]
    pub(crate) memory: bool,
    #[command(flatten)]
    pub(crate) settings: SettingArguments<true>,
    /// Log the exchanges between ranks, and the messages of the MPI library and of NCCL, to stderr
    #[arg(long, help_heading = "Ranks")]
    pub(crate) comm_debug: bool,
}

/// Help of `--resume`, with the settings that it accepts.
fn resume_help() -> String {
    let settings = all().iter().filter(|setting| setting.on_resume);
    let flags: Vec<String> = settings.map(|setting| format!("--{}", setting.flag)).collect();
    format!(
        "Resume the run in folder RUN, which was stopped or killed, from its last checkpoint, with \
         the results of an uninterrupted run. More --steps or --rounds extend a run, even a \
         complete one. The run keeps its settings; of these only {} may be given",
        flags.join(", ")
    )
}

//! Arguments of `meristem runs`.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::base_path::BasePath;
use crate::plot::PlotFile;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct RunsArguments {
    #[command(subcommand)]
    pub(crate) command: Option<RunsCommand>,
    /// Folder to search, four levels deep; or the folder of one run
    #[arg(value_name = "DIR", default_value = "runs")]
    pub(crate) folder: PathBuf,
    /// Print JSON: one object for each run, and the folders that cannot be read
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RunsCommand {
    /// Compare runs: settings that differ, results side by side, curves of control scores.
    Compare(CompareArguments),
    /// Write a report of runs to one HTML file, without scripts or external resources.
    ///
    /// The report has curves, stages of all slots over the steps, the grown networks, contributions
    /// of modules, and the progress of the policy. Runs may be in progress.
    Report(ReportArguments),
    /// Compare every file of runs with its checksum: settings, events, results, weights,
    /// checkpoints.
    ///
    /// The exit code is 1 if a file is damaged or missing. Files of earlier builds have no
    /// checksums and are listed with a note.
    Verify(VerifyRunsArguments),
}

#[derive(Debug, Args)]
pub(crate) struct VerifyRunsArguments {
    /// Folder of a run, or a folder to search, four levels deep
    #[arg(value_name = "RUN")]
    pub(crate) folder: PathBuf,
    /// Print JSON: one object for each file
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CompareArguments {
    /// Folders of two or more runs
    #[arg(value_name = "RUN", num_args = 2.., required = true)]
    pub(crate) runs: Vec<PathBuf>,
    /// File for a plot of control scores over the steps, .svg or .png; must not exist
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PlotFile>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReportArguments {
    /// Folders of the runs
    #[arg(value_name = "RUN", required = true)]
    pub(crate) runs: Vec<PathBuf>,
    /// HTML file to write; must not exist
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    pub(crate) out: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct WatchArguments {
    /// Folder of the run, or its name in runs/ [default: the newest run in runs/, preferring runs
    /// in progress]
    #[arg(value_name = "RUN")]
    pub(crate) run: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArguments {
    /// Folder to search, four levels deep; or the folder of one run
    #[arg(value_name = "DIR", default_value = "runs")]
    pub(crate) folder: PathBuf,
    /// Port to listen on; 0 selects a free one
    #[arg(long, value_name = "N", default_value_t = 8642)]
    pub(crate) port: u16,
    /// IP address to listen on; any but a loopback address requires a token
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1")]
    pub(crate) bind: IpAddr,
    /// Require a token on a loopback address, too, for machines with several users
    #[arg(long)]
    pub(crate) token: bool,
    /// Path of the server behind a proxy, such as /meristem; all links begin with this path, and
    /// the proxy must forward it
    #[arg(long, value_name = "PATH", default_value = "/")]
    pub(crate) base_path: BasePath,
}

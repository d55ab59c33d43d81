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
    /// Compare runs: settings that differ, results side by side, curves of control accuracy.
    Compare(CompareArguments),
    /// Write runs to one HTML file, which needs neither network nor scripts.
    ///
    /// It has curves, stages of all slots over the steps, the grown networks, contributions of
    /// modules, and the development of the policy. Runs in progress are reported, too.
    Report(ReportArguments),
    /// Compare every file of runs with its checksum: settings, events, results, weights,
    /// checkpoints.
    ///
    /// Exits with 1 if a file is damaged or missing. Files of earlier builds have no checksums and
    /// are listed as such.
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
    /// File to plot control accuracy over the steps to, .svg or .png; must not exist
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
    /// Folder of the run, or its name in runs/ [default: the newest one there, one in
    /// progress first]
    #[arg(value_name = "RUN")]
    pub(crate) run: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArguments {
    /// Folder to search, four levels deep; or the folder of one run
    #[arg(value_name = "DIR", default_value = "runs")]
    pub(crate) folder: PathBuf,
    /// Port to listen on; 0 takes any free one
    #[arg(long, value_name = "N", default_value_t = 8642)]
    pub(crate) port: u16,
    /// IP address to listen on; with another one than a loopback address a token is needed
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1")]
    pub(crate) bind: IpAddr,
    /// Need a token on a loopback address, too, as on a machine with other users
    #[arg(long)]
    pub(crate) token: bool,
    /// Path at which a proxy has the server, such as /meristem; all links begin with it, and the
    /// proxy passes it on
    #[arg(long, value_name = "PATH", default_value = "/")]
    pub(crate) base_path: BasePath,
}

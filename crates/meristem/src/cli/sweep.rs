//! Arguments of `meristem sweep`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::TrainArguments;

/// A sweep, or a subcommand about one.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct SweepArguments {
    #[command(subcommand)]
    pub(crate) command: Option<SweepCommand>,
    /// Settings of the sweep, a TOML or JSON file: the settings of train with members, or with a
    /// space and the number of samples. Flags override it
    #[arg(value_name = "FILE", required_unless_present = "resume")]
    #[arg(conflicts_with_all = ["resume", "config"])]
    pub(crate) file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) train: TrainArguments,
}

impl SweepArguments {
    /// The flags that it shares with `train`.
    pub(crate) fn train(&self) -> &TrainArguments {
        match &self.command {
            Some(SweepCommand::Replay(arguments)) => &arguments.train,
            None => &self.train,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum SweepCommand {
    /// Train one member of a sweep again, alone, to the same bits.
    ///
    /// The member is trained from its first step to its last, in population-based training through
    /// all members that it is a copy of. Of the flags of train only those are accepted that results
    /// do not depend on, such as --run-dir.
    Replay(Box<ReplayArguments>),
}

/// The member to train again.
#[derive(Debug, Args)]
pub(crate) struct ReplayArguments {
    /// Folder of the sweep, or its name in the folder runs
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,
    /// Number of the member, counted from 0
    #[arg(value_name = "MEMBER")]
    pub(crate) member: usize,
    #[command(flatten)]
    pub(crate) train: TrainArguments,
}

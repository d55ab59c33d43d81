//! `meristem sweep`.

use meristem::train::config::TrainConfig;
use meristem::train::{self, config_file};

use super::{Outcome, locate, train as training};
use crate::cli::{ReplayArguments, SweepArguments, SweepCommand};
use crate::failure::Failure;

pub(crate) fn run(arguments: &SweepArguments) -> Outcome {
    match (&arguments.command, &arguments.file) {
        (Some(SweepCommand::Replay(replay)), _) => self::replay(replay),
        (None, None) => training::run(&arguments.train),
        (None, Some(file)) => training::run_with(&arguments.train, || {
            let config =
                TrainConfig::resolve(config_file::read(file)?, arguments.train.settings.layer())?;
            if config.members.is_none() {
                let message = format!("{} has neither members nor a space", file.display());
                let remedy =
                    "add [[members]] tables, or [space] and samples; docs/sweeps.md has examples";
                return Err(Failure::usage(message, remedy));
            }
            Ok(config)
        }),
    }
}

fn replay(arguments: &ReplayArguments) -> Outcome {
    let folder = locate(&arguments.run);
    let options = arguments.train.settings.layer();
    training::run_with(&arguments.train, || Ok(train::replay(&folder, arguments.member, options)?))
}

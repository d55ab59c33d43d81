//! `meristem train`.

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;

use meristem::train::config::TrainConfig;
use meristem::train::{self, Summary};

use super::{Outcome, exit_code, print_json, tell_dropped};
use crate::cli::TrainArguments;
use crate::failure::Failure;
use crate::plain;
use crate::progress::{Mode, Progress};
use crate::signals::stop_on_signals;
use crate::table;

/// Results that a stopped run leaves.
const LEFT: &str = "weights and a summary";

pub(crate) fn run(arguments: &TrainArguments) -> Outcome {
    if arguments.print_config {
        return print_config(arguments);
    }
    let mode = mode(arguments);
    let mut progress = Progress::new(mode).verbose(arguments.verbose);
    let summary = match &arguments.resume {
        Some(folder) => resume(folder, arguments, &mut progress)?,
        None => start(arguments, &mut progress)?,
    };
    if !progress.is_of_first_rank() {
        return Ok(exit_code(summary.status));
    }
    if arguments.json {
        print_json(&summary)?;
    }
    let mut report = table::report(&summary);
    if arguments.memory {
        report = format!("{}\n{report}", table::memory(&summary.memory));
    }
    match mode {
        Mode::Quiet => {}
        Mode::LinesOnStderr => plain::err(&report),
        Mode::Lines | Mode::Bars => plain::out(&report),
    }
    summary.trace.as_ref().inspect(|trace| tell_dropped(trace));
    Ok(exit_code(summary.status))
}

/// Prints the `config.toml` that a run would write.
fn print_config(arguments: &TrainArguments) -> Outcome {
    let config = resolve(arguments)?.with_policy()?;
    plain::out(config.resolved_toml().trim_end());
    Ok(ExitCode::SUCCESS)
}

fn resolve(arguments: &TrainArguments) -> Result<TrainConfig, Failure> {
    Ok(TrainConfig::resolve(arguments.settings.file()?, arguments.settings.layer())?)
}

fn start(arguments: &TrainArguments, progress: &mut Progress) -> Result<Summary, Failure> {
    let config = resolve(arguments)?;
    let _listening = stop_on_signals(LEFT, || {})?;
    Ok(train::run(&config, progress)?)
}

fn resume(
    folder: &Path,
    arguments: &TrainArguments,
    progress: &mut Progress,
) -> Result<Summary, Failure> {
    if arguments.settings.config.is_some() {
        let message =
            "--resume uses the run's own settings, so it cannot be combined with --config";
        let remedy = "leave --config out, or start a new run with --config RUN/config.toml";
        return Err(Failure::usage(message, remedy));
    }
    let _listening = stop_on_signals(LEFT, || {})?;
    let summary = train::resume(folder, &arguments.settings.layer(), progress)?;
    if !progress.has_begun() && progress.is_of_first_rank() {
        let run = folder.display();
        progress.line(&format!("{run} is complete; there is nothing to resume"));
    }
    Ok(summary)
}

fn mode(arguments: &TrainArguments) -> Mode {
    match arguments {
        TrainArguments { quiet: true, .. } => Mode::Quiet,
        TrainArguments { json: true, .. } => Mode::LinesOnStderr,
        _ if std::io::stdout().is_terminal() && std::io::stderr().is_terminal() => Mode::Bars,
        _ => Mode::Lines,
    }
}

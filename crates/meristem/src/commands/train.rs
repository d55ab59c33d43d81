//! `meristem train`.

use std::io::IsTerminal;
use std::path::Path;

use meristem::train::config::{Layer, TrainConfig};
use meristem::train::{self, ResumeOptions, Summary};

use super::{Outcome, exit_code, print_json, tell_dropped};
use crate::cli::TrainArguments;
use crate::failure::Failure;
use crate::plain;
use crate::progress::{Mode, Progress};
use crate::signals::stop_on_signals;
use crate::table;

/// What a run leaves when it is stopped.
const LEFT: &str = "weights and summary";

pub(crate) fn run(arguments: &TrainArguments) -> Outcome {
    let mode = mode(arguments);
    let mut progress = Progress::new(mode);
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

fn start(arguments: &TrainArguments, progress: &mut Progress) -> Result<Summary, Failure> {
    let config = TrainConfig::resolve(arguments.settings.file()?, arguments.layer())?;
    let _listening = stop_on_signals(LEFT, || {})?;
    Ok(train::run(&config, progress)?)
}

fn resume(
    folder: &Path,
    arguments: &TrainArguments,
    progress: &mut Progress,
) -> Result<Summary, Failure> {
    let given = arguments.layer();
    let trace = given.trace.clone().flatten();
    let Layer { threads, device_memory, hot_scope, comm, comm_deadline, .. } = given;
    let device_memory = device_memory.flatten();
    let options = ResumeOptions { threads, device_memory, trace, hot_scope, comm, comm_deadline };
    let other = Layer { threads: None, trace: None, hot_scope: None, ..given };
    let other = Layer { device_memory: None, ..other };
    let other = Layer { comm: None, comm_deadline: None, ..other };
    if arguments.settings.config.is_some() || other != Layer::default() {
        let message = "--resume goes on with the run's own settings";
        let remedy = "leave the others out (--threads, --device-memory, --trace, --hot-scope, --comm and \
                      --comm-deadline may be given), or start a new run with --config RUN/config.toml";
        return Err(Failure::usage(message, remedy));
    }
    let _listening = stop_on_signals(LEFT, || {})?;
    let summary = train::resume(folder, &options, progress)?;
    if !progress.has_begun() && progress.is_of_first_rank() {
        let run = folder.display();
        progress.line(&format!("{run} is complete: there is nothing to go on with"));
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

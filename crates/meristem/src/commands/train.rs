//! `meristem train`.

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;

use meristem::train::config::{Layer, TrainConfig};
use meristem::train::{self, ResumeOptions, Summary};

use super::{Outcome, print_json, tell_dropped};
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
    let summary = match &arguments.resume {
        Some(folder) => resume(folder, arguments, mode)?,
        None => start(arguments, mode)?,
    };
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
    Ok(ExitCode::SUCCESS)
}

fn start(arguments: &TrainArguments, mode: Mode) -> Result<Summary, Failure> {
    let config = TrainConfig::resolve(arguments.settings.file()?, arguments.layer())?;
    stop_on_signals(LEFT, || {})?;
    Ok(train::run(&config, &mut Progress::new(mode))?)
}

fn resume(folder: &Path, arguments: &TrainArguments, mode: Mode) -> Result<Summary, Failure> {
    let given = arguments.layer();
    let trace = given.trace.clone().flatten();
    let options = ResumeOptions { threads: given.threads, trace, hot_scope: given.hot_scope };
    let other = Layer { threads: None, trace: None, hot_scope: None, ..given };
    if arguments.settings.config.is_some() || other != Layer::default() {
        let message = "--resume goes on with the run's own settings";
        let remedy = "leave the others out (--threads, --trace and --hot-scope may be given), or start a new \
                      run with --config RUN/config.toml";
        return Err(Failure::usage(message, remedy));
    }
    stop_on_signals(LEFT, || {})?;
    let mut progress = Progress::new(mode);
    let summary = train::resume(folder, &options, &mut progress)?;
    if !progress.has_begun() {
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

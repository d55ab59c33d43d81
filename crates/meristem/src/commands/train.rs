//! `meristem train`.

use std::io::{stderr, stdout};
use std::path::Path;
use std::process::ExitCode;

use meristem::train::config::TrainConfig;
use meristem::train::events::Event;
use meristem::train::{self, Notice, Observer, Summary};

use super::watch::{TrainingView, has_terminal, restore_screen};
use super::{Outcome, exit_code, print_scores, warn_dropped};
use crate::cli::TrainArguments;
use crate::environment::is_drawable;
use crate::failure::Failure;
use crate::plain;
use crate::progress::{Mode, Progress};
use crate::signals::stop_on_signals;
use crate::table;

/// Results that a stopped run leaves, for messages.
const RESULTS_LEFT: &str = "weights and a summary";

pub(crate) fn run(arguments: &TrainArguments) -> Outcome {
    run_with(arguments, || {
        Ok(TrainConfig::resolve(arguments.settings.file()?, arguments.settings.layer())?)
    })
}

/// Resumes a run if the arguments ask for that, or else starts one with the settings from
/// `resolve`. With `--print-config` only prints these settings.
pub(super) fn run_with(
    arguments: &TrainArguments,
    resolve: impl FnOnce() -> Result<TrainConfig, Failure>,
) -> Outcome {
    if arguments.print_config {
        if !arguments.quiet {
            arguments.settings.note_repeated();
        }
        return print_config(&resolve()?);
    }
    let mode = mode(arguments);
    let progress = Progress::new(mode).verbose(arguments.verbose);
    let mut display = RunDisplay { arguments, progress, view: None };
    let summary = match &arguments.resume {
        Some(folder) => resume(folder, arguments, &mut display),
        None => start(&resolve()?, &mut display),
    };
    // Dropping the display restores the terminal before anything else is printed.
    let RunDisplay { progress, view, .. } = display;
    drop(view);
    let summary = summary?;
    if let Some(folder) = arguments.resume.as_ref().filter(|_| !progress.has_begun())
        && progress.is_of_first_rank()
    {
        let run = plain::shown(folder);
        progress.line(&format!("{run} is complete; there is nothing to resume"));
    }
    if !progress.is_of_first_rank() {
        return Ok(exit_code(summary.status));
    }
    if arguments.json {
        print_scores(&summary, summary.task.score())?;
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
    summary.trace.as_ref().inspect(|trace| warn_dropped(trace));
    Ok(exit_code(summary.status))
}

/// Progress output of the run, or with `--watch` a view.
struct RunDisplay<'a> {
    arguments: &'a TrainArguments,
    progress: Progress,
    view: Option<TrainingView>,
}

impl RunDisplay<'_> {
    /// Opens the view on the run folder. Without a usable terminal, prints progress instead.
    fn open_view(&mut self, folder: &Path) {
        if !has_terminal() {
            return plain::err("note: --watch needs a terminal; progress is printed instead");
        }
        match TrainingView::open(folder) {
            Ok(view) => self.view = Some(view),
            Err(failure) => plain::err(&format!(
                "note: --watch cannot use the terminal, progress is printed instead: {}",
                failure.message()
            )),
        }
    }
}

impl Observer for RunDisplay<'_> {
    fn notice(&mut self, notice: &Notice<'_>) {
        if let Notice::Joined(0) = notice
            && !self.arguments.quiet
        {
            self.arguments.settings.note_repeated();
        }
        self.progress.notice(notice);
        if let (Notice::FolderOpened(folder), true) = (notice, self.arguments.watch) {
            self.open_view(folder);
        }
    }

    fn event(&mut self, event: &Event) {
        self.progress.event(event);
    }

    fn stop_requested(&self) -> bool {
        self.progress.stop_requested()
    }
}

/// Prints the `config.toml` of a run with these settings.
fn print_config(config: &TrainConfig) -> Outcome {
    plain::data(train::with_policy(config)?.resolved_toml().trim_end());
    Ok(ExitCode::SUCCESS)
}

fn start(config: &TrainConfig, display: &mut RunDisplay<'_>) -> Result<Summary, Failure> {
    let _listening = stop_on_signals(RESULTS_LEFT, restore_screen)?;
    Ok(train::run(config, display)?)
}

fn resume(
    folder: &Path,
    arguments: &TrainArguments,
    display: &mut RunDisplay<'_>,
) -> Result<Summary, Failure> {
    if arguments.settings.config.is_some() {
        let message =
            "--resume uses the run's own settings, so it cannot be combined with --config";
        let remedy = "leave --config out, or start a new run with --config RUN/config.toml";
        return Err(Failure::usage(message, remedy));
    }
    let _listening = stop_on_signals(RESULTS_LEFT, restore_screen)?;
    Ok(train::resume(folder, &arguments.settings.layer(), display)?)
}

fn mode(arguments: &TrainArguments) -> Mode {
    match arguments {
        TrainArguments { quiet: true, .. } => Mode::Quiet,
        TrainArguments { json: true, .. } => Mode::LinesOnStderr,
        _ if is_drawable(&stdout()) && is_drawable(&stderr()) => Mode::Bars,
        _ => Mode::Lines,
    }
}

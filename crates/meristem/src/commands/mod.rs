//! The commands, each from parsed arguments to output, with a file or a folder per command.

mod bench_comm;
mod bench_counterfactual;
mod bench_gather;
mod bench_host;
mod bench_modules;
mod check;
mod control_eval;
mod data;
mod eval;
mod export;
mod growth_bench;
mod host;
mod printed_study;
mod runs;
mod serve;
mod shell;
mod sweep;
mod train;
mod train_policy;
mod watch;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use meristem::device::{Device, DeviceId};
use meristem::nn::ScoreKind;
use meristem::train::name_scores;
use meristem::train::summary::{MemorySummary, Status};
use meristem::train::trace::TraceSummary;
use serde::Serialize;

use crate::cli::{BenchCommand, Command, ControlCommand, GrowthCommand, HostCommand};
use crate::failure::{Failure, STOPPED};
use crate::plain::{self, counted};
use crate::table;

/// Exit code of a command, or its failure.
pub(crate) type Outcome = Result<ExitCode, Failure>;

/// Runs a command.
pub(crate) fn run(command: Command) -> Outcome {
    match command {
        Command::Train(arguments) => train::run(&arguments),
        Command::Sweep(arguments) => sweep::run(&arguments),
        Command::Runs(arguments) => runs::run(&arguments),
        Command::Watch(arguments) => watch::run(arguments.run.as_deref()),
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Export(command) => export::run(&command),
        Command::Completions { shell } => shell::completions(shell),
        Command::Man { folder } => shell::man(&folder),
        Command::Eval(arguments) => eval::run(&arguments),
        Command::Control(ControlCommand::Eval(arguments)) => control_eval::run(&arguments),
        Command::Control(ControlCommand::TrainPolicy(arguments)) => train_policy::run(&arguments),
        Command::Growth(GrowthCommand::Bench(arguments)) => growth_bench::run(&arguments),
        Command::Data(command) => data::run(&command),
        Command::Host(HostCommand::Show(arguments)) => host::show(&arguments),
        Command::Check(arguments) => check::run(&arguments),
        Command::Bench(BenchCommand::Host(arguments)) => bench_host::run(&arguments),
        Command::Bench(BenchCommand::Comm(arguments)) => bench_comm::run(&arguments),
        Command::Bench(BenchCommand::Counterfactual(arguments)) => {
            bench_counterfactual::run(&arguments)
        }
        Command::Bench(BenchCommand::Gather(arguments)) => bench_gather::run(&arguments),
    }
}

/// Exit code of a status. A stopped run has a separate code, so that `train && deploy` does not
/// deploy a partially trained model.
fn exit_code(status: Status) -> ExitCode {
    match status {
        Status::Completed => ExitCode::SUCCESS,
        Status::Interrupted => ExitCode::from(STOPPED),
        Status::Failed => ExitCode::FAILURE,
    }
}

/// Finds the folder of a run, given by its path or by its name in `runs`.
pub(crate) fn locate(run: &Path) -> PathBuf {
    let in_runs = Path::new("runs").join(run);
    if !run.exists() && in_runs.exists() { in_runs } else { run.into() }
}

/// Checks the duration of a benchmark.
fn check_seconds(seconds: f64) -> Result<(), Failure> {
    if seconds > 0.0 && seconds <= 3600.0 {
        Ok(())
    } else {
        Err(Failure::value("seconds", seconds, "above 0, at most 3600"))
    }
}

/// Prints a warning on stderr if events are missing in the trace, even with --quiet.
fn warn_dropped(trace: &TraceSummary) {
    if trace.dropped > 0 {
        let (path, dropped) = (plain::shown(&trace.path), plain::thousands(trace.dropped));
        plain::err(&format!(
            "warning: {dropped} events are missing in the trace {path}, because its buffer was full"
        ));
    }
}

/// Describes the device of a benchmark: threads and instruction set, or the GPU.
fn on_device(device: &Device) -> String {
    match device.id() {
        DeviceId::Cpu(_) => {
            format!("{}, {}", counted(device.threads(), ["thread", "threads"]), device.isa())
        }
        id => id.to_string(),
    }
}

/// Prints the output of `--memory` and `--trace`.
fn insight(memory: Option<&MemorySummary>, trace: Option<&TraceSummary>) {
    if let Some(memory) = memory {
        plain::out(&table::memory(memory).to_string());
    }
    if let Some(trace) = trace {
        plain::out(&table::trace(trace));
    }
}

/// Prints a value as one line of JSON.
fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    print_scores(value, ScoreKind::Accuracy)
}

/// Prints a value, whose scores are of `kind`, as one line of JSON.
fn print_scores(value: &impl Serialize, kind: ScoreKind) -> Result<(), Failure> {
    let line = serde_json::to_string(value).map_err(|error| {
        Failure::failed(format!("cannot write the result as JSON: {error}"), "run without --json")
    })?;
    plain::json(&name_scores(line, kind));
    Ok(())
}

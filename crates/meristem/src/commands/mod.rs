//! One file per command: from parsed flags to work and output.

mod bench_gather;
mod bench_host;
mod check;
mod data;
mod eval;
pub(crate) mod synthetic;
mod train;

use std::process::ExitCode;

use serde::Serialize;

use crate::cli::{BenchCommand, Command};
use crate::failure::Failure;
use crate::plain;

/// Result of a command: its exit code.
pub(crate) type Outcome = Result<ExitCode, Failure>;

/// Runs a command.
pub(crate) fn run(command: Command) -> Outcome {
    match command {
        Command::Train(arguments) => train::run(&arguments),
        Command::Eval(arguments) => eval::run(&arguments),
        Command::Data(command) => data::run(&command),
        Command::Check(arguments) => check::run(&arguments),
        Command::Bench(BenchCommand::Host(arguments)) => bench_host::run(&arguments),
        Command::Bench(BenchCommand::Gather(arguments)) => bench_gather::run(&arguments),
    }
}

/// Prints a value as one line of JSON.
fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let line = serde_json::to_string(value).map_err(|error| {
        Failure::failed(format!("the result is not JSON: {error}"), "run without --json")
    })?;
    plain::out(&line);
    Ok(())
}

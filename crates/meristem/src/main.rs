//! The `meristem` command.
#![forbid(unsafe_code)]

mod check;
mod cli;
mod commands;
mod environment;
mod failure;
mod page;
mod plain;
mod plot;
mod progress;
mod signals;
mod synthetic;
mod table;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    // Errors of parsing end here, with clap's message and exit code 2.
    let arguments = cli::Arguments::parse();
    match environment::check_names().and_then(|()| run(arguments)) {
        Ok(code) => code,
        Err(failure) => {
            plain::err(failure.to_string().trim_end());
            ExitCode::from(failure.exit_code())
        }
    }
}

fn run(arguments: cli::Arguments) -> commands::Outcome {
    signals::report_file_size_limit()?;
    // Diagnostics go to stderr, only on request: MERISTEM_LOG=debug.
    let comm_debug = arguments.command.comm_debug();
    if comm_debug {
        environment::let_libraries_log()?;
    }
    let filter = environment::log_filter(comm_debug)?;
    let colours = std::io::stderr().is_terminal();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours);
    log.with_writer(std::io::stderr).init();
    commands::run(arguments.command)
}

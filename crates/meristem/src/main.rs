//! The `meristem` command.
#![forbid(unsafe_code)]

mod check;
mod cli;
mod commands;
mod failure;
mod plain;
mod progress;
mod table;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    // Wrong usage ends here, with clap's message and exit code 2 (U6).
    let arguments = cli::Arguments::parse();
    // Diagnostics go to stderr, and only when they are asked for: MERISTEM_LOG=debug.
    let filter = EnvFilter::try_from_env("MERISTEM_LOG").unwrap_or_else(|_| EnvFilter::new("off"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match commands::run(arguments.command) {
        Ok(code) => code,
        Err(failure) => {
            eprint!("{failure}");
            ExitCode::from(failure.exit_code())
        }
    }
}

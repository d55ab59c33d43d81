//! The `meristem` command.
#![forbid(unsafe_code)]

mod check;
mod cli;
mod commands;
mod environment;
mod failure;
mod notes;
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
use meristem::data::notes::TARGET;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

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
    let log = tracing_subscriber::fmt::layer().with_ansi(colours).with_writer(std::io::stderr);
    let notes = notes::Notes::unless(arguments.command.is_quiet());
    let of_notes = filter_fn(|event| event.target() == TARGET);
    tracing_subscriber::registry()
        .with(notes.with_filter(of_notes))
        .with(log.with_filter(filter))
        .init();
    commands::run(arguments.command)
}

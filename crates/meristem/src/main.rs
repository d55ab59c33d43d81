//! The `meristem` command.
#![forbid(unsafe_code)]

mod check;
mod cli;
mod colours;
mod commands;
mod environment;
mod escape;
mod failure;
mod notes;
mod page;
mod plain;
mod plot;
mod progress;
mod score;
mod signals;
mod synthetic;
mod table;

use std::process::ExitCode;

use clap::Parser;
use meristem::data::notes::TARGET;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use self::failure::Failure;

fn main() -> ExitCode {
    let ended = match cli::Arguments::try_parse() {
        Ok(arguments) => environment::check_names().and_then(|()| run(arguments)),
        Err(error) => Ok(answer(&error)),
    };
    let lost = plain::finish().err().map(|error| {
        let message = format!("cannot write to stdout: {error}");
        Failure::failed(message, "free some space, or write to another disk")
    });
    match (ended, lost) {
        (Err(failure), _) | (Ok(ExitCode::SUCCESS), Some(failure)) => report(&failure),
        (Ok(code), lost) => {
            lost.as_ref().map(report);
            code
        }
    }
}

/// Prints an error.
fn report(failure: &Failure) -> ExitCode {
    plain::err(failure.to_string().trim_end());
    ExitCode::from(failure.exit_code())
}

/// Prints the requested help, or the error of the command line, and returns the exit code, 0 or 2.
fn answer(error: &clap::Error) -> ExitCode {
    if error.use_stderr() {
        plain::err(escaped(error).trim_end());
    } else if environment::is_drawable(&std::io::stdout()) {
        plain::keep_error(error.print());
    } else {
        // By default clap emits styles without a terminal if `CI` is set.
        plain::out(error.render().to_string().trim_end());
    }
    u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Renders the error of the command line from arguments with escaped control characters, so that a
/// quoted argument cannot begin a new line.
fn escaped(error: &clap::Error) -> String {
    let arguments =
        std::env::args_os().map(|argument| plain::printable(&argument.to_string_lossy()));
    let escaped = cli::Arguments::try_parse_from(arguments).err();
    escaped.as_ref().unwrap_or(error).render().to_string()
}

fn run(arguments: cli::Arguments) -> commands::Outcome {
    signals::report_file_size_limit()?;
    let comm_debug = arguments.command.comm_debug();
    if comm_debug {
        environment::enable_library_logs()?;
    }
    let filter = environment::log_filter(comm_debug)?;
    // The debug log goes to stderr, with MERISTEM_LOG or --comm-debug.
    let log = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(|| plain::Log);
    let notes = notes::Notes::unless(arguments.command.is_quiet());
    let only_notes = filter_fn(|event| event.target() == TARGET);
    tracing_subscriber::registry()
        .with(notes.with_filter(only_notes))
        .with(log.with_filter(filter))
        .init();
    commands::run(arguments.command)
}

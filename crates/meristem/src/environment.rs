//! Environment variables of the program: help, and checks of their values.

use std::io::IsTerminal;

use meristem::comm::Communicator;
use meristem::grow::nearest;
use tracing_subscriber::filter::{LevelFilter, Targets};

use crate::failure::Failure;

/// Prefix of Meristem's variables.
const PREFIX: &str = "MERISTEM_";

const LOG: &str = "MERISTEM_LOG";

/// All variables with [`PREFIX`] that the program reads.
const KNOWN: [&str; 5] =
    ["MERISTEM_CACHE", "MERISTEM_ISA", "MERISTEM_LAUNCH_BLOCKING", LOG, "MERISTEM_SANITIZE"];

/// Prefix of the variables of the stand-in for the CUDA driver, which this program does not read.
const STANDIN_PREFIX: &str = "MERISTEM_STANDIN_";

/// Help on the variables.
pub(crate) const HELP: &str = "\
Environment:
  MERISTEM_LOG              Log to stderr: a level such as debug, or target=level;
                            meristem::placement=debug logs the device, stream, shape and type of all
                            tensors of every operation
  MERISTEM_ISA              Instruction set of the kernels: portable, avx2, avx512, avx512-256 or
                            neon
  MERISTEM_LAUNCH_BLOCKING  1: every launch waits for its kernel, to locate a failure
  MERISTEM_CACHE            Folder for compiled CUDA kernels, decoded images and arrays of Python
                            programs; by default meristem in XDG_CACHE_HOME or ~/.cache
  MERISTEM_SANITIZE         1: every launch is checked for races and use after free
  NO_COLOR                  Not empty: `meristem watch` uses no colours";

/// Whether colours are permitted: `NO_COLOR` is not set (<https://no-color.org>).
pub(crate) fn has_colours() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Whether a stream is a terminal with cursor movement, so that lines can be overwritten. With
/// `TERM=dumb`, as in the shells of editors, a terminal has no cursor movement.
pub(crate) fn is_drawable(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && !console::is_dumb()
}

/// Returns an error for an unknown variable with Meristem's prefix.
pub(crate) fn check_names() -> Result<(), Failure> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let ours = names.filter(|n| n.starts_with(PREFIX) && !n.starts_with(STANDIN_PREFIX));
    let unknown = ours.into_iter().find(|n| !KNOWN.contains(&n.as_str()));
    let Some(name) = unknown else { return Ok(()) };
    let known = match nearest(&name, KNOWN) {
        Some(near) => format!("did you mean {near}?"),
        None => format!("the known variables are {}", KNOWN.join(", ")),
    };
    let message = format!("unknown environment variable {name}; {known}");
    Err(Failure::usage(message, "correct it or unset it"))
}

/// Whether a directive has no effect here: a mistyped level or the filter of a span, which
/// `Targets` would parse as a target of another program.
fn has_no_effect(directive: &str) -> bool {
    let word = directive.trim();
    let ours = word.contains('=') || word.starts_with("meristem");
    word.contains('[') || !ours && word.parse::<tracing_subscriber::filter::LevelFilter>().is_err()
}

/// Log targets of `--comm-debug`.
const EXCHANGES: [&str; 2] = ["meristem::comm", "meristem::placement::comm"];

/// Restarts this process with the variables that enable logging in the libraries of the transports,
/// because the libraries read them at the start of a process. Returns if all variables are set.
#[cfg(unix)]
pub(crate) fn enable_library_logs() -> Result<(), Failure> {
    use std::os::unix::process::CommandExt;
    let missing = |(name, _): &(&str, &str)| std::env::var_os(name).is_none();
    let mut missing = Communicator::debug_environment().filter(missing).peekable();
    if missing.peek().is_none() {
        return Ok(());
    }
    let program = std::env::current_exe().map_err(|error| {
        let message = format!("--comm-debug: cannot find the path of this program: {error}");
        Failure::failed(
            message,
            "set the variables of the library (MPI's, NCCL_DEBUG) yourself, without --comm-debug",
        )
    })?;
    let mut command = std::process::Command::new(program);
    command.args(std::env::args_os().skip(1)).envs(missing);
    // `exec` returns only on failure.
    let error = command.exec();
    let message = format!("--comm-debug: cannot restart this program: {error}");
    Err(Failure::failed(
        message,
        "set the variables of the library (MPI's, NCCL_DEBUG) yourself, without --comm-debug",
    ))
}

/// Does nothing, because the libraries are used only on Unix.
#[cfg(not(unix))]
pub(crate) fn enable_library_logs() -> Result<(), Failure> {
    Ok(())
}

/// The log filter from `MERISTEM_LOG`, by default off, with the targets of exchanges between ranks
/// if `comm_debug`.
pub(crate) fn log_filter(comm_debug: bool) -> Result<Targets, Failure> {
    let text = std::env::var_os(LOG).unwrap_or_default();
    let bad = |problem: String| {
        let got = text.to_string_lossy();
        let message = format!("environment variable {LOG}: got `{got}`, {problem}");
        Failure::usage(
            message,
            "set a level such as debug, or target=level such as meristem::placement=debug",
        )
    };
    let filter = match text.to_str() {
        Some("") => Targets::new(),
        Some(directives) if directives.split(',').any(has_no_effect) => {
            return Err(bad(
                "expected a level (off, error, warn, info, debug, trace) or a target of meristem"
                    .into(),
            ));
        }
        Some(directives) => {
            // An empty directive would enable errors of all targets.
            let directives = directives.split(',').map(str::trim).filter(|d| !d.is_empty());
            let directives: Vec<&str> = directives.collect();
            directives.join(",").parse::<Targets>().map_err(|e| bad(e.to_string()))?
        }
        None => return Err(bad("expected valid Unicode".into())),
    };
    let exchanges = EXCHANGES.iter().filter(|_| comm_debug);
    Ok(exchanges.fold(filter, |filter, target| filter.with_target(*target, LevelFilter::DEBUG)))
}

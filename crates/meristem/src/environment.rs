//! The environment variables of the program: what there is, and what is wrong with the ones that are set.

use meristem::comm::Communicator;
use meristem::grow::nearest;
use tracing_subscriber::EnvFilter;

use crate::failure::Failure;

/// Ours begin with this.
const PREFIX: &str = "MERISTEM_";

const LOG: &str = "MERISTEM_LOG";

/// Every variable that something in the program reads.
const KNOWN: [&str; 4] = ["MERISTEM_ISA", "MERISTEM_LAUNCH_BLOCKING", LOG, "MERISTEM_SANITIZE"];

/// What `--help` says of them.
pub(crate) const HELP: &str = "\
Environment:
  MERISTEM_LOG              Log to stderr: a level (debug) or target=level; meristem::placement=debug shows the
                            device, stream, shape and type of every tensor of every operation
  MERISTEM_ISA              Instruction set of the kernels: portable, avx2 or avx512
  MERISTEM_LAUNCH_BLOCKING  1: every launch waits for its kernel, to find the one that fails
  MERISTEM_SANITIZE         1: every launch is checked for races and use after free";

/// Refuses a variable that begins like ours and that nothing reads: it would be set in vain.
pub(crate) fn check_names() -> Result<(), Failure> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let unknown = names.filter(|n| n.starts_with(PREFIX)).find(|n| !KNOWN.contains(&n.as_str()));
    let Some(name) = unknown else { return Ok(()) };
    let known = match nearest(&name, KNOWN) {
        Some(near) => format!("did you mean {near}?"),
        None => format!("there are {}", KNOWN.join(", ")),
    };
    let message = format!("environment variable {name} means nothing here; {known}");
    Err(Failure::usage(message, "correct it or unset it"))
}

/// A word that the filter would take for the target of some other program's events: a mistyped level.
fn is_nothing(directive: &str) -> bool {
    let word = directive.trim();
    let ours = word.contains(['=', '[']) || word.starts_with("meristem");
    !ours && word.parse::<tracing_subscriber::filter::LevelFilter>().is_err()
}

/// Log filter that `--comm-debug` adds.
const COMM_DEBUG: &str = "meristem::comm=debug,meristem::placement::comm=debug";

/// Starts this process anew with the variables that make the libraries of transports log, unless they are set: they
/// read them as a process starts. Returns if there is nothing to set.
#[cfg(unix)]
pub(crate) fn let_libraries_log() -> Result<(), Failure> {
    use std::os::unix::process::CommandExt;
    let missing = |(name, _): &&(&str, &str)| std::env::var_os(name).is_none();
    let mut missing = Communicator::debug_environment().iter().filter(missing).peekable();
    if missing.peek().is_none() {
        return Ok(());
    }
    let program = std::env::current_exe().map_err(|error| {
        let message = format!("--comm-debug: this program cannot be found: {error}");
        Failure::failed(message, "set the library's own variables, and leave --comm-debug out")
    })?;
    let mut command = std::process::Command::new(program);
    command.args(std::env::args_os().skip(1)).envs(missing.copied());
    // Does not return if it does what it is asked for.
    let error = command.exec();
    let message = format!("--comm-debug: this program cannot be started anew: {error}");
    Err(Failure::failed(message, "set the library's own variables, and leave --comm-debug out"))
}

/// The libraries are used on Unix only.
#[cfg(not(unix))]
pub(crate) fn let_libraries_log() -> Result<(), Failure> {
    Ok(())
}

/// Log filter: nothing, or `MERISTEM_LOG`; and exchanges between ranks, if they are asked for.
pub(crate) fn log_filter(comm_debug: bool) -> Result<EnvFilter, Failure> {
    let text = std::env::var_os(LOG).unwrap_or_default();
    let bad = |problem: String| {
        let got = text.to_string_lossy();
        let message = format!("environment variable {LOG}: got `{got}`: {problem}");
        Failure::usage(
            message,
            "set a level such as debug, or target=level such as meristem::placement=debug",
        )
    };
    match text.to_str() {
        Some("") if comm_debug => Ok(EnvFilter::new(COMM_DEBUG)),
        Some("") => Ok(EnvFilter::new("off")),
        Some(directives) if directives.split(',').any(is_nothing) => {
            Err(bad("neither a level (off, error, warn, info, debug, trace) nor a target of ours"
                .into()))
        }
        Some(directives) => {
            let more = if comm_debug { format!(",{COMM_DEBUG}") } else { String::new() };
            EnvFilter::try_new(directives.to_owned() + &more).map_err(|e| bad(e.to_string()))
        }
        None => Err(bad("it is no text".into())),
    }
}

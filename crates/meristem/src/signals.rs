//! What asks the program to end: Ctrl-C, SIGTERM (batch systems, containers), SIGHUP (a terminal that closes).

use std::sync::atomic::Ordering;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use crate::failure::Failure;
use crate::plain;
use crate::progress::STOP;

/// While this lives, signals stop what is done. Afterwards they are ignored: the little that is left is to be done, and
/// `mpirun` sends one to whoever is still telling of an error when another rank has ended with it.
#[must_use]
pub(crate) struct Listening(Handle);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The first signal ends a run at the next step boundary, the second at once, after `at_once`. `what_is_left` is for
/// the message.
///
/// # Errors
/// The system refuses a handler or a thread.
pub(crate) fn stop_on_signals(
    what_is_left: &'static str,
    at_once: impl Fn() + Send + 'static,
) -> Result<Listening, Failure> {
    // What was started with nohup is to survive its terminal.
    let hangup = (!is_ignored(SIGHUP)).then_some(SIGHUP);
    let listen = || {
        let mut signals = Signals::new([SIGINT, SIGTERM].into_iter().chain(hangup))?;
        let listening = Listening(signals.handle());
        let each = move || {
            signals.forever().for_each(|signal| stop(signal, what_is_left, &at_once));
        };
        std::thread::Builder::new().name("signals".into()).spawn(each)?;
        Ok(listening)
    };
    listen().map_err(|error: std::io::Error| {
        Failure::failed(format!("cannot listen for signals: {error}"), "run from another shell")
    })
}

#[expect(
    clippy::disallowed_methods,
    reason = "asked a second time, not to wait for anything is the point"
)]
fn stop(signal: i32, what_is_left: &str, at_once: &impl Fn()) {
    if STOP.swap(true, Ordering::Relaxed) {
        at_once();
        std::process::exit(128 + signal);
    }
    plain::err(&format!("stopping after this step, with {what_is_left}; again to stop at once"));
}

/// Whether whoever started this process had it ignore a signal, where the system tells (Linux).
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

//! What asks the program to end: Ctrl-C, SIGTERM (batch systems, containers), SIGHUP (a terminal that closes).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::{Handle, Signals};

use crate::failure::Failure;
use crate::progress;

/// Signals within this time of the first are one request: `timeout` signals the process and then its group, and a
/// terminal that closes may send two kinds.
const ONE_REQUEST: Duration = Duration::from_secs(1);

/// While this lives, signals stop what is done. Afterwards they are ignored: the little that is left is to be done, and
/// `mpirun` sends one to whoever is still telling of an error when another rank has ended with it.
#[must_use]
pub(crate) struct Listening(Handle);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Lets a write beyond the limit of `ulimit -f` fail with an error that names the file. Without a handler the signal
/// that comes with it would kill the process in silence.
///
/// # Errors
/// The system refuses a handler.
pub(crate) fn report_file_size_limit() -> Result<(), Failure> {
    // Nobody reads the flag: the failed write is reported where it was tried.
    flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).map(drop).map_err(refused)
}

/// The first signal ends a run at the next step boundary; one that comes later than [`ONE_REQUEST`] after it ends the
/// process at once, after `at_once`. `what_is_left` is for the message.
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
            let mut requested = None;
            signals.forever().for_each(|signal| match request(&mut requested, Instant::now()) {
                Request::Stop => progress::request_stop(what_is_left),
                Request::Repeated => {}
                Request::AtOnce => end(signal, &at_once),
            });
        };
        std::thread::Builder::new().name("signals".into()).spawn(each)?;
        Ok(listening)
    };
    listen().map_err(refused)
}

fn refused(error: std::io::Error) -> Failure {
    Failure::failed(format!("cannot listen for signals: {error}"), "run from another shell")
}

/// Meaning of a signal.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    /// The first one: stop at the next step boundary.
    Stop,
    /// The first one once more.
    Repeated,
    /// A second one: do not wait for the step.
    AtOnce,
}

/// Meaning of a signal that comes `now`, where the first was at `requested`.
fn request(requested: &mut Option<Instant>, now: Instant) -> Request {
    match requested {
        None => {
            *requested = Some(now);
            Request::Stop
        }
        Some(first) if now.duration_since(*first) < ONE_REQUEST => Request::Repeated,
        Some(_) => Request::AtOnce,
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "asked a second time, not to wait for anything is the point"
)]
fn end(signal: i32, at_once: &impl Fn()) {
    at_once();
    std::process::exit(128 + signal);
}

/// Whether whoever started this process had it ignore a signal, where the system tells (Linux).
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_repeated_within_a_second_is_one_request() {
        let (start, mut requested) = (Instant::now(), None);
        let mut after = |ms| request(&mut requested, start + Duration::from_millis(ms));
        assert_eq!(after(0), Request::Stop);
        assert_eq!([after(1), after(999)], [Request::Repeated, Request::Repeated]);
        assert_eq!([after(1000), after(5000)], [Request::AtOnce, Request::AtOnce]);
    }
}

//! Handlers of the signals that request the end of the program: SIGINT (Ctrl-C), SIGTERM (batch
//! systems, containers), SIGHUP (a closed terminal).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::{Handle, Signals};

use crate::failure::Failure;
use crate::progress;

/// Time within which further signals count as part of the first request, because one request may
/// send two signals: `timeout` signals the process and then its group, and a closing terminal may
/// signal twice.
const ONE_REQUEST: Duration = Duration::from_secs(1);

/// Guard of the signal handlers. Until it is dropped, signals stop the run. Afterwards signals are
/// ignored, so that the process can finish: `mpirun` signals processes that are still reporting an
/// error when another rank has exited.
#[must_use]
pub(crate) struct SignalGuard(Handle);

impl Drop for SignalGuard {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Installs a handler for SIGXFSZ, so that writes beyond the limit of `ulimit -f` fail with an
/// error that names the file. Without a handler, the signal kills the process silently.
///
/// # Errors
/// The system refuses the handler.
pub(crate) fn report_file_size_limit() -> Result<(), Failure> {
    // The flag is never read, because the failed write itself returns an error.
    flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).map(drop).map_err(refused)
}

/// Installs the signal handlers. The first signal ends the run at the next step boundary, and
/// prints a message with `what_is_left`: the results that a stopped run leaves. A signal at least
/// [`ONE_REQUEST`] later calls `at_once` and exits.
///
/// # Errors
/// The system refuses a handler or a thread.
pub(crate) fn stop_on_signals(
    what_is_left: &'static str,
    at_once: impl Fn() + Send + 'static,
) -> Result<SignalGuard, Failure> {
    // A process started with nohup must survive the end of its terminal.
    let hangup = (!is_ignored(SIGHUP)).then_some(SIGHUP);
    let listen = || {
        let mut signals = Signals::new([SIGINT, SIGTERM].into_iter().chain(hangup))?;
        let listening = SignalGuard(signals.handle());
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
    Failure::failed(
        format!("cannot listen for signals: {error}"),
        "start the program from another shell",
    )
}

/// Meaning of a signal.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    /// First request: stop at the next step boundary.
    Stop,
    /// Part of the first request.
    Repeated,
    /// Second request: exit without waiting for the step.
    AtOnce,
}

/// Meaning of a signal received at `now`, if the first was received at `requested`.
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

#[expect(clippy::disallowed_methods, reason = "a second request ends the process without waiting")]
fn end(signal: i32, at_once: &impl Fn()) {
    at_once();
    std::process::exit(128 + signal);
}

/// Whether the process was started with a signal ignored, if the system reports it (Linux).
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

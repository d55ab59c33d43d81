//! The thread that watches a group whose devices exchange elements directly.
//!
//! A device waits for another device without a limit, and does not detect a lost process. A thread
//! of each rank therefore sends heartbeats over the control transport, about every second, with the
//! progress of the rank's device. The answers report a lost rank. If the device is then in an
//! exchange that does not end, the thread aborts the exchanges: the device fails with the error
//! that names the rank, and threads that wait for results get this error.
//!
//! Invariants
//! - The thread calls neither the driver nor NCCL, which may block until a kernel has ended. A
//!   second thread calls them ([`poll_driver`]). A device whose driver does not answer counts as
//!   waiting.
//! - A rank sends a heartbeat about every second while it is in a group of devices. A silent rank
//!   is lost.
//! - A rank leaves the group when the devices of all ranks have ended as many exchanges as its own
//!   device; until then they may need its data. This wait needs the devices and watching
//!   threads of the other ranks, but no call of theirs. So another rank may meanwhile wait for
//!   this rank elsewhere.
//! - After a loss the current exchange has [`GRACE`] to end, because the lost rank may have sent
//!   its part. Slowness alone aborts nothing, because the other devices can still reach the same
//!   exchange: an exchange that is overdue is reported to the group, and aborted once the group
//!   reports a loss.
//! - The error is stored before the exchanges are aborted, so that no aborted result counts as
//!   valid.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use meristem_device::{CudaError, Error as DeviceError, PeerPlace, PeerProgress, Peers, Stream};

use crate::error::{Error, Result};
use crate::sync::{Arc, Condvar, Mutex, lock, wait_until};
use crate::transport::Transport;
use crate::watch::{ExchangeProblem, GroupStatus, GroupWatch, HEARTBEAT, Heartbeat, endless};

/// Interval between checks of device and group.
const TICK: Duration = Duration::from_millis(50);
/// Time limit for short waits: for an exchange to end after a loss or a panic, for the name of the
/// lost rank after an error of NCCL, for an answer of the driver, and for the end of the threads.
const GRACE: Duration = Duration::from_secs(1);
/// Time for NCCL to leave a group.
const CLOSE: Duration = Duration::from_secs(5);

/// The watching thread, and the thread that calls the driver and NCCL. Dropping this ends both,
/// after all devices have ended their exchanges with this rank. NCCL may hang while it leaves a
/// group with a lost rank, and the driver while a kernel hangs, so both threads are abandoned after
/// a while.
pub(super) struct DeviceWatcher {
    shared: Arc<WatchShared>,
    threads: Vec<JoinHandle<()>>,
    deadline: Duration,
}

struct WatchShared {
    state: Mutex<WatchState>,
    changed: Condvar,
}

/// The end of a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WatchEnd {
    /// After the exchanges of all devices.
    Orderly,
    /// The rank panicked or could not join: exchanges that do not end soon are aborted.
    Broken,
}

struct WatchState {
    closing: Option<WatchEnd>,
    /// Time at which the watch ended.
    finished: Option<Instant>,
    /// Whether the thread that polls the driver and NCCL is running.
    polling: bool,
    /// The error for which exchanges were aborted.
    failure: Option<Error>,
    /// The latest answer of the driver and NCCL, with its time.
    error: Option<Error>,
    answered: Instant,
}

/// Longest time until the cause of an error of NCCL is known; also the longest wait for an orderly
/// end of a watch.
pub(super) fn patience(deadline: Duration) -> Duration {
    deadline.saturating_add(2 * CLOSE)
}

impl DeviceWatcher {
    /// Joins a group of devices and watches it from the start. `membership` counts the groups that
    /// the rank has joined. Waits for the other ranks.
    ///
    /// # Errors
    /// The loss of a rank; the errors of [`Peers::begin`] and [`Peers::connect`].
    pub(super) fn join(
        control: &mut dyn Transport,
        stream: &Stream,
        place: &PeerPlace,
        membership: u64,
    ) -> Result<(Peers, DeviceWatcher)> {
        let (watch, deadline) = (control.watch()?, control.deadline());
        let peers = Peers::begin(stream, place)?;
        let state = WatchState {
            closing: None,
            finished: None,
            polling: true,
            failure: None,
            error: None,
            answered: Instant::now(),
        };
        let shared = Arc::new(WatchShared { state: Mutex::new(state), changed: Condvar::new() });
        let last = Heartbeat { membership, ..Heartbeat::default() };
        let sent = None;
        let view = GroupView {
            watch,
            rank: place.rank,
            deadline,
            loss: None,
            all_ended: false,
            last,
            sent,
        };
        let asked = (peers.clone(), shared.clone());
        let polling = start("nccl, poll", move || {
            let (peers, shared) = asked;
            poll_driver(&peers, &shared);
            drop(peers);
            lock(&shared.state).polling = false;
            shared.changed.notify_all();
        })?;
        let (watched, seen) = (peers.clone(), shared.clone());
        let watches = start("nccl, watch", move || {
            view.watch(&watched, &seen);
            drop(watched);
            lock(&seen.state).finished = Some(Instant::now());
            seen.changed.notify_all();
        });
        // If the watching thread cannot be started, this ends the thread that polls the driver.
        let end = |_: &Error| lock(&shared.state).finished = Some(Instant::now());
        let threads = vec![polling, watches.inspect_err(end)?];
        let watcher = DeviceWatcher { shared, threads, deadline };
        match peers.connect() {
            Ok(()) => Ok((peers, watcher)),
            Err(error) => {
                lock(&watcher.shared.state).closing = Some(WatchEnd::Broken);
                let known = lock(&watcher.shared.state).failure.clone();
                Err(known.unwrap_or_else(|| error.into()))
            }
        }
    }

    /// Returns the error for which exchanges were aborted, as an error of `operation`.
    pub(super) fn check(&self, operation: &'static str) -> Result<()> {
        match &lock(&self.shared.state).failure {
            Some(failure) => Err(failure.at(operation)),
            None => Ok(()),
        }
    }
}

impl Drop for DeviceWatcher {
    fn drop(&mut self) {
        let closing = {
            let mut state = lock(&self.shared.state);
            let broken = thread::panicking();
            let closing = if broken { WatchEnd::Broken } else { WatchEnd::Orderly };
            *state.closing.get_or_insert(closing)
        };
        self.shared.changed.notify_all();
        if self.shared.end_within(closing, self.deadline) {
            // The panic hook has reported a panic of a thread.
            self.threads.drain(..).for_each(|thread| drop(thread.join()));
        }
    }
}

fn start(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    thread::Builder::new().name(name.to_owned()).spawn(body).map_err(|_| Error::Unavailable {
        transport: "nccl",
        reason: "cannot start its thread",
        remedy: "free some memory",
    })
}

/// Body of the second thread: polls the driver and NCCL until the watch has ended.
fn poll_driver(peers: &Peers, shared: &WatchShared) {
    while lock(&shared.state).finished.is_none() {
        peers.poll();
        let error = peers.check_group().err().map(Error::from);
        let mut state = lock(&shared.state);
        (state.error, state.answered) = (error, Instant::now());
        let tick = if state.closing.is_some() { TICK / 10 } else { TICK };
        if state.finished.is_none() {
            drop(wait_until(&shared.changed, state, Instant::now() + tick));
        }
    }
}

/// The error of the driver or NCCL; `None` for other errors.
fn nccl_cause(error: &Error) -> Option<&CudaError> {
    let Error::Device(error) = error else { return None };
    match &**error {
        DeviceError::Cuda { source, .. } => Some(source),
        _ => None,
    }
}

/// Whether NCCL reports that another process is gone.
fn is_loss(error: &Error) -> bool {
    matches!(nccl_cause(error), Some(CudaError::PeerLost { .. }))
}

/// Times of events in a group; `None` for events that have not happened.
struct GroupTimes {
    /// Last time at which an exchange was submitted, begun or ended.
    moved: Instant,
    /// Progress of the device at the previous check.
    before: PeerProgress,
    /// Time of the first error of NCCL.
    broken: Option<Instant>,
    /// Time at which the loss of a rank became known.
    lost: Option<Instant>,
    /// Time at which the watch was asked to end.
    closed: Option<Instant>,
}

/// State of the device, as known to the watching thread.
struct DeviceStatus {
    now: Instant,
    progress: PeerProgress,
    closing: Option<WatchEnd>,
    error: Option<Error>,
    /// Whether the driver does not answer.
    silent: bool,
}

impl DeviceStatus {
    /// Whether some submitted exchanges have not ended.
    fn has_pending(&self) -> bool {
        self.progress.submitted != self.progress.ended
    }

    /// Whether the device may be waiting for other devices. An exchange that is enqueued but not
    /// begun counts only if the driver does not answer; otherwise the device is busy with the work
    /// before it.
    fn waits(&self) -> bool {
        let PeerProgress { submitted, enqueued, reached, ended } = self.progress;
        submitted > enqueued || reached > ended || (self.silent && submitted > ended)
    }

    /// Whether the device waits only for a call of this rank to NCCL. Until the group is
    /// joined this is false, because then all ranks are in a call to NCCL.
    fn is_stuck(&self) -> bool {
        let PeerProgress { submitted, enqueued, reached, ended } = self.progress;
        submitted > enqueued && reached == ended && enqueued > 0
    }

    fn is_loss(&self) -> bool {
        self.error.as_ref().is_some_and(is_loss)
    }
}

impl GroupTimes {
    fn new() -> GroupTimes {
        let (moved, before) = (Instant::now(), PeerProgress::default());
        GroupTimes { moved, before, broken: None, lost: None, closed: None }
    }

    fn record(&mut self, status: &DeviceStatus) {
        if status.progress != self.before {
            (self.before, self.moved) = (status.progress, status.now);
        }
        if status.error.is_some() {
            self.broken.get_or_insert(status.now);
        }
        if status.closing.is_some() {
            self.closed.get_or_insert(status.now);
        }
    }

    /// Whether the device has waited for other devices without progress until the deadline; while
    /// the group closes, whether it has exchanges that do not end; or whether NCCL has reported an
    /// error for that long and now reports a loss.
    fn is_overdue(&self, status: &DeviceStatus, deadline: Duration) -> bool {
        let since = self.closed.map_or(self.moved, |closed| closed.max(self.moved));
        let still = status.now - since >= deadline;
        let lost = status.is_loss() && has_passed(status.now, self.broken, deadline);
        lost || still && (status.waits() || status.closing.is_some() && status.has_pending())
    }
}

/// Whether `moment` is at least `time` ago.
fn has_passed(now: Instant, moment: Option<Instant>, time: Duration) -> bool {
    moment.is_some_and(|moment| now - moment >= time)
}

/// The watching thread's view of the group.
struct GroupView {
    watch: Box<dyn GroupWatch>,
    rank: usize,
    deadline: Duration,
    /// The error with which the group cannot continue.
    loss: Option<Error>,
    /// Whether all devices had ended at least this device's exchanges at the last heartbeat.
    all_ended: bool,
    /// The last heartbeat, and the time at which it was sent.
    last: Heartbeat,
    sent: Option<Instant>,
}

impl GroupView {
    /// Sends a heartbeat if the state has changed or a heartbeat is due, or if the device waits,
    /// has an error or is closing; stores a loss.
    fn heartbeat(&mut self, status: &DeviceStatus, problem: Option<ExchangeProblem>) {
        let (membership, closing) = (self.last.membership, status.closing.is_some());
        let PeerProgress { reached, ended, .. } = status.progress;
        let closing = closing && !status.has_pending();
        let heartbeat = Heartbeat { membership, reached, ended, closing, problem };
        let polling = status.waits() || status.error.is_some() || status.closing.is_some();
        let due = self.sent.is_none_or(|sent| status.now - sent >= HEARTBEAT);
        if polling || due || heartbeat != self.last {
            let news = self.watch.heartbeat(&heartbeat);
            self.all_ended = matches!(news, GroupStatus::Ended);
            if let GroupStatus::Lost(error) = news {
                self.loss.get_or_insert(error);
            }
            (self.last, self.sent) = (heartbeat, Some(status.now));
        }
    }

    fn loss_or(&self, error: impl FnOnce() -> Error) -> Error {
        // Prefer this rank's own error to the broadcast one.
        let own = matches!(&self.loss, Some(Error::RankFailed { rank, .. }) if *rank == self.rank);
        self.loss.clone().filter(|_| !own).unwrap_or_else(error)
    }

    /// Watches until the group is closed and all devices have ended their exchanges, or until the
    /// exchanges are aborted.
    fn watch(mut self, peers: &Peers, shared: &WatchShared) {
        let mut times = GroupTimes::new();
        loop {
            let status = shared.device_status(peers);
            times.record(&status);
            let DeviceStatus { now, closing, .. } = status;
            let failed = status.error.clone().filter(|error| !is_loss(error));
            let failed = failed.filter(|_| has_passed(now, times.broken, GRACE));
            let overdue = times.is_overdue(&status, self.deadline);
            let problem = match &failed {
                Some(error) => Some(ExchangeProblem::Failed(error.to_string())),
                None if overdue && status.is_stuck() => Some(ExchangeProblem::Stuck),
                None if overdue => Some(ExchangeProblem::Overdue),
                None => status.is_loss().then_some(ExchangeProblem::Lost),
            };
            self.heartbeat(&status, problem);
            if self.loss.is_some() {
                times.lost.get_or_insert(now);
            }
            if closing.is_some() && status.error.is_none() && !status.has_pending() {
                let alone = closing == Some(WatchEnd::Broken) || self.loss.is_some();
                if self.all_ended || alone || has_passed(now, times.closed, self.deadline) {
                    drop(self.watch);
                    let end = Instant::now() + CLOSE;
                    return peers.close(&mut || Instant::now() < end);
                }
            }
            let still = has_passed(now, Some(times.moved), GRACE) && status.waits();
            let late = overdue && self.loss.is_some();
            let broken = closing == Some(WatchEnd::Broken) && has_passed(now, times.closed, GRACE);
            if failed.is_some() || late || broken || (still && has_passed(now, times.lost, GRACE)) {
                let error = self.loss_or(|| failed.unwrap_or_else(|| endless(self.deadline)));
                lock(&shared.state).failure = Some(error.clone());
                // No heartbeats from here on, because NCCL may hang.
                drop(self.watch);
                return peers.abort(Arc::new(error));
            }
        }
    }
}

impl WatchShared {
    /// Waits for the end of both threads; returns whether they have ended. An orderly end includes
    /// the last exchanges, at most until the deadline, and the time that NCCL and the driver need
    /// to finish.
    fn end_within(&self, closing: WatchEnd, deadline: Duration) -> bool {
        let begin = Instant::now();
        let mut state = lock(&self.state);
        while state.finished.is_none() || state.polling {
            let at_once = closing == WatchEnd::Broken || state.failure.is_some();
            let end = match state.finished {
                Some(finished) => finished + GRACE,
                None if at_once => begin + GRACE + CLOSE,
                None => begin + patience(deadline),
            };
            if Instant::now() >= end {
                return false;
            }
            state = wait_until(&self.changed, state, Instant::now() + TICK);
        }
        true
    }

    /// State of the device after a tick, which is shorter while the group closes.
    fn device_status(&self, peers: &Peers) -> DeviceStatus {
        let state = lock(&self.state);
        if state.closing.is_some() {
            drop(state);
            thread::sleep(TICK / 10);
        } else {
            drop(wait_until(&self.changed, state, Instant::now() + TICK));
        }
        let (now, state) = (Instant::now(), lock(&self.state));
        let silent = now.saturating_duration_since(state.answered) >= GRACE;
        let (closing, error) = (state.closing, state.error.clone());
        drop(state);
        let progress = peers.progress();
        // After the last exchange other ranks may have left in order, which NCCL may report as an
        // error.
        let idle = progress.submitted == progress.ended;
        let error = error.filter(|error| !idle || nccl_cause(error).is_none());
        DeviceStatus { now, progress, closing, error, silent }
    }
}

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
//!   second thread calls them ([`ask`]). A device whose driver does not answer counts as waiting.
//! - A rank sends a heartbeat about every second while it is in a group of devices. A silent rank
//!   is lost.
//! - A rank leaves the group when the devices of all ranks have ended as many exchanges as its own
//!   device; until then they may need its data. The wait ends without a call by another rank, so
//!   that rank may meanwhile wait for this one elsewhere: only devices and watching threads are
//!   needed.
//! - After a loss the current exchange has [`GRACE`] to end, because the lost rank may have sent
//!   its part. Without a loss, all other devices can still reach every exchange of this device.
//! - The error is stored before the exchanges are aborted, so that no aborted result counts as
//!   valid.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use meristem_device::{CudaError, Error as DeviceError, PeerPlace, PeerProgress, Peers, Stream};

use crate::error::{Error, Result};
use crate::sync::{Arc, Condvar, Mutex, lock, wait_until};
use crate::transport::Transport;
use crate::watch::{GroupWatch, News, PULSE, Pulse, Trouble, endless};

/// Interval between checks of device and group.
const TICK: Duration = Duration::from_millis(50);
/// Time limit for three waits: for an exchange to end after a loss, for the name of the lost rank
/// after an error of NCCL, and for an answer of the driver.
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
enum Closing {
    /// After the exchanges of all devices.
    Orderly,
    /// The rank panicked or could not join: exchanges that do not end soon are aborted.
    Broken,
}

struct WatchState {
    closing: Option<Closing>,
    /// Time at which the watch ended.
    finished: Option<Instant>,
    /// Whether the thread that calls the driver and NCCL is running.
    asking: bool,
    /// The error for which exchanges were aborted.
    failure: Option<Error>,
    /// The latest answer of the driver and NCCL, with its time.
    error: Option<Error>,
    answered: Instant,
}

/// Longest time until the cause of an error of NCCL is known.
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
            asking: true,
            failure: None,
            error: None,
            answered: Instant::now(),
        };
        let shared = Arc::new(WatchShared { state: Mutex::new(state), changed: Condvar::new() });
        let last = Pulse { membership, ..Pulse::default() };
        let sent = None;
        let view =
            GroupView { watch, rank: place.rank, deadline, loss: None, even: false, last, sent };
        let asked = (peers.clone(), shared.clone());
        let asks = start("nccl, ask", move || {
            let (peers, shared) = asked;
            ask(&peers, &shared);
            drop(peers);
            lock(&shared.state).asking = false;
            shared.changed.notify_all();
        })?;
        let (watched, seen) = (peers.clone(), shared.clone());
        let watches = start("nccl, watch", move || {
            view.watch(&watched, &seen);
            drop(watched);
            lock(&seen.state).finished = Some(Instant::now());
            seen.changed.notify_all();
        });
        // If the watching thread cannot be started, the thread `ask` ends.
        let end = |_: &Error| lock(&shared.state).finished = Some(Instant::now());
        let threads = vec![asks, watches.inspect_err(end)?];
        let watcher = DeviceWatcher { shared, threads, deadline };
        match peers.connect() {
            Ok(()) => Ok((peers, watcher)),
            Err(error) => {
                lock(&watcher.shared.state).closing = Some(Closing::Broken);
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
            let closing = if broken { Closing::Broken } else { Closing::Orderly };
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
fn ask(peers: &Peers, shared: &WatchShared) {
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
    before: PeerProgress,
    /// Time of the first error of NCCL.
    broken: Option<Instant>,
    /// Time at which the loss of a rank became known.
    lost: Option<Instant>,
    closed: Option<Instant>,
}

/// State of the device, as known to the watching thread.
struct DeviceStatus {
    now: Instant,
    progress: PeerProgress,
    closing: Option<Closing>,
    error: Option<Error>,
    /// Whether the driver does not answer.
    silent: bool,
}

impl DeviceStatus {
    /// Whether some exchanges have not ended.
    fn exchanges(&self) -> bool {
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

    fn note(&mut self, sight: &DeviceStatus) {
        if sight.progress != self.before {
            (self.before, self.moved) = (sight.progress, sight.now);
        }
        if sight.error.is_some() {
            self.broken.get_or_insert(sight.now);
        }
        if sight.closing.is_some() {
            self.closed.get_or_insert(sight.now);
        }
    }

    /// Whether the device waits for other devices without progress until the deadline; while the
    /// group closes, whether it has exchanges that do not end.
    fn is_overdue(&self, sight: &DeviceStatus, deadline: Duration) -> bool {
        let since = self.closed.map_or(self.moved, |closed| closed.max(self.moved));
        let still = sight.now - since >= deadline;
        let lost = sight.is_loss() && past(sight.now, self.broken, deadline);
        lost || still && (sight.waits() || sight.closing.is_some() && sight.exchanges())
    }
}

/// Whether `moment` is at least `time` ago.
fn past(now: Instant, moment: Option<Instant>, time: Duration) -> bool {
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
    even: bool,
    /// The last heartbeat, and the time at which it was sent.
    last: Pulse,
    sent: Option<Instant>,
}

impl GroupView {
    /// Sends a heartbeat if the state has changed or a heartbeat is due, and stores a loss.
    fn pulse(&mut self, sight: &DeviceStatus, trouble: Option<Trouble>) {
        let (membership, closing) = (self.last.membership, sight.closing.is_some());
        let PeerProgress { reached, ended, .. } = sight.progress;
        let closing = closing && !sight.exchanges();
        let pulse = Pulse { membership, reached, ended, closing, trouble };
        let asks = sight.waits() || sight.error.is_some() || sight.closing.is_some();
        let due = self.sent.is_none_or(|sent| sight.now - sent >= PULSE);
        if asks || due || pulse != self.last {
            let news = self.watch.pulse(&pulse);
            self.even = matches!(news, News::Ended);
            if let News::Lost(error) = news {
                self.loss.get_or_insert(error);
            }
            (self.last, self.sent) = (pulse, Some(sight.now));
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
            let sight = shared.look(peers);
            times.note(&sight);
            let DeviceStatus { now, closing, .. } = sight;
            let failed = sight.error.clone().filter(|error| !is_loss(error));
            let failed = failed.filter(|_| past(now, times.broken, GRACE));
            let overdue = times.is_overdue(&sight, self.deadline);
            let trouble = match &failed {
                Some(error) => Some(Trouble::Failed(error.to_string())),
                None if overdue && sight.is_stuck() => Some(Trouble::Stuck),
                None if overdue => Some(Trouble::Overdue),
                None => sight.is_loss().then_some(Trouble::Lost),
            };
            self.pulse(&sight, trouble);
            if self.loss.is_some() {
                times.lost.get_or_insert(now);
            }
            if closing.is_some() && sight.error.is_none() && !sight.exchanges() {
                let alone = closing == Some(Closing::Broken) || self.loss.is_some();
                if self.even || alone || past(now, times.closed, self.deadline) {
                    drop(self.watch);
                    let end = Instant::now() + CLOSE;
                    return peers.close(&mut || Instant::now() < end);
                }
            }
            let still = past(now, Some(times.moved), GRACE) && sight.waits();
            let late = overdue && self.loss.is_some();
            let broken = closing == Some(Closing::Broken) && past(now, times.closed, GRACE);
            if failed.is_some() || late || broken || (still && past(now, times.lost, GRACE)) {
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
    fn end_within(&self, closing: Closing, deadline: Duration) -> bool {
        let begin = Instant::now();
        let mut state = lock(&self.state);
        while state.finished.is_none() || state.asking {
            let at_once = closing == Closing::Broken || state.failure.is_some();
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
    fn look(&self, peers: &Peers) -> DeviceStatus {
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

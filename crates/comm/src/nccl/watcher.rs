//! The thread that watches a group whose devices exchange elements by themselves.
//!
//! A device waits for another without a limit, and knows nothing of processes. So a thread looks
//! how far this rank's device is, tells the others through the processes' own connection, and
//! learns there that a rank is lost. If the device is then in an exchange that does not end, or has
//! been in one until the deadline, the thread aborts the exchanges: the device fails with the error
//! that names the rank, and whoever waits for a result gets it.
//!
//! Invariants
//! - A rank that leaves in order has ended its exchanges, so the others' end without it.
//! - An exchange that can still end is given [`GRACE`] to do so: the lost rank may have sent its
//!   part before. The device is in no exchange that others cannot reach when nothing is lost.
//! - The error is noted before the exchanges are aborted, so nobody takes their results for good.

use crate::error::{Error, Result};
use crate::sync::{Arc, Condvar, Mutex, lock, wait_until};
use crate::transport::Transport;
use crate::watch::{Pulse, Trouble, Watch};
use meristem_device::{PeerPlace, PeerProgress, Peers, Stream};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time between two looks at the device and the group.
const TICK: Duration = Duration::from_millis(50);
/// Time for which an exchange may go on after a loss, and NCCL's own notice of a failure waits for
/// the name of the rank.
const GRACE: Duration = Duration::from_secs(1);
/// Time in which everything that was sent should be on its way.
const CLOSE: Duration = Duration::from_secs(5);

/// The watching thread, which ends when this is dropped: after all exchanges have ended. NCCL may
/// hang while it ends a group of which a rank is lost, so the thread is left alone after a while.
pub(super) struct Watcher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    deadline: Duration,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    closing: bool,
    finished: bool,
    /// The error for which the exchanges were aborted.
    failure: Option<Error>,
}

impl Watcher {
    /// Joins a group of devices, and begins to watch it. Waits for the other ranks.
    ///
    /// # Errors
    /// The loss of a rank, and the errors of [`Peers::join`].
    pub(super) fn join(
        control: &mut dyn Transport,
        stream: &Stream,
        place: &PeerPlace,
    ) -> Result<(Peers, Watcher)> {
        let (watch, deadline) = (control.watch()?, control.deadline());
        let mut view = View { watch, rank: place.rank, deadline, loss: None, told: 0 };
        let (end, mut next) = (Instant::now() + deadline, Instant::now());
        let joined = Peers::join(stream, place, &mut || {
            let now = Instant::now();
            if now >= next {
                next = now + TICK;
                let trouble = (now >= end).then_some(Trouble::Overdue);
                view.pulse(0, trouble);
            }
            view.loss.is_none()
        });
        let peers = match joined {
            Ok(Some(peers)) => peers,
            Ok(None) => return Err(view.loss_or(endless)),
            Err(error) => return Err(view.name(error.into())),
        };
        let shared = Arc::<Shared>::default();
        let (watched, seen) = (peers.clone(), shared.clone());
        let watch = move || {
            view.watch(&watched, &seen);
            lock(&seen.state).finished = true;
            seen.changed.notify_all();
        };
        let spawned = thread::Builder::new().name("nccl, watch".to_owned()).spawn(watch);
        let thread = spawned.map_err(|_| Error::Unavailable {
            transport: "nccl",
            reason: "cannot start its thread",
            remedy: "free some memory",
        })?;
        Ok((peers, Watcher { shared, thread: Some(thread), deadline }))
    }

    /// Returns the error for which exchanges were aborted, as that of an operation.
    pub(super) fn check(&self, operation: &'static str) -> Result<()> {
        match &lock(&self.shared.state).failure {
            Some(failure) => Err(failure.at(operation)),
            None => Ok(()),
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        lock(&self.shared.state).closing = true;
        self.shared.changed.notify_all();
        // The others learn of a panic only after this, and this rank's exchanges may wait for them.
        if thread::panicking() || !self.shared.ends_within(self.deadline) {
            return;
        }
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported, and leaves nothing to do.
            let _ = thread.join();
        }
    }
}

/// The group as the thread sees it.
struct View {
    watch: Box<dyn Watch>,
    rank: usize,
    deadline: Duration,
    /// The error for which the group cannot continue.
    loss: Option<Error>,
    /// Exchanges that the others know this device has reached.
    told: u64,
}

impl View {
    /// Tells the others, and learns of a loss.
    fn pulse(&mut self, reached: u64, trouble: Option<Trouble>) {
        let loss = self.watch.pulse(&Pulse { reached, trouble });
        self.told = reached;
        self.loss = self.loss.take().or(loss);
    }

    /// The error that names the lost rank behind an error of NCCL, if there is one.
    fn name(&mut self, error: Error) -> Error {
        let end = Instant::now() + GRACE;
        while self.loss.is_none() && Instant::now() < end {
            self.pulse(0, None);
            thread::sleep(TICK);
        }
        self.loss_or(|| error)
    }

    fn loss_or(&self, error: impl FnOnce() -> Error) -> Error {
        // What the others are told of this rank, it knows better.
        let own = matches!(&self.loss, Some(Error::RankFailed { rank, .. }) if *rank == self.rank);
        self.loss.clone().filter(|_| !own).unwrap_or_else(error)
    }

    /// Watches until all exchanges have ended and no more come, or until they are aborted.
    fn watch(mut self, peers: &Peers, shared: &Shared) {
        let (mut before, mut moved) = (PeerProgress::default(), Instant::now());
        let (mut lost, mut broken, mut closed) = (None, None, None);
        loop {
            let closing = shared.rest();
            let (now, progress) = (Instant::now(), peers.progress());
            let PeerProgress { enqueued, reached, ended } = progress;
            if (progress.reached, progress.ended) != (before.reached, before.ended) {
                (before, moved) = (progress, now);
            }
            let error = peers.check_group().err().map(Error::from);
            if closing && error.is_none() && enqueued == ended {
                let end = now + CLOSE;
                return peers.close(&mut || Instant::now() < end);
            }
            if closing && closed.is_none() {
                closed = Some(now);
            }
            // What comes before an exchange on the device does not end either.
            let stuck = closed.is_some_and(|closed| now - moved.max(closed) >= self.deadline);
            if error.is_some() && broken.is_none() {
                broken = Some(now);
            }
            let since = |at: Option<Instant>| at.is_some_and(|at| now - at >= GRACE);
            let failed = since(broken).then_some(error).flatten();
            let waits = reached > ended;
            let trouble = match &failed {
                Some(error) => Some(Trouble::Failed(error.to_string())),
                None if waits && now - moved >= self.deadline => Some(Trouble::Overdue),
                None => None,
            };
            if waits || trouble.is_some() || broken.is_some() || reached != self.told {
                self.pulse(reached, trouble);
            }
            if self.loss.is_some() && lost.is_none() {
                lost = Some(now);
            }
            if failed.is_some() || stuck || (waits && since(lost) && since(Some(moved))) {
                let error = self.loss_or(|| failed.unwrap_or_else(endless));
                lock(&shared.state).failure = Some(error.clone());
                return peers.abort(Arc::new(error));
            }
        }
    }
}

/// The error for an exchange that does not end, though no rank is lost.
fn endless() -> Error {
    Error::Unavailable {
        transport: "nccl",
        reason: "an exchange does not end",
        remedy: "look at its messages (NCCL_DEBUG=INFO)",
    }
}

impl Shared {
    /// Waits for the thread's end: for its last exchanges until the deadline, and, like after a
    /// failure, for what NCCL does when it ends. Whether it has ended.
    fn ends_within(&self, deadline: Duration) -> bool {
        let begin = Instant::now();
        let mut state = lock(&self.state);
        while !state.finished {
            let patience = if state.failure.is_some() { CLOSE } else { deadline + 2 * CLOSE };
            if begin.elapsed() >= patience {
                return false;
            }
            state = wait_until(&self.changed, state, Instant::now() + TICK);
        }
        true
    }

    /// Rests for a tick, or until the group is to be closed; whether it is.
    fn rest(&self) -> bool {
        let state = lock(&self.state);
        if !state.closing {
            return wait_until(&self.changed, state, Instant::now() + TICK).closing;
        }
        drop(state);
        thread::sleep(TICK / 10);
        true
    }
}

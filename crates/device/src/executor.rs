//! The fixed pool of workers that runs ready streams.
//!
//! Invariants
//! - A stream is in the ready list at most once, and only while its state is `Ready` (`queue`).
//! - `active` counts the streams that are not idle; workers end when it is zero and the device is
//!   closed, so all submitted work runs.
//! - At most one worker spins. A thread that adds a stream wakes a sleeper only if no worker spins;
//!   a worker that takes one, and sees more, wakes the next. All of it under one lock, so no
//!   wake-up is lost.
//!
//! The models in `model` check these.

use crate::ground::sync::{
    Arc, AtomicUsize, Condvar, Mutex, ON_WORKER, Ordering, lock, spin_until, wait_on,
};
use crate::queue::{Left, StreamState};
use std::cell::Cell;
use std::collections::VecDeque;

/// Whether the calling thread is a worker of some device.
pub(crate) fn on_worker() -> bool {
    ON_WORKER.with(Cell::get)
}

/// Streams that are ready to run, and the state of the workers.
#[derive(Default)]
struct Ready {
    streams: VecDeque<Arc<StreamState>>,
    active: usize,
    spinning: bool,
    sleeping: usize,
    closed: bool,
}

/// The ready list shared by the workers.
#[derive(Default)]
pub(crate) struct Executor {
    ready: Mutex<Ready>,
    /// Length of the ready list, readable without the lock.
    length: AtomicUsize,
    /// Notified for a stream that no worker is about to take, and at the end.
    wake: Condvar,
}

impl Executor {
    /// Adds a stream that was idle.
    pub(crate) fn start(&self, stream: Arc<StreamState>) {
        self.add(stream, 1);
    }

    /// Adds a stream that was parked, or whose turn is over.
    pub(crate) fn resume(&self, stream: Arc<StreamState>) {
        self.add(stream, 0);
    }

    fn add(&self, stream: Arc<StreamState>, newly_active: usize) {
        let mut ready = lock(&self.ready);
        ready.active += newly_active;
        ready.streams.push_back(stream);
        self.length.store(ready.streams.len(), Ordering::Release);
        let wake = !ready.spinning && ready.sleeping > 0;
        drop(ready);
        if wake {
            self.wake.notify_one();
        }
    }

    /// Whether some stream waits for a worker; may be outdated.
    pub(crate) fn has_ready(&self) -> bool {
        self.length.load(Ordering::Relaxed) > 0
    }

    /// Lets the workers end once all submitted work is done.
    pub(crate) fn close(&self) {
        lock(&self.ready).closed = true;
        self.wake.notify_all();
    }

    /// Body of a worker: runs streams until the device is closed and has no work left.
    pub(crate) fn work(&self) {
        ON_WORKER.with(|on_worker| on_worker.set(true));
        while let Some(stream) = self.next() {
            match stream.run() {
                Left::Parked => {}
                Left::TurnOver => self.resume(stream),
                Left::Idle => {
                    let mut ready = lock(&self.ready);
                    ready.active -= 1;
                    if ready.active == 0 && ready.closed {
                        self.wake.notify_all();
                    }
                }
            }
        }
    }

    /// The next stream to run; `None` when the worker should end.
    fn next(&self) -> Option<Arc<StreamState>> {
        let mut ready = lock(&self.ready);
        let mut may_spin = true;
        loop {
            if let Some(stream) = ready.streams.pop_front() {
                self.length.store(ready.streams.len(), Ordering::Release);
                let more = !ready.streams.is_empty() && !ready.spinning && ready.sleeping > 0;
                drop(ready);
                if more {
                    self.wake.notify_one();
                }
                return Some(stream);
            }
            if ready.closed && ready.active == 0 {
                return None;
            }
            if may_spin && !ready.spinning && !ready.closed {
                ready.spinning = true;
                drop(ready);
                spin_until(|| self.has_ready());
                ready = lock(&self.ready);
                ready.spinning = false;
                may_spin = false;
            } else {
                ready.sleeping += 1;
                ready = wait_on(&self.wake, ready);
                ready.sleeping -= 1;
                may_spin = true;
            }
        }
    }
}

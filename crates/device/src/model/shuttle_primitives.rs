//! Shuttle's primitives under the names of [`crate::ground::sync`].

use std::cell::Cell;
use std::time::Duration;

pub(crate) use shuttle::sync::atomic::{AtomicU64 as AtomicSeq, AtomicUsize};
pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use shuttle::{thread, thread_local};

thread_local! {
    pub(crate) static ON_WORKER: Cell<bool> = Cell::new(false);
}

/// Turns end at once: a clock would make a schedule unrepeatable.
pub(crate) const TURN: Duration = Duration::ZERO;

/// Checks a few times, and yields to other threads in between.
pub(crate) fn spin_until(ready: impl Fn() -> bool) -> bool {
    for _ in 0..2 {
        if ready() {
            return true;
        }
        thread::yield_now();
    }
    ready()
}

/// Same as [`spin_until`].
pub(crate) fn wait_for(ready: impl Fn() -> bool) -> bool {
    spin_until(ready)
}

/// Shuttle does not detect races; the kernels of the models check values.
#[derive(Debug)]
pub(crate) struct RaceCell;

impl RaceCell {
    pub(crate) fn new() -> Self {
        RaceCell
    }

    pub(crate) fn read(&self) {}

    pub(crate) fn write(&self) {}
}

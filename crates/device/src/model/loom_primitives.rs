//! Loom's primitives under the names of [`crate::ground::sync`].

use std::cell::Cell;
use std::time::Duration;

pub(crate) use loom::sync::atomic::{AtomicU64 as AtomicSeq, AtomicUsize};
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use loom::{thread, thread_local};

thread_local! {
    pub(crate) static ON_WORKER: Cell<bool> = Cell::new(false);
}

/// Turns end at once: a clock would make a schedule unrepeatable.
pub(crate) const TURN: Duration = Duration::ZERO;

/// Checks once: the interesting case is a check that comes too early; more checks only cost
/// schedules.
pub(crate) fn spin_until(ready: impl Fn() -> bool) -> bool {
    ready()
}

/// Same as [`spin_until`].
pub(crate) fn wait_for(ready: impl Fn() -> bool) -> bool {
    spin_until(ready)
}

/// Represents the bytes of a block: loom fails on two unordered accesses to it.
#[derive(Debug)]
pub(crate) struct RaceCell(loom::cell::UnsafeCell<()>);

// SAFETY: the cell is empty, and loom checks the accesses to it.
unsafe impl Sync for RaceCell {}

impl RaceCell {
    pub(crate) fn new() -> Self {
        RaceCell(loom::cell::UnsafeCell::new(()))
    }

    pub(crate) fn read(&self) {
        self.0.with(|_| ());
    }

    pub(crate) fn write(&self) {
        self.0.with_mut(|_| ());
    }
}

//! Synchronisation primitives of this crate. Its unit tests can be built with the primitives of a
//! model checker instead (`model`); no other build is affected.
//!
//! [`AtomicSeq`] and [`AtomicUsize`] order memory, and are model-checked. [`AtomicU64`] is for
//! counts and ids, which order nothing: always the standard library's. [`AtomicBool`] is the
//! standard library's, too; where it orders memory (the race sanitizer, NCCL), no model checks it.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(crate) use std::sync::{Arc, OnceLock, Weak};

#[cfg(not(all(test, any(feature = "loom", feature = "shuttle"))))]
pub(crate) use self::real::*;
#[cfg(all(test, any(feature = "loom", feature = "shuttle")))]
pub(crate) use crate::model::primitives::*;

/// Locks, ignoring the poison flag of the standard library: no invariant here spans user code, and
/// panics of kernels are caught and reported by the stream.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits on a condition variable, ignoring the poison flag as [`lock`] does.
pub(crate) fn wait_on<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(not(all(test, any(feature = "loom", feature = "shuttle"))))]
mod real {
    use std::cell::Cell;
    pub(crate) use std::sync::atomic::{AtomicU64 as AtomicSeq, AtomicUsize};
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
    use std::time::{Duration, Instant};
    pub(crate) use std::{thread, thread_local};

    thread_local! {
        /// Whether this thread is a worker of some device.
        pub(crate) static ON_WORKER: Cell<bool> = const { Cell::new(false) };
    }

    /// Time for which a worker stays with one stream while others are ready: a few training steps
    /// of a small network. All steps except the first find the network's memory in the caches.
    pub(crate) const TURN: Duration = Duration::from_millis(10);

    /// Time for which a thread spins for work before it sleeps: about the cost of a wake-up, so
    /// that a short gap costs no wake-up and a long one costs at most twice the optimum.
    const SPIN: Duration = if cfg!(miri) { Duration::ZERO } else { Duration::from_micros(20) };

    /// Time for which a helping worker spins for more parts. It covers the longest steps of a small
    /// network without parts, and the gap between two batches.
    const STAY: Duration = SPIN.saturating_mul(10);

    /// Spins briefly until `ready` holds; returns whether it does.
    pub(crate) fn spin_until(ready: impl Fn() -> bool) -> bool {
        spin(SPIN, ready)
    }

    /// Spins like [`spin_until`], for longer: for a helping worker without other work.
    pub(crate) fn wait_for(ready: impl Fn() -> bool) -> bool {
        spin(STAY, ready)
    }

    fn spin(time: Duration, ready: impl Fn() -> bool) -> bool {
        if ready() {
            return true;
        }
        let start = Instant::now();
        while start.elapsed() < time {
            for _ in 0..16 {
                std::hint::spin_loop();
                if ready() {
                    return true;
                }
            }
        }
        false
    }

    /// Reports accesses to memory to a model checker, which cannot see them itself; does nothing
    /// here.
    #[derive(Debug)]
    pub(crate) struct RaceCell;

    impl RaceCell {
        pub(crate) fn new() -> Self {
            RaceCell
        }

        #[inline(always)]
        pub(crate) fn read(&self) {}

        #[inline(always)]
        pub(crate) fn write(&self) {}
    }
}

//! Synchronisation primitives of this crate. Only unit tests with the feature `shuttle` use the
//! primitives of the model checker instead.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::Ordering;
use std::time::Instant;

#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) use self::real::*;
#[cfg(all(test, feature = "shuttle"))]
pub(crate) use self::shuttled::*;

/// Locks, ignoring poison: a rank that panics in a call reports this by leaving.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits on a condition variable until `end` at the latest.
pub(crate) fn wait_until<'a, T>(
    condition: &Condvar,
    guard: MutexGuard<'a, T>,
    end: Instant,
) -> MutexGuard<'a, T> {
    let left = end.saturating_duration_since(Instant::now());
    let waited = condition.wait_timeout(guard, left);
    waited.unwrap_or_else(std::sync::PoisonError::into_inner).0
}

#[cfg(not(all(test, feature = "shuttle")))]
mod real {
    pub(crate) use std::sync::atomic::AtomicU64;
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
    use std::time::{Duration, Instant};

    /// Time for which a rank spins before it sleeps; about the cost of a wake-up.
    const SPIN: Duration = Duration::from_micros(20);

    /// Spins briefly until `ready` holds.
    pub(crate) fn spin_until(ready: impl Fn() -> bool) {
        let start = Instant::now();
        while !ready() && start.elapsed() < SPIN {
            for _ in 0..16 {
                std::hint::spin_loop();
            }
        }
    }
}

#[cfg(all(test, feature = "shuttle"))]
mod shuttled {
    pub(crate) use shuttle::sync::atomic::AtomicU64;
    pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};

    /// Polls twice, and lets other threads run in between.
    pub(crate) fn spin_until(ready: impl Fn() -> bool) {
        for _ in 0..2 {
            if ready() {
                return;
            }
            shuttle::thread::yield_now();
        }
    }
}

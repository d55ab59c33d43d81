//! The synchronisation primitives of this crate, in one place: a model checker replaces them here.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use std::time::{Duration, Instant};

/// Locks, ignoring the poison flag: a rank that panicked inside of a call says so by leaving.
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
    let (guard, _) =
        condition.wait_timeout(guard, left).unwrap_or_else(std::sync::PoisonError::into_inner);
    guard
}

/// How long a rank looks for the others before it sleeps: about what a wake-up costs.
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

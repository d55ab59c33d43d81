//! The synchronisation primitives of this crate, in one place: a model checker replaces them here.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};

use std::time::{Duration, Instant};

/// Locks, ignoring the poison flag of the standard library: no invariant here spans user code, and
/// panics of kernels are caught and reported by the stream.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits on a condition variable, ignoring the poison flag as [`lock`] does.
pub(crate) fn wait_on<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// How long a thread looks for work before it sleeps: about what a wake-up costs, so that a short
/// gap costs no wake-up and a long one costs no more than twice the best.
const SPIN: Duration = if cfg!(miri) { Duration::ZERO } else { Duration::from_micros(20) };

/// Spins briefly until `ready` holds; whether it does.
pub(crate) fn spin_until(ready: impl Fn() -> bool) -> bool {
    if ready() {
        return true;
    }
    let start = Instant::now();
    while start.elapsed() < SPIN {
        for _ in 0..16 {
            std::hint::spin_loop();
            if ready() {
                return true;
            }
        }
    }
    false
}

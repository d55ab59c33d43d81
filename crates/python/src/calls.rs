//! Calls from Python to the engine: they release the GIL, convert panics to errors, and refuse
//! forked processes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::prelude::*;

use crate::errors::{Failure, Kind};

/// Id of the process that first used the engine; 0 before the first use. Threads and locks of the
/// engine do not survive a fork.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Runs `work` without the GIL. A panic becomes an error.
///
/// # Errors
/// The error of `work`; or the process was forked from one that has used the engine.
pub(crate) fn detached<T, E, F>(py: Python<'_>, work: F) -> PyResult<T>
where
    T: Send,
    E: Into<Failure> + Send,
    F: FnOnce() -> Result<T, E> + Send,
{
    check_process()?;
    py.detach(|| caught(work)).map_err(PyErr::from)
}

/// Runs `work`. A panic becomes an error.
pub(crate) fn caught<T, E: Into<Failure>>(
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, Failure> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(Into::into),
        Err(payload) => {
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or(payload.downcast_ref::<&str>().copied());
            Err(Failure::panic(text.unwrap_or("without a message")))
        }
    }
}

/// Checks that this process is the first one that used the engine.
///
/// # Errors
/// It is a fork of that process.
pub(crate) fn check_process() -> Result<(), Failure> {
    let own = std::process::id();
    match PROCESS.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed) {
        Err(first) if first != own => Err(Failure::usage(
            Kind::State,
            format!("this process was forked from process {first}, which had used meristem"),
            "start processes with `multiprocessing.get_context(\"spawn\")`, or fork before the \
             first use",
        )),
        _ => Ok(()),
    }
}

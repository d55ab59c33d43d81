//! The frame of every function: the machine and its lock, the current context, and results.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use cudarc::driver::sys::CUresult;

use crate::ground::Settings;
use crate::order::{Machine, Point};

static MACHINE: Mutex<Option<Machine>> = Mutex::new(None);

thread_local! {
    /// Handle of the context that is current to the thread, or zero.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// A value, or the error that the function returns.
pub(super) type Answer<T = ()> = Result<T, CUresult>;

/// The error for arguments that make no sense.
pub(super) const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Declares functions of the driver. The body ends in an `Answer`.
macro_rules! driver {
    ($(
        $(#[$doc:meta])*
        fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block
    )*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As for the CUDA driver: a pointer is null, or points to all that the function reads or
        /// writes there.
        #[allow(clippy::too_many_arguments, reason = "the driver decides")]
        #[allow(non_snake_case, reason = "the driver's name")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> CUresult {
            #[allow(unused_unsafe, reason = "not every function has a pointer")]
            let body = || -> crate::driver::call::Answer {
                // SAFETY: pointers come from the caller, who keeps the driver's contract; `write`
                // and `read` refuse null.
                unsafe { $body }
            };
            body().err().unwrap_or(CUresult::CUDA_SUCCESS)
        }
    )*};
}
pub(super) use driver;

/// Makes the machine, if there is none.
pub(super) fn initialise() -> Answer {
    let mut machine = lock();
    if machine.is_none() {
        let settings = Settings::read().map_err(|why| {
            eprintln!("meristem-standin: {why}");
            INVALID
        })?;
        *machine = Some(Machine::new(&settings));
    }
    Ok(())
}

fn lock() -> MutexGuard<'static, Option<Machine>> {
    // A panic in another call has ended the process: nothing unwinds out of these functions.
    MACHINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Works on the machine after `cuInit`.
pub(super) fn machine<T>(work: impl FnOnce(&mut Machine) -> Answer<T>) -> Answer<T> {
    work(lock().as_mut().ok_or(CUresult::CUDA_ERROR_NOT_INITIALIZED)?)
}

/// Works on the machine and the device of the current context, which must not have a fault.
pub(super) fn in_context<T>(work: impl FnOnce(&mut Machine, usize) -> Answer<T>) -> Answer<T> {
    machine(|machine| {
        let current = CURRENT.get();
        let device = machine
            .devices
            .iter()
            .position(|device| device.context == current && device.retained > 0 && current != 0);
        let device = device.ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        machine.healthy(device)?;
        work(machine, device)
    })
}

/// Time between two looks at what other processes have sent.
pub(super) const LOOK: Duration = Duration::from_micros(100);

/// Waits for places in streams. The machine is free for other threads while it needs messages of
/// other processes.
pub(super) fn wait_for(points: &[Point]) -> Answer {
    while !machine(|machine| machine.advance(points))? {
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// Waits for the places that `find` names on the device of the current context; returns the device,
/// which then has no fault.
pub(super) fn wait(find: impl FnOnce(&mut Machine, usize) -> Answer<Vec<Point>>) -> Answer<usize> {
    let (points, device) = in_context(|machine, device| Ok((find(machine, device)?, device)))?;
    wait_for(&points)?;
    machine(|machine| machine.healthy(device))?;
    Ok(device)
}

/// Handle of the current context, or zero.
pub(super) fn current() -> u64 {
    CURRENT.get()
}

/// Changes the current context of this thread.
pub(super) fn set_current(context: u64) {
    CURRENT.set(context);
}

/// Writes a result.
///
/// # Safety
/// `to` is null or may be written to.
pub(super) unsafe fn write<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(INVALID);
    }
    // SAFETY: the caller's contract.
    unsafe { to.write(value) };
    Ok(())
}

/// Reads an argument.
///
/// # Safety
/// `from` is null or points to a value.
pub(super) unsafe fn read<T: Copy>(from: *const T) -> Answer<T> {
    // SAFETY: the caller's contract.
    if from.is_null() { Err(INVALID) } else { Ok(unsafe { from.read() }) }
}

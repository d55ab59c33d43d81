//! The common parts of all functions: the machine and its lock, the current context, and results.

use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use cudarc::driver::sys::CUresult;

use crate::ground::StandinSettings;
use crate::order::{SimMachine, StreamPoint};

static MACHINE: Mutex<Option<SimMachine>> = Mutex::new(None);

thread_local! {
    /// Handle of the context that is current to the thread, or zero.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// A value, or the error that the function returns.
pub(super) type DriverAnswer<T = ()> = Result<T, CUresult>;

/// The error for invalid arguments.
pub(super) const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Declares functions of the driver. The body ends in a `DriverAnswer`.
macro_rules! driver {
    ($(
        $(#[$doc:meta])*
        fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block
    )*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As for the CUDA driver: a pointer is null, or points to memory that the function may
        /// read or write.
        #[allow(clippy::too_many_arguments, reason = "the driver decides")]
        #[allow(non_snake_case, reason = "the driver's name")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> CUresult {
            #[allow(unused_unsafe, reason = "not every function has a pointer")]
            let body = || -> crate::driver::call::DriverAnswer {
                // SAFETY: the caller guarantees the driver's contract for pointers; `write` and
                // `read` refuse null.
                unsafe { $body }
            };
            crate::driver::call::log(stringify!($name));
            body().err().unwrap_or(CUresult::CUDA_SUCCESS)
        }
    )*};
}
pub(super) use driver;

/// Appends the name of a called function to the file in `MERISTEM_STANDIN_CALLS`, if it is set. A
/// test reads the file to count the calls of a step.
pub(super) fn log(function: &str) {
    static FILE: OnceLock<Option<File>> = OnceLock::new();
    let open = || {
        let path = std::env::var_os("MERISTEM_STANDIN_CALLS")?;
        let file = File::options().create(true).append(true).open(&path);
        file.map_err(|why| eprintln!("meristem-standin: {}: {why}", path.display())).ok()
    };
    if let Some(mut file) = FILE.get_or_init(open).as_ref() {
        // A lost line shows in the test.
        let _ = file.write_all(format!("{function}\n").as_bytes());
    }
}

/// Creates the machine, if there is none.
pub(super) fn initialise() -> DriverAnswer {
    let mut machine = lock();
    if machine.is_none() {
        let settings = StandinSettings::read().map_err(|why| {
            eprintln!("meristem-standin: {why}");
            INVALID
        })?;
        *machine = Some(SimMachine::new(&settings));
    }
    Ok(())
}

fn lock() -> MutexGuard<'static, Option<SimMachine>> {
    // A panic in a driver function ends the process: it cannot unwind out of `extern "C"`. A panic
    // in a thread of `nccl` does not, and leaves the machine as it was at that moment.
    MACHINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Works on the machine after `cuInit`.
pub(super) fn machine<T>(work: impl FnOnce(&mut SimMachine) -> DriverAnswer<T>) -> DriverAnswer<T> {
    work(lock().as_mut().ok_or(CUresult::CUDA_ERROR_NOT_INITIALIZED)?)
}

/// Works on the machine and the device of the current context, which must not have a fault.
pub(super) fn in_context<T>(
    work: impl FnOnce(&mut SimMachine, usize) -> DriverAnswer<T>,
) -> DriverAnswer<T> {
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

/// Interval at which messages of other processes are polled.
pub(super) const LOOK: Duration = Duration::from_micros(100);

/// Waits for points in streams. The machine is unlocked while it waits for messages of other
/// processes.
pub(super) fn wait_for(points: &[StreamPoint]) -> DriverAnswer {
    while !machine(|machine| machine.advance(points))? {
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// Waits for the points that `find` returns for the device of the current context; returns the
/// device, which then has no fault.
pub(super) fn wait(
    find: impl FnOnce(&mut SimMachine, usize) -> DriverAnswer<Vec<StreamPoint>>,
) -> DriverAnswer<usize> {
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
pub(super) unsafe fn write<T>(to: *mut T, value: T) -> DriverAnswer {
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
pub(super) unsafe fn read<T: Copy>(from: *const T) -> DriverAnswer<T> {
    // SAFETY: the caller's contract.
    if from.is_null() { Err(INVALID) } else { Ok(unsafe { from.read() }) }
}

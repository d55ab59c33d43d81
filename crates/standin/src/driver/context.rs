//! Contexts: the primary context of each device.

use cudarc::driver::sys::{CUcontext, CUdevice, CUresult};

use super::call::{current, driver, in_context, machine, set_current, wait, write};
use super::device::place;

driver! {
    /// Retains the primary context of a device.
    fn cuDevicePrimaryCtxRetain(pctx: *mut CUcontext, dev: CUdevice) {
        machine(|machine| {
            let device = place(machine, dev)?;
            machine.healthy(device)?;
            let device = &mut machine.devices[device];
            write(pctx, device.context as CUcontext)?;
            device.retained += 1;
            Ok(())
        })
    }

    /// Releases the primary context of a device. The last release destroys all objects of the
    /// context except graphs that are not executable; a fault of the device stays.
    fn cuDevicePrimaryCtxRelease_v2(dev: CUdevice) {
        machine(|machine| {
            let device = place(machine, dev)?;
            let retained = machine.devices[device].retained.checked_sub(1);
            let retained = retained.ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
            machine.devices[device].retained = retained;
            if retained == 0 {
                machine.close(device);
            }
            Ok(())
        })
    }

    /// Makes a context current to the thread; null: none.
    fn cuCtxSetCurrent(ctx: CUcontext) {
        let context = ctx as u64;
        machine(|machine| {
            let known = machine.devices.iter().find(|device| device.context == context);
            if context != 0 && known.is_none_or(|device| device.retained == 0) {
                return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
            }
            set_current(context);
            Ok(())
        })
    }

    /// The context that is current to the thread, or null.
    fn cuCtxGetCurrent(pctx: *mut CUcontext) {
        machine(|_| write(pctx, current() as CUcontext))
    }

    /// The device of the current context.
    fn cuCtxGetDevice(device: *mut CUdevice) {
        in_context(|_, current| write(device, current as CUdevice))
    }

    /// Waits for all work on the device of the current context.
    fn cuCtxSynchronize() {
        wait(|machine, device| Ok(machine.ends(device))).map(drop)
    }
}

//! Memory of devices, and page-locked memory of the host.

use std::ffi::{c_uint, c_void};

use cudarc::driver::sys::{CUdeviceptr, CUresult};

use super::call::{INVALID, driver, in_context, wait, write};
use crate::memory::MemoryKind;

driver! {
    /// Allocates memory of the device, full of poison.
    fn cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytesize: usize) {
        in_context(|machine, device| {
            if bytesize == 0 {
                return Err(INVALID);
            }
            let address = machine.memory.allocate(MemoryKind::Device(device), bytesize);
            write(dptr, address.ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?)
        })
    }

    /// Frees memory of the device after all work that was enqueued on it.
    fn cuMemFree_v2(dptr: CUdeviceptr) {
        if dptr == 0 {
            return in_context(|_, _| Ok(()));
        }
        // Memory of another device is freed after that device's work.
        wait(|machine, device| match machine.memory.owner(dptr, 0) {
            Some(MemoryKind::Device(owner)) => Ok(machine.ends(owner)),
            _ => Ok(machine.ends(device)),
        })?;
        in_context(|machine, _| machine.memory.free(dptr, false).then_some(()).ok_or(INVALID))
    }

    /// Free and total bytes of the device's memory.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        in_context(|machine, device| {
            write(free, machine.memory.available(device))?;
            write(total, machine.memory.capacity())
        })
    }

    /// Allocates page-locked memory of the host, full of poison.
    fn cuMemHostAlloc(pp: *mut *mut c_void, bytesize: usize, Flags: c_uint) {
        in_context(|machine, _| {
            // Portable, mapped and write-combined memory are the same here.
            if bytesize == 0 || Flags > 7 {
                return Err(INVALID);
            }
            let address = machine.memory.allocate(MemoryKind::Pinned, bytesize);
            write(pp, address.ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)? as *mut c_void)
        })
    }

    /// Frees page-locked memory after all work that was enqueued on the device.
    fn cuMemFreeHost(p: *mut c_void) {
        wait(|machine, device| Ok(machine.ends(device)))?;
        in_context(|machine, _| machine.memory.free(p as u64, true).then_some(()).ok_or(INVALID))
    }

    /// Page-locks memory that the host allocated.
    fn cuMemHostRegister_v2(p: *mut c_void, bytesize: usize, Flags: c_uint) {
        in_context(|machine, _| {
            // Portable and mapped memory are the same here.
            if p.is_null() || bytesize == 0 || Flags > 3 {
                return Err(INVALID);
            }
            let registered = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
            machine.memory.register(p as u64, bytesize).then_some(()).ok_or(registered)
        })
    }

    /// Ends the page-locking of registered memory after all work that was enqueued on the device.
    fn cuMemHostUnregister(p: *mut c_void) {
        wait(|machine, device| Ok(machine.ends(device)))?;
        let missing = CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
        in_context(|machine, _| machine.memory.unregister(p as u64).then_some(()).ok_or(missing))
    }
}

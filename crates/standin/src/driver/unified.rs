//! Unified addresses: what an address names, and copies between any two addresses. Meristem calls
//! none of these; a CUDA-aware MPI library does, which loads them from `libcuda.so.1`. Memory
//! cannot be shared between processes here.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{
    CUdevice, CUdeviceptr, CUevent, CUipcEventHandle, CUipcMemHandle, CUmemorytype,
    CUpointer_attribute, CUresult, CUstream,
};

use super::call::{DriverAnswer, INVALID, driver, in_context, machine, read, write};
use super::copy::{copy, enqueue, source};
use super::device::place;
use crate::memory::MemoryKind;
use crate::order::{CopySource, CopyTarget, SimMachine};

/// The answer of functions that share memory or events between processes.
const UNSHARED: CUresult = CUresult::CUDA_ERROR_NOT_SUPPORTED;

/// Writes an attribute of an address; of memory that is not the driver's, zeros and `false`.
///
/// # Safety
/// `to` is null or points to a value of the attribute's type.
unsafe fn attribute(
    machine: &SimMachine,
    of: CUpointer_attribute,
    address: CUdeviceptr,
    to: *mut c_void,
) -> DriverAnswer<bool> {
    use CUpointer_attribute as A;
    let owner = machine.memory.owner(address, 1);
    let device = match owner {
        Some(MemoryKind::Device(device)) => Some(device),
        _ => None,
    };
    // SAFETY: the caller's contract.
    unsafe {
        match of {
            A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => {
                let kind = match owner {
                    None => 0,
                    Some(MemoryKind::Device(_)) => CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint,
                    Some(MemoryKind::Pinned) => CUmemorytype::CU_MEMORYTYPE_HOST as c_uint,
                };
                write(to.cast(), kind)?;
            }
            A::CU_POINTER_ATTRIBUTE_CONTEXT => {
                let context = device.map_or(0, |device| machine.devices[device].context);
                write(to.cast(), context)?;
            }
            A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
                write(to.cast(), device.map_or(-1, |device| device as c_int))?;
            }
            A::CU_POINTER_ATTRIBUTE_IS_MANAGED => write(to.cast(), 0 as c_uint)?,
            _ => {
                eprintln!("meristem-standin: {of:?} is not modelled");
                return Err(INVALID);
            }
        }
    }
    Ok(owner.is_some())
}

/// Copies between any two addresses in stream order. The host waits with `wait`, unless both are
/// memory of devices, and where it must read or write pageable memory.
///
/// # Safety
/// As for the CUDA driver.
unsafe fn unified(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    on: CUstream,
    wait: bool,
) -> DriverAnswer {
    // By the first byte: a copy that begins in memory of a device and leaves it is refused.
    let ([from_device, to_device], pageable) = in_context(|machine, _| {
        let first = |at| machine.memory.owner(at, bytes.min(1));
        let on_device = [from, to].map(|at| matches!(first(at), Some(MemoryKind::Device(_))));
        Ok((on_device, !on_device[1] && machine.memory.owner(to, bytes).is_none()))
    })?;
    let target = if to_device { CopyTarget::Device(to) } else { CopyTarget::Host(to) };
    enqueue(on, pageable || (wait && !(from_device && to_device)), |memory| {
        let from = if from_device {
            CopySource::Device(from)
        } else {
            // SAFETY: the caller's contract.
            unsafe { source(memory, from as *const c_void, bytes)? }
        };
        Ok(copy(from, target, bytes))
    })
}

driver! {
    /// Copies between any two addresses; waits, unless both are memory of devices.
    fn cuMemcpy(dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize) {
        unified(dst, src, ByteCount, std::ptr::null_mut(), true)
    }

    /// Copies between any two addresses in stream order.
    fn cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize, hStream: CUstream) {
        unified(dst, src, ByteCount, hStream, false)
    }

    /// First address and bytes of the device's allocation at an address.
    fn cuMemGetAddressRange_v2(pbase: *mut CUdeviceptr, psize: *mut usize, dptr: CUdeviceptr) {
        in_context(|machine, _| {
            let (base, bytes) = machine.memory.allocation(dptr).ok_or(INVALID)?;
            // Both may be null.
            if !pbase.is_null() {
                write(pbase, base)?;
            }
            if !psize.is_null() {
                write(psize, bytes)?;
            }
            Ok(())
        })
    }

    /// An attribute of memory that the driver knows.
    fn cuPointerGetAttribute(
        data: *mut c_void,
        attribute_of: CUpointer_attribute,
        ptr: CUdeviceptr,
    ) {
        machine(|machine| attribute(machine, attribute_of, ptr, data)?.then_some(()).ok_or(INVALID))
    }

    /// Attributes of memory; zeros for memory that the driver does not know.
    fn cuPointerGetAttributes(
        numAttributes: c_uint,
        attributes: *mut CUpointer_attribute,
        data: *mut *mut c_void,
        ptr: CUdeviceptr,
    ) {
        machine(|machine| {
            for at in 0..numAttributes as usize {
                let of = read(attributes.wrapping_add(at))?;
                attribute(machine, of, ptr, read(data.wrapping_add(at))?)?;
            }
            Ok(())
        })
    }

    /// No attribute can be set here.
    fn cuPointerSetAttribute(
        _value: *const c_void,
        _attribute: CUpointer_attribute,
        _ptr: CUdeviceptr,
    ) {
        Err(UNSHARED)
    }

    /// No device can access the memory of another one.
    fn cuDeviceCanAccessPeer(canAccessPeer: *mut c_int, dev: CUdevice, peerDev: CUdevice) {
        machine(|machine| {
            place(machine, dev)?;
            place(machine, peerDev)?;
            write(canAccessPeer, 0)
        })
    }

    /// Memory cannot be shared between processes here.
    fn cuIpcGetMemHandle(_pHandle: *mut CUipcMemHandle, _dptr: CUdeviceptr) { Err(UNSHARED) }

    /// Memory cannot be shared between processes here.
    fn cuIpcOpenMemHandle_v2(_pdptr: *mut CUdeviceptr, _handle: CUipcMemHandle, _flags: c_uint) {
        Err(UNSHARED)
    }

    /// Memory cannot be shared between processes here.
    fn cuIpcCloseMemHandle(_dptr: CUdeviceptr) { Err(UNSHARED) }

    /// Events cannot be shared between processes here.
    fn cuIpcGetEventHandle(_pHandle: *mut CUipcEventHandle, _event: CUevent) { Err(UNSHARED) }

    /// Events cannot be shared between processes here.
    fn cuIpcOpenEventHandle(_phEvent: *mut CUevent, _handle: CUipcEventHandle) { Err(UNSHARED) }
}

//! Copies and fills.

use std::ffi::{c_uchar, c_uint, c_void};
use std::slice;

use cudarc::driver::sys::{CUdeviceptr, CUresult, CUstream};

use super::call::{DriverAnswer, INVALID, driver, in_context, wait_for};
use super::stream::stream;
use crate::memory::{AddressSpace, MemoryKind};
use crate::order::{CopySource, CopyTarget, CopyWork, DeviceWork, FillWork, SimMachine};

/// A source on the host: page-locked memory is read when the copy runs, pageable memory now.
///
/// # Safety
/// `from` points to `bytes` bytes.
pub(super) unsafe fn source(
    memory: &AddressSpace,
    from: *const c_void,
    bytes: usize,
) -> DriverAnswer<CopySource> {
    if memory.owner(from as u64, bytes) == Some(MemoryKind::Pinned) {
        return Ok(CopySource::Pinned(from as u64));
    }
    if from.is_null() && bytes > 0 {
        return Err(INVALID);
    }
    let bytes = match bytes {
        0 => &[],
        // SAFETY: the caller's contract.
        _ => unsafe { slice::from_raw_parts(from.cast::<u8>(), bytes) },
    };
    Ok(CopySource::Staged(bytes.to_vec()))
}

/// Refuses work on memory that is not live, with a line on stderr.
pub(super) fn check(machine: &SimMachine, work: &DeviceWork) -> DriverAnswer {
    work.check(&machine.memory).map_err(|fault| {
        eprintln!("meristem-standin: {}", fault.cause);
        INVALID
    })
}

/// Enqueues work; with `wait`, the host waits until it is done.
pub(super) fn enqueue(
    on: CUstream,
    wait: bool,
    work: impl FnOnce(&AddressSpace) -> DriverAnswer<DeviceWork>,
) -> DriverAnswer {
    let point = in_context(|machine, device| {
        let handle = stream(machine, device, on)?;
        let work = work(&machine.memory)?;
        check(machine, &work)?;
        machine.enqueue(handle, vec![], work)
    })?;
    if wait { wait_for(&[point]) } else { Ok(()) }
}

pub(super) fn copy(from: CopySource, to: CopyTarget, bytes: usize) -> DeviceWork {
    DeviceWork::Copy(CopyWork { from, to, bytes })
}

fn fill(to: CUdeviceptr, value: &[u8], count: usize, on: CUstream) -> DriverAnswer {
    if !to.is_multiple_of(value.len() as u64) {
        return Err(INVALID);
    }
    enqueue(on, false, |_| Ok(DeviceWork::Fill(FillWork { to, value: value.to_vec(), count })))
}

driver! {
    /// Copies from the host to a device in stream order. Pageable memory is read at once.
    fn cuMemcpyHtoDAsync_v2(
        dstDevice: CUdeviceptr,
        srcHost: *const c_void,
        ByteCount: usize,
        hStream: CUstream,
    ) {
        enqueue(hStream, false, |memory| {
            let from = source(memory, srcHost, ByteCount)?;
            Ok(copy(from, CopyTarget::Device(dstDevice), ByteCount))
        })
    }

    /// Copies from the host to a device, and waits.
    fn cuMemcpyHtoD_v2(dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize) {
        enqueue(std::ptr::null_mut(), true, |memory| {
            let from = source(memory, srcHost, ByteCount)?;
            Ok(copy(from, CopyTarget::Device(dstDevice), ByteCount))
        })
    }

    /// Copies from a device to the host in stream order; waits if the host's memory is pageable.
    fn cuMemcpyDtoHAsync_v2(
        dstHost: *mut c_void,
        srcDevice: CUdeviceptr,
        ByteCount: usize,
        hStream: CUstream,
    ) {
        let to = dstHost as u64;
        let owner = in_context(|machine, _| Ok(machine.memory.owner(to, ByteCount)))?;
        if dstHost.is_null() && ByteCount > 0 {
            return Err(INVALID);
        }
        enqueue(hStream, owner != Some(MemoryKind::Pinned), |_| {
            Ok(copy(CopySource::Device(srcDevice), CopyTarget::Host(to), ByteCount))
        })
    }

    /// Copies from a device to the host, and waits.
    fn cuMemcpyDtoH_v2(dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize) {
        if dstHost.is_null() && ByteCount > 0 {
            return Err(INVALID);
        }
        enqueue(std::ptr::null_mut(), true, |_| {
            Ok(copy(CopySource::Device(srcDevice), CopyTarget::Host(dstHost as u64), ByteCount))
        })
    }

    /// Copies between devices, or on one, in stream order.
    fn cuMemcpyDtoDAsync_v2(
        dstDevice: CUdeviceptr,
        srcDevice: CUdeviceptr,
        ByteCount: usize,
        hStream: CUstream,
    ) {
        enqueue(hStream, false, |_| {
            Ok(copy(CopySource::Device(srcDevice), CopyTarget::Device(dstDevice), ByteCount))
        })
    }

    /// Fills memory with a byte.
    fn cuMemsetD8Async(dstDevice: CUdeviceptr, uc: c_uchar, N: usize, hStream: CUstream) {
        fill(dstDevice, &[uc], N, hStream)
    }

    /// Fills memory with a word of four bytes.
    fn cuMemsetD32Async(dstDevice: CUdeviceptr, ui: c_uint, N: usize, hStream: CUstream) {
        fill(dstDevice, &ui.to_ne_bytes(), N, hStream)
    }
}

//! Copies and fills.

use std::ffi::{c_uchar, c_uint, c_void};
use std::slice;

use cudarc::driver::sys::{CUdeviceptr, CUresult, CUstream};

use super::call::{Answer, INVALID, driver, in_context, wait_for};
use super::stream::stream;
use crate::memory::{Kind, Memory};
use crate::order::{Copy, Fill, From, Machine, To, Work};

/// A source on the host: page-locked memory is read when the copy runs, other memory now.
///
/// # Safety
/// `from` points to so many bytes.
pub(super) unsafe fn source(memory: &Memory, from: *const c_void, bytes: usize) -> Answer<From> {
    if memory.owner(from as u64, bytes) == Some(Kind::Pinned) {
        return Ok(From::Pinned(from as u64));
    }
    if from.is_null() && bytes > 0 {
        return Err(INVALID);
    }
    let bytes = match bytes {
        0 => &[],
        // SAFETY: the caller's contract.
        _ => unsafe { slice::from_raw_parts(from.cast::<u8>(), bytes) },
    };
    Ok(From::Staged(bytes.to_vec()))
}

/// Refuses work on memory that is not there; the line on stderr says which.
pub(super) fn check(machine: &Machine, work: &Work) -> Answer {
    work.check(&machine.memory).map_err(|fault| {
        eprintln!("meristem-standin: {}", fault.cause);
        INVALID
    })
}

/// Enqueues work; with `wait`, the host goes on when it is done.
fn enqueue(on: CUstream, wait: bool, work: impl FnOnce(&Memory) -> Answer<Work>) -> Answer {
    let point = in_context(|machine, device| {
        let handle = stream(machine, device, on)?;
        let work = work(&machine.memory)?;
        check(machine, &work)?;
        machine.enqueue(handle, vec![], work)
    })?;
    if wait { wait_for(&[point]) } else { Ok(()) }
}

fn copy(from: From, to: To, bytes: usize) -> Work {
    Work::Copy(Copy { from, to, bytes })
}

fn fill(to: CUdeviceptr, value: &[u8], count: usize, on: CUstream) -> Answer {
    if !to.is_multiple_of(value.len() as u64) {
        return Err(INVALID);
    }
    enqueue(on, false, |_| Ok(Work::Fill(Fill { to, value: value.to_vec(), count })))
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
            Ok(copy(from, To::Device(dstDevice), ByteCount))
        })
    }

    /// Copies from the host to a device, and waits.
    fn cuMemcpyHtoD_v2(dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize) {
        enqueue(std::ptr::null_mut(), true, |memory| {
            let from = source(memory, srcHost, ByteCount)?;
            Ok(copy(from, To::Device(dstDevice), ByteCount))
        })
    }

    /// Copies from a device to the host in stream order; waits where the host's memory is pageable.
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
        enqueue(hStream, owner != Some(Kind::Pinned), |_| {
            Ok(copy(From::Device(srcDevice), To::Host(to), ByteCount))
        })
    }

    /// Copies from a device to the host, and waits.
    fn cuMemcpyDtoH_v2(dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize) {
        if dstHost.is_null() && ByteCount > 0 {
            return Err(INVALID);
        }
        enqueue(std::ptr::null_mut(), true, |_| {
            Ok(copy(From::Device(srcDevice), To::Host(dstHost as u64), ByteCount))
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
            Ok(copy(From::Device(srcDevice), To::Device(dstDevice), ByteCount))
        })
    }

    /// Writes a byte many times.
    fn cuMemsetD8Async(dstDevice: CUdeviceptr, uc: c_uchar, N: usize, hStream: CUstream) {
        fill(dstDevice, &[uc], N, hStream)
    }

    /// Writes four bytes many times.
    fn cuMemsetD32Async(dstDevice: CUdeviceptr, ui: c_uint, N: usize, hStream: CUstream) {
        fill(dstDevice, &ui.to_ne_bytes(), N, hStream)
    }
}

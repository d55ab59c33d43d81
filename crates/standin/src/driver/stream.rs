//! Streams.

use std::ffi::c_uint;

use cudarc::driver::sys::{CUevent, CUresult, CUstream};

use super::call::{DriverAnswer, INVALID, driver, in_context, wait, write};
use crate::order::{DeviceWork, SimMachine, SimStream};

/// The flag of streams that do not wait for the default stream.
const NON_BLOCKING: c_uint = 1;

/// The handle of a stream; null and 1 name the default stream of the device.
pub(super) fn stream(machine: &SimMachine, device: usize, stream: CUstream) -> DriverAnswer<u64> {
    let handle = match stream as u64 {
        0 | 1 => machine.devices[device].default_stream,
        handle => handle,
    };
    match machine.streams.get(handle)? {
        stream if stream.destroyed => Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
        stream if stream.device != device => Err(CUresult::CUDA_ERROR_INVALID_CONTEXT),
        _ => Ok(handle),
    }
}

driver! {
    /// Creates a stream.
    fn cuStreamCreate(phStream: *mut CUstream, Flags: c_uint) {
        in_context(|machine, device| {
            if Flags > NON_BLOCKING || phStream.is_null() {
                return Err(INVALID);
            }
            let handle = machine.streams.insert(SimStream::new(device, Flags != NON_BLOCKING));
            write(phStream, handle as CUstream)
        })
    }

    /// Destroys a stream. Its commands still run; this does not wait for them.
    fn cuStreamDestroy_v2(hStream: CUstream) {
        in_context(|machine, device| {
            let handle = stream(machine, device, hStream)?;
            if handle == machine.devices[device].default_stream {
                return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
            }
            machine.streams.get_mut(handle)?.destroyed = true;
            Ok(())
        })
    }

    /// Waits for all commands of a stream.
    fn cuStreamSynchronize(hStream: CUstream) {
        let end = |machine: &mut SimMachine, device| machine.end(stream(machine, device, hStream)?);
        wait(|machine, device| Ok(vec![end(machine, device)?])).map(drop)
    }

    /// Whether all commands of a stream are done. Some commands of any streams run before that.
    fn cuStreamQuery(hStream: CUstream) {
        in_context(|machine, device| {
            let end = machine.end(stream(machine, device, hStream)?)?;
            let done = machine.query(end);
            machine.healthy(device)?;
            done.then_some(()).ok_or(CUresult::CUDA_ERROR_NOT_READY)
        })
    }

    /// Makes later commands of a stream wait for the last record of an event.
    fn cuStreamWaitEvent(hStream: CUstream, hEvent: CUevent, Flags: c_uint) {
        in_context(|machine, device| {
            if Flags > 1 {
                return Err(INVALID);
            }
            let recorded = machine.events.get(hEvent as u64)?.recorded;
            let handle = stream(machine, device, hStream)?;
            machine.enqueue(handle, recorded.into_iter().collect(), DeviceWork::Nothing)?;
            Ok(())
        })
    }
}

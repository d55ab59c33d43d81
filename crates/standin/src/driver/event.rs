//! Events.

use std::ffi::c_uint;

use cudarc::driver::sys::{CUevent, CUresult, CUstream};

use super::call::{INVALID, LOOK, driver, in_context, wait, write};
use super::stream::stream;
use crate::order::{DeviceWork, SimEvent};

/// All flags of an event.
const FLAGS: c_uint = 0b111;

/// The flag of events without timing.
const DISABLE_TIMING: c_uint = 0b10;

driver! {
    /// Creates an event.
    fn cuEventCreate(phEvent: *mut CUevent, Flags: c_uint) {
        in_context(|machine, device| {
            if Flags & !FLAGS != 0 || phEvent.is_null() {
                return Err(INVALID);
            }
            let timed = Flags & DISABLE_TIMING == 0;
            let handle = machine.events.insert(SimEvent { device, timed, recorded: None });
            write(phEvent, handle as CUevent)
        })
    }

    /// Destroys an event. Streams that wait for it still wait.
    fn cuEventDestroy_v2(hEvent: CUevent) {
        in_context(|machine, _| machine.events.remove(hEvent as u64).map(drop))
    }

    /// Records the current end of a stream.
    fn cuEventRecord(hEvent: CUevent, hStream: CUstream) {
        in_context(|machine, device| {
            let stream = stream(machine, device, hStream)?;
            let SimEvent { device: own, timed, .. } = *machine.events.get(hEvent as u64)?;
            if own != device {
                return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
            }
            // The time of an event is not before the host records it.
            let end = if timed {
                machine.enqueue(stream, vec![], DeviceWork::Nothing)?
            } else {
                machine.end(stream)?
            };
            machine.events.get_mut(hEvent as u64)?.recorded = Some(end);
            Ok(())
        })
    }

    /// Whether an event is reached. Some commands of any streams run before the answer. With
    /// `MERISTEM_STANDIN_SERIAL=1` this waits while an exchange waits for other processes.
    fn cuEventQuery(hEvent: CUevent) {
        let ask = || in_context(|machine, device| {
            let recorded = machine.events.get(hEvent as u64)?.recorded;
            let done = recorded.is_none_or(|point| machine.query(point));
            machine.healthy(device)?;
            Ok((done, machine.has_stopped(device)))
        });
        let serial = std::env::var_os("MERISTEM_STANDIN_SERIAL").is_some_and(|set| set == "1");
        let mut answer = ask()?;
        while serial && answer.1 {
            std::thread::sleep(LOOK);
            answer = ask()?;
        }
        answer.0.then_some(()).ok_or(CUresult::CUDA_ERROR_NOT_READY)
    }

    /// Waits until an event is reached.
    fn cuEventSynchronize(hEvent: CUevent) {
        let event = hEvent as u64;
        wait(|machine, _| Ok(machine.events.get(event)?.recorded.into_iter().collect())).map(drop)
    }

    /// Milliseconds between two events on an imaginary device, which runs all streams at once and
    /// takes one microsecond for each operation: a trace shows what the order of the streams
    /// permits, and not how long work takes.
    fn cuEventElapsedTime_v2(pMilliseconds: *mut f32, hStart: CUevent, hEnd: CUevent) {
        in_context(|machine, _| {
            let (start, end) = (hStart as u64, hEnd as u64);
            let [start, end] = [*machine.events.get(start)?, *machine.events.get(end)?];
            if !start.timed || !end.timed {
                return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
            }
            let (Some(start), Some(end)) = (start.recorded, end.recorded) else {
                return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
            };
            if !machine.is_done(start) || !machine.is_done(end) {
                return Err(CUresult::CUDA_ERROR_NOT_READY);
            }
            let [start, end] = [start, end].map(|point| machine.time(point) as f64);
            write(pMilliseconds, ((end - start) * 1e-3) as f32)
        })
    }
}

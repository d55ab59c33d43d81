//! Events.

use std::ffi::c_uint;

use cudarc::driver::sys::{CUevent, CUresult, CUstream};

use super::call::{INVALID, LOOK, driver, in_context, wait, write};
use super::stream::stream;
use crate::order::SimEvent;

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
            let end = machine.end(stream(machine, device, hStream)?)?;
            let event = machine.events.get_mut(hEvent as u64)?;
            if event.device != device {
                return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
            }
            event.recorded = Some(end);
            Ok(())
        })
    }

    /// Whether an event is reached. Some commands of any streams run before. With
    /// `MERISTEM_STANDIN_SERIAL=1` there is no answer while an exchange waits for other processes.
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

    /// Milliseconds between two events: one microsecond for each command between them, because the
    /// stand-in does not model time.
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
            let same = start.stream == end.stream;
            let commands = if same { end.at as f32 - start.at as f32 } else { 1.0 };
            write(pMilliseconds, commands * 1e-3)
        })
    }
}

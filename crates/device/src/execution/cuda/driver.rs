//! The driver's functions with typed errors, and the driver's objects: contexts, streams, events,
//! page-locked memory.
//!
//! A function of the driver returns a code; any code but success becomes a [`CudaError`]. Calls act
//! on the context that is current on the calling thread, so callers bind the context first.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use cudarc::driver::sys as cu;

use super::bindings::functions;
use crate::ground::sync::Arc;
use crate::ground::{CudaError, DRIVER_NEEDED};

/// Result of a call of CUDA.
pub(super) type Called<T = ()> = Result<T, CudaError>;

functions!(cu, cu::CUresult, "libcuda", {
    cuInit(c_uint);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut cu::CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, cu::CUdevice);
    cuDeviceGetAttribute(*mut c_int, cu::CUdevice_attribute, cu::CUdevice);
    cuDevicePrimaryCtxRetain(*mut cu::CUcontext, cu::CUdevice);
    cuDevicePrimaryCtxRelease_v2(cu::CUdevice);
    cuCtxSetCurrent(cu::CUcontext);
    cuCtxSynchronize();
    cuMemAlloc_v2(*mut cu::CUdeviceptr, usize);
    cuMemFree_v2(cu::CUdeviceptr);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemcpyHtoDAsync_v2(cu::CUdeviceptr, *const c_void, usize, cu::CUstream);
    cuMemcpyDtoHAsync_v2(*mut c_void, cu::CUdeviceptr, usize, cu::CUstream);
    cuMemcpyDtoDAsync_v2(cu::CUdeviceptr, cu::CUdeviceptr, usize, cu::CUstream);
    cuMemsetD8Async(cu::CUdeviceptr, u8, usize, cu::CUstream);
    cuMemsetD32Async(cu::CUdeviceptr, u32, usize, cu::CUstream);
    cuStreamCreate(*mut cu::CUstream, c_uint);
    cuStreamDestroy_v2(cu::CUstream);
    cuStreamSynchronize(cu::CUstream);
    cuStreamWaitEvent(cu::CUstream, cu::CUevent, c_uint);
    cuEventCreate(*mut cu::CUevent, c_uint);
    cuEventDestroy_v2(cu::CUevent);
    cuEventRecord(cu::CUevent, cu::CUstream);
    cuEventQuery(cu::CUevent);
    cuEventSynchronize(cu::CUevent);
    cuEventElapsedTime_v2(*mut f32, cu::CUevent, cu::CUevent);
    cuModuleLoadData(*mut cu::CUmodule, *const c_void);
    cuModuleUnload(cu::CUmodule);
    cuModuleGetFunction(*mut cu::CUfunction, cu::CUmodule, *const c_char);
    cuFuncGetAttribute(*mut c_int, cu::CUfunction_attribute, cu::CUfunction);
    cuFuncSetAttribute(cu::CUfunction, cu::CUfunction_attribute, c_int);
    cuLaunchKernel(
        cu::CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, cu::CUstream,
        *mut *mut c_void, *mut *mut c_void,
    );
    cuGraphCreate(*mut cu::CUgraph, c_uint);
    cuGraphDestroy(cu::CUgraph);
    cuGraphAddKernelNode_v2(
        *mut cu::CUgraphNode, cu::CUgraph, *const cu::CUgraphNode, usize,
        *const cu::CUDA_KERNEL_NODE_PARAMS,
    );
    cuGraphInstantiateWithFlags(*mut cu::CUgraphExec, cu::CUgraph, c_ulonglong);
    cuGraphUpload(cu::CUgraphExec, cu::CUstream);
    cuGraphExecDestroy(cu::CUgraphExec);
    cuGraphLaunch(cu::CUgraphExec, cu::CUstream);
});

/// The driver's functions, set by [`load`].
static FOUND: OnceLock<Functions> = OnceLock::new();

/// The driver's functions.
pub(super) fn driver() -> &'static Functions {
    match FOUND.get() {
        Some(functions) => functions,
        None => unreachable!("a context exists only after `load`"),
    }
}

/// Text for a code, from a function of the driver such as `cuGetErrorName`.
fn text_of(function: &str, code: u32) -> Option<String> {
    type CudaTextFn = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
    let mut text = ptr::null();
    // SAFETY: called only after `load` has found the library. `cuGetErrorName` and
    // `cuGetErrorString` take a code, write a pointer to a string that lives as long as the
    // process, or null for an unknown code, and return a code.
    unsafe {
        let describe = cu::culib().get::<CudaTextFn>(function.as_bytes()).ok()?;
        let _ = describe(code, &mut text);
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    }
}

/// Code of a call without an error.
const SUCCESS: u32 = cu::CUresult::CUDA_SUCCESS as u32;
/// Code of a query for unfinished work.
const NOT_READY: u32 = cu::CUresult::CUDA_ERROR_NOT_READY as u32;
/// Code of an allocation without enough memory.
pub(super) const OUT_OF_MEMORY: u32 = cu::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;

/// Turns a code into a result.
pub(super) fn check(function: &'static str, code: u32) -> Called {
    if code == SUCCESS {
        return Ok(());
    }
    let name = text_of("cuGetErrorName", code).unwrap_or_else(|| format!("code {code}"));
    let message = text_of("cuGetErrorString", code);
    let message = message.unwrap_or_else(|| "the driver has no words for it".to_owned());
    Err(CudaError::Call { function, code: name, message })
}

/// Loads the driver and initialises it.
pub(super) fn load() -> Called {
    // SAFETY: this loads the library named libcuda, whose initialisers are the driver's own.
    if !unsafe { cu::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    type DriverVersionFn = unsafe extern "C" fn(*mut c_int) -> u32;
    let (name, mut found) = ("cuDriverGetVersion", 0);
    // SAFETY: the library was found above; the function writes one number.
    let code = unsafe {
        let version = cu::culib().get::<DriverVersionFn>(name.as_bytes());
        let lacking = |_| CudaError::MissingFunction { library: "libcuda", function: name };
        version.map_err(lacking)?(&mut found)
    };
    check(name, code)?;
    if found < DRIVER_NEEDED {
        return Err(CudaError::DriverTooOld { found });
    }
    let functions = Functions::find()?;
    let functions = FOUND.get_or_init(|| functions);
    // SAFETY: 0 is the only valid argument.
    match unsafe { (functions.cuInit)(0) } {
        code if code == cu::CUresult::CUDA_ERROR_NO_DEVICE as u32 => {
            Err(CudaError::NoSuchDevice { asked: 0, found: 0 })
        }
        code => check("cuInit", code),
    }
}

/// The device of an ordinal.
pub(super) fn device(ordinal: u32) -> Called<cu::CUdevice> {
    let (mut found, mut device): (c_int, cu::CUdevice) = (0, 0);
    // SAFETY: writes one number.
    check("cuDeviceGetCount", unsafe { (driver().cuDeviceGetCount)(&mut found) })?;
    let number = c_int::try_from(ordinal).ok().filter(|&number| number < found);
    let Some(number) = number else {
        return Err(CudaError::NoSuchDevice { asked: ordinal, found });
    };
    // SAFETY: writes one number; the ordinal was checked.
    check("cuDeviceGet", unsafe { (driver().cuDeviceGet)(&mut device, number) })?;
    Ok(device)
}

/// The value of an attribute of a device.
pub(super) fn attribute(device: cu::CUdevice, attribute: cu::CUdevice_attribute) -> Called<i32> {
    let mut value: c_int = 0;
    // SAFETY: writes one number.
    let code = unsafe { (driver().cuDeviceGetAttribute)(&mut value, attribute, device) };
    check("cuDeviceGetAttribute", code)?;
    Ok(value)
}

/// Name of a device.
pub(super) fn name(device: cu::CUdevice) -> Called<String> {
    let mut name = [0u8; 256];
    let to = name.as_mut_ptr().cast();
    // SAFETY: writes at most 256 bytes, the last of them zero.
    check("cuDeviceGetName", unsafe {
        (driver().cuDeviceGetName)(to, name.len() as c_int, device)
    })?;
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    Ok(String::from_utf8_lossy(&name[..end]).into_owned())
}

/// The primary context of a device, retained until it is dropped.
#[derive(Debug)]
pub(super) struct Primary {
    device: cu::CUdevice,
    raw: cu::CUcontext,
}

// SAFETY: a context may be current on any number of threads; the driver locks it.
unsafe impl Send for Primary {}
// SAFETY: as above.
unsafe impl Sync for Primary {}

impl Primary {
    pub(super) fn retain(device: cu::CUdevice) -> Called<Primary> {
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (driver().cuDevicePrimaryCtxRetain)(&mut raw, device) };
        check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Primary { device, raw })
    }

    /// Makes this context current to the calling thread.
    pub(super) fn bind(&self) -> Called {
        // SAFETY: the context is retained as long as `self` lives.
        check("cuCtxSetCurrent", unsafe { (driver().cuCtxSetCurrent)(self.raw) })
    }
}

/// Blocks until all work of the current context is done.
pub(super) fn synchronize_context() -> Called {
    // SAFETY: a context is current.
    check("cuCtxSynchronize", unsafe { (driver().cuCtxSynchronize)() })
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`. A failure cannot be reported.
        let _ = unsafe { (driver().cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

/// A stream object of the driver (`CUstream`).
#[derive(Debug)]
pub(super) struct RawStream(cu::CUstream);

// SAFETY: a stream is a handle; the driver locks its object.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

impl RawStream {
    /// A stream that does not synchronise with the default stream. Its context must be current, for
    /// this and every other method of this file.
    pub(super) fn new() -> Called<RawStream> {
        let mut raw = ptr::null_mut();
        let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle.
        check("cuStreamCreate", unsafe { (driver().cuStreamCreate)(&mut raw, flags) })?;
        Ok(RawStream(raw))
    }

    pub(super) fn raw(&self) -> cu::CUstream {
        self.0
    }

    /// Blocks until all its work is done.
    pub(super) fn synchronize(&self) -> Called {
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe { (driver().cuStreamSynchronize)(self.0) })
    }

    /// Makes later work of the stream wait for the latest record of the event.
    pub(super) fn wait(&self, event: &CudaEvent) -> Called {
        // SAFETY: both live; 0 is the only flag.
        check("cuStreamWaitEvent", unsafe { (driver().cuStreamWaitEvent)(self.0, event.0, 0) })
    }

    /// Destroys the stream once its work is done.
    pub(super) fn destroy(&self) {
        // SAFETY: called once, by the owner's `drop`. A failure cannot be reported.
        let _ = unsafe { (driver().cuStreamDestroy_v2)(self.0) };
    }
}

/// An event.
#[derive(Debug)]
pub(super) struct CudaEvent(cu::CUevent);

// SAFETY: an event is a handle; the driver locks its object.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// A new event, which records a time if `timed`.
    ///
    /// A thread that waits for an event sleeps (`CU_EVENT_BLOCKING_SYNC`): the host waits about
    /// once an epoch, so the time to wake up does not matter, and threads of loaders and other
    /// ranks need the core.
    pub(super) fn new(timed: bool) -> Called<CudaEvent> {
        let mut raw = ptr::null_mut();
        let time = if timed {
            cu::CUevent_flags::CU_EVENT_DEFAULT
        } else {
            cu::CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        let flags = time as u32 | cu::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        // SAFETY: writes one handle.
        check("cuEventCreate", unsafe { (driver().cuEventCreate)(&mut raw, flags) })?;
        Ok(CudaEvent(raw))
    }

    /// Records the event at the end of the stream.
    pub(super) fn record(&self, stream: &RawStream) -> Called {
        // SAFETY: both live.
        check("cuEventRecord", unsafe { (driver().cuEventRecord)(self.0, stream.0) })
    }

    /// Whether its latest record is reached.
    pub(super) fn is_done(&self) -> Called<bool> {
        // SAFETY: the event lives.
        match unsafe { (driver().cuEventQuery)(self.0) } {
            NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Blocks until its latest record is reached.
    pub(super) fn synchronize(&self) -> Called {
        // SAFETY: the event lives.
        check("cuEventSynchronize", unsafe { (driver().cuEventSynchronize)(self.0) })
    }

    /// Seconds from an earlier event to this one; both are timed and reached.
    pub(super) fn seconds_since(&self, earlier: &CudaEvent) -> Called<f64> {
        let mut milliseconds = 0.0f32;
        // SAFETY: writes one number; both events live.
        let code =
            unsafe { (driver().cuEventElapsedTime_v2)(&mut milliseconds, earlier.0, self.0) };
        check("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: created once by `new`; the driver keeps the event's state while pending work
        // needs it.
        let _ = unsafe { (driver().cuEventDestroy_v2)(self.0) };
    }
}

/// Page-locked host memory, which the device copies from and to asynchronously: a piece of an
/// allocation, which is freed with its last piece.
#[derive(Debug)]
pub(super) struct Pinned {
    data: NonNull<u8>,
    size: usize,
    _allocation: Arc<PinnedAllocation>,
}

// SAFETY: memory without thread affinity, with one owner; pieces do not overlap.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates `count` pieces of `size` bytes in one call of the driver; `count` is not zero.
    pub(super) fn pieces(size: usize, count: usize) -> Called<Vec<Pinned>> {
        let allocation = Arc::new(PinnedAllocation::new(size * count)?);
        let piece = |i: usize| {
            // SAFETY: the allocation has `count` times `size` bytes.
            let data = unsafe { allocation.0.add(i * size) };
            Pinned { data, size, _allocation: allocation.clone() }
        };
        Ok((0..count).map(piece).collect())
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Whether both are pieces of one allocation.
    #[cfg(test)]
    pub(super) fn is_beside(&self, other: &Pinned) -> bool {
        Arc::ptr_eq(&self._allocation, &other._allocation)
    }

    /// Its bytes, for the host.
    ///
    /// # Safety
    /// No copy of the device that reads or writes the memory is pending.
    pub(super) unsafe fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: a piece of this size, initialised, and exclusive by `&mut self` and the caller's
        // promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.size) }
    }

    /// Address for copies of the device.
    pub(super) fn address(&self) -> *mut c_void {
        self.data.as_ptr().cast()
    }
}

/// An allocation of page-locked memory.
#[derive(Debug)]
struct PinnedAllocation(NonNull<u8>);

// SAFETY: an address that is freed once; the memory is accessed through pieces.
unsafe impl Send for PinnedAllocation {}
// SAFETY: as above.
unsafe impl Sync for PinnedAllocation {}

impl PinnedAllocation {
    fn new(size: usize) -> Called<PinnedAllocation> {
        let mut data: *mut c_void = ptr::null_mut();
        // SAFETY: writes one address; the flag means visible to every context.
        let code =
            unsafe { (driver().cuMemHostAlloc)(&mut data, size, cu::CU_MEMHOSTALLOC_PORTABLE) };
        check("cuMemHostAlloc", code)?;
        let data = NonNull::new(data.cast::<u8>()).ok_or_else(|| CudaError::Call {
            function: "cuMemHostAlloc",
            code: "no code".to_owned(),
            message: "the driver returned no memory".to_owned(),
        })?;
        // SAFETY: just allocated with this size. Zeroed so that it is always initialised.
        unsafe { data.as_ptr().write_bytes(0, size) };
        Ok(PinnedAllocation(data))
    }
}

impl Drop for PinnedAllocation {
    fn drop(&mut self) {
        // SAFETY: allocated once by `new`; owners of pieces drop them after all copies that use
        // them.
        let _ = unsafe { (driver().cuMemFreeHost)(self.0.as_ptr().cast()) };
    }
}

//! NCCL's functions with typed errors, and memberships in its groups of devices.
//!
//! Only sends and receives of bytes are used: sums are made by this project's own kernels, in an
//! order that NCCL does not promise.

use super::bindings::functions;
use super::context::Context;
use super::driver::Called;
use crate::execution::args::Record;
use crate::ground::sync::Arc;
use crate::ground::{CudaError, DeviceId, Error, NCCL_NEEDED, Result, Use};
use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys as nccl;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::OnceLock;

/// The bindings, with a library that is looked for under its usual name, too, which those of
/// cudarc do not do.
mod library {
    pub(super) use cudarc::nccl::sys::*;
    use std::sync::OnceLock;

    /// Names that are tried, in order.
    const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

    static FOUND: OnceLock<Option<libloading::Library>> = OnceLock::new();

    /// The library, if there is one.
    pub(super) fn find() -> Option<&'static libloading::Library> {
        let open = |name: &&str| {
            // SAFETY: the initialisers of a library of this name are NCCL's own.
            unsafe { libloading::Library::new(*name) }.ok()
        };
        FOUND.get_or_init(|| NAMES.iter().find_map(open)).as_ref()
    }

    /// The library, which was found.
    ///
    /// # Safety
    /// None is needed; the bindings' own function has the same signature.
    pub(super) unsafe fn culib() -> &'static libloading::Library {
        match find() {
            Some(library) => library,
            None => unreachable!("asked for after `find` only"),
        }
    }
}

/// A stream, as NCCL's bindings name it.
type Queue = nccl::cudaStream_t;

functions!(library, nccl::ncclResult_t, "libnccl", {
    ncclGetUniqueId(*mut nccl::ncclUniqueId);
    ncclCommInitRank(*mut nccl::ncclComm_t, c_int, nccl::ncclUniqueId, c_int);
    ncclCommAbort(nccl::ncclComm_t);
    ncclGroupStart();
    ncclGroupEnd();
    ncclSend(*const c_void, usize, nccl::ncclDataType_t, c_int, nccl::ncclComm_t, Queue);
    ncclRecv(*mut c_void, usize, nccl::ncclDataType_t, c_int, nccl::ncclComm_t, Queue);
});

/// NCCL's functions, once they were found.
static FOUND: OnceLock<Functions> = OnceLock::new();

/// Bytes of the name of a group.
pub(crate) const ID_BYTES: usize = 128;

/// Finds the library and its functions.
fn load() -> Called<&'static Functions> {
    if let Some(functions) = FOUND.get() {
        return Ok(functions);
    }
    type Version = unsafe extern "C" fn(*mut c_int) -> u32;
    let library = library::find().ok_or(CudaError::NoNccl)?;
    let (name, mut found) = ("ncclGetVersion", 0);
    // SAFETY: the function writes one number.
    let code = unsafe {
        let version = library.get::<Version>(name.as_bytes());
        let lacking = |_| CudaError::MissingFunction { library: "libnccl", function: name };
        version.map_err(lacking)?(&mut found)
    };
    check(name, code)?;
    if found < NCCL_NEEDED {
        return Err(CudaError::NcclTooOld { found });
    }
    let functions = Functions::find()?;
    Ok(FOUND.get_or_init(|| functions))
}

/// Turns a code into a result.
fn check(function: &'static str, code: u32) -> Called {
    type Describe = unsafe extern "C" fn(u32) -> *const c_char;
    if code == 0 {
        return Ok(());
    }
    let describe = || {
        // SAFETY: the function takes a code and returns a string that lives as long as the process.
        unsafe {
            let describe = library::find()?.get::<Describe>(b"ncclGetErrorString").ok()?;
            let text = describe(code);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    let message = describe().unwrap_or_else(|| "NCCL has no words for it".to_owned());
    let message = format!("{message}; NCCL_DEBUG=INFO (--comm-debug) shows why");
    Err(CudaError::Call { function, code: format!("code {code}"), message })
}

/// Membership of a device in a group, which ends when it is dropped.
pub(crate) struct Member {
    raw: nccl::ncclComm_t,
    context: Arc<Context>,
}

// SAFETY: a handle. It is ended once, when it is dropped, and exchanges are made under the lane's
// lock; NCCL itself locks what several lanes share.
unsafe impl Send for Member {}
// SAFETY: as above.
unsafe impl Sync for Member {}

impl Member {
    /// Returns an error unless there is a library that can be used.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(crate) fn check_library() -> Result<()> {
        load().map(drop).map_err(|source| Error::Cuda { device: DeviceId::Cuda(0), source })
    }

    /// A name for a new group.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(crate) fn new_id(context: &Arc<Context>) -> Result<[u8; ID_BYTES]> {
        let mut id = nccl::ncclUniqueId { internal: [0; ID_BYTES] };
        let mut make = || {
            let functions = load()?;
            context.bind()?;
            // SAFETY: writes one name.
            check("ncclGetUniqueId", unsafe { (functions.ncclGetUniqueId)(&mut id) })
        };
        make().map_err(|source| Error::Cuda { device: context.id, source })?;
        Ok(id.internal.map(|byte| byte.to_ne_bytes()[0]))
    }

    /// Joins a group as `rank` of `size`. Waits until all have joined.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(crate) fn join(
        context: &Arc<Context>,
        id: &[u8; ID_BYTES],
        rank: usize,
        size: usize,
    ) -> Result<Arc<Member>> {
        let id = nccl::ncclUniqueId { internal: id.map(|byte| c_char::from_ne_bytes([byte])) };
        let mut raw = ptr::null_mut();
        let mut join = || {
            let functions = load()?;
            context.bind()?;
            let (rank, size) = (rank as c_int, size as c_int);
            // SAFETY: writes one handle; the context is current.
            let code = unsafe { (functions.ncclCommInitRank)(&mut raw, size, id, rank) };
            check("ncclCommInitRank", code)
        };
        join().map_err(|source| Error::Cuda { device: context.id, source })?;
        Ok(Arc::new(Member { raw, context: context.clone() }))
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Enqueues sends of the arguments that are read, and receives of those that are written, all
    /// at once; `ranks` are the other ranks. The context is current.
    pub(super) fn exchange(&self, record: &Record, ranks: &[usize], stream: CUstream) -> Called {
        let (functions, stream) = (load()?, stream.cast());
        let byte = nccl::ncclDataType_t::ncclUint8;
        // SAFETY: takes nothing.
        check("ncclGroupStart", unsafe { (functions.ncclGroupStart)() })?;
        let each = record.args.iter().zip(ranks).filter(|(arg, _)| arg.bytes > 0);
        let enqueued = each.into_iter().try_for_each(|(arg, rank)| {
            let (address, rank) = (arg.address() as *mut c_void, *rank as c_int);
            // SAFETY: the argument is inside of a live block, and ordered like that of any other
            // launch; the membership lives.
            unsafe {
                match arg.usage {
                    Use::Read => {
                        let send = functions.ncclSend;
                        check("ncclSend", send(address, arg.bytes, byte, rank, self.raw, stream))
                    }
                    Use::Write => {
                        let receive = functions.ncclRecv;
                        check("ncclRecv", receive(address, arg.bytes, byte, rank, self.raw, stream))
                    }
                }
            }
        });
        // SAFETY: takes nothing. It ends the group after an error, too.
        let ended = check("ncclGroupEnd", unsafe { (functions.ncclGroupEnd)() });
        enqueued.and(ended)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Not `ncclCommDestroy`, which may wait for ranks that are gone. What was enqueued is done,
        // or lost with the device: a lane keeps the membership until an exchange has landed.
        if let (Ok(functions), Ok(())) = (load(), self.context.bind()) {
            // SAFETY: joined once by `join`. A failure cannot be reported to anyone.
            let _ = unsafe { (functions.ncclCommAbort)(self.raw) };
        }
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Member on {}", self.context.id)
    }
}

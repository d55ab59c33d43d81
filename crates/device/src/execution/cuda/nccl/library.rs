//! NCCL's library: its functions, with typed errors.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::nccl::sys as nccl;

use super::super::bindings::functions;
use super::super::driver::Called;
use crate::ground::{CudaError, NCCL_NEEDED};

/// cudarc's bindings, with a search for the library that includes its usual name, `libnccl.so.2`.
mod linked {
    use std::sync::OnceLock;

    pub(super) use cudarc::nccl::sys::*;

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

    /// The library, which `find` has found.
    ///
    /// # Safety
    /// None is needed; the bindings' own function has the same signature.
    pub(super) unsafe fn culib() -> &'static libloading::Library {
        match find() {
            Some(library) => library,
            None => unreachable!("called after `find` only"),
        }
    }
}

/// A stream, as NCCL's bindings name it.
type NcclStream = nccl::cudaStream_t;

functions!(linked, nccl::ncclResult_t, "libnccl", {
    ncclGetUniqueId(*mut nccl::ncclUniqueId);
    ncclCommInitRankConfig(
        *mut nccl::ncclComm_t, c_int, nccl::ncclUniqueId, c_int, *mut nccl::ncclConfig_t,
    );
    ncclCommGetAsyncError(nccl::ncclComm_t, *mut nccl::ncclResult_t);
    ncclCommFinalize(nccl::ncclComm_t);
    ncclCommAbort(nccl::ncclComm_t);
    ncclGroupStart();
    ncclGroupEnd();
    ncclSend(*const c_void, usize, nccl::ncclDataType_t, c_int, nccl::ncclComm_t, NcclStream);
    ncclRecv(*mut c_void, usize, nccl::ncclDataType_t, c_int, nccl::ncclComm_t, NcclStream);
});

/// NCCL's functions and its version number, set by [`find_once`].
static FOUND: OnceLock<(Functions, c_int)> = OnceLock::new();

/// The functions of the library.
pub(super) fn load() -> Called<&'static Functions> {
    find_once().map(|(functions, _)| functions)
}

/// The version of the library, such as `2.27.3`.
pub(super) fn version() -> Called<String> {
    let (_, number) = find_once()?;
    Ok(format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
}

/// Finds the library and its functions.
fn find_once() -> Called<&'static (Functions, c_int)> {
    if let Some(found) = FOUND.get() {
        return Ok(found);
    }
    type NcclVersionFn = unsafe extern "C" fn(*mut c_int) -> u32;
    let library = linked::find().ok_or(CudaError::NoNccl)?;
    let (name, mut found) = ("ncclGetVersion", 0);
    // SAFETY: the function writes one number.
    let code = unsafe {
        let version = library.get::<NcclVersionFn>(name.as_bytes());
        let lacking = |_| CudaError::MissingFunction { library: "libnccl", function: name };
        version.map_err(lacking)?(&mut found)
    };
    check(name, code)?;
    if found < NCCL_NEEDED {
        return Err(CudaError::NcclTooOld { found });
    }
    let functions = Functions::find()?;
    Ok(FOUND.get_or_init(|| (functions, found)))
}

/// Code of a call that continues in a thread of NCCL.
pub(super) const IN_PROGRESS: u32 = nccl::ncclResult_t::ncclInProgress as u32;

/// Code for the loss of another process.
const REMOTE_ERROR: u32 = nccl::ncclResult_t::ncclRemoteError as u32;

/// Turns a code into a result; a call in progress is no error.
pub(super) fn check(function: &'static str, code: u32) -> Called {
    type NcclTextFn = unsafe extern "C" fn(u32) -> *const c_char;
    if code == 0 || code == IN_PROGRESS {
        return Ok(());
    }
    let describe = || {
        // SAFETY: the function takes a code and returns a string that lives as long as the process.
        unsafe {
            let describe = linked::find()?.get::<NcclTextFn>(b"ncclGetErrorString").ok()?;
            let text = describe(code);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    let message = describe().unwrap_or_else(|| "NCCL has no words for it".to_owned());
    let message = format!("{message}; NCCL_DEBUG=INFO (--comm-debug) shows why");
    if code == REMOTE_ERROR {
        return Err(CudaError::PeerLost { function, message });
    }
    Err(CudaError::Call { function, code: format!("code {code}"), message })
}

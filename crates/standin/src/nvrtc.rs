//! Functions of NVRTC, the compiler.

use std::ffi::{CStr, c_char, c_int};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::nvrtc::sys::{nvrtcProgram, nvrtcResult};

use crate::ground::HandleTable;
use crate::kernel::{CompileError, SourceText, compile};

/// Name of a program without one, as NVRTC has it.
const NAME: &str = "default_program";

/// A program, and the result of its compilation.
#[derive(Debug)]
struct NvrtcSource {
    source: SourceText,
    headers: Vec<SourceText>,
    /// The code; empty before a successful compilation.
    code: Vec<u8>,
    log: String,
}

static PROGRAMS: Mutex<Option<HandleTable<NvrtcSource>>> = Mutex::new(None);

type NvrtcAnswer<T = ()> = Result<T, nvrtcResult>;

/// Declares functions of NVRTC. The body ends in an `NvrtcAnswer`.
macro_rules! nvrtc {
    ($(
        $(#[$doc:meta])*
        fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block
    )*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As for NVRTC: a pointer is null, or points to memory that the function may read or
        /// write.
        #[allow(non_snake_case, reason = "NVRTC's name")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> nvrtcResult {
            let body = || -> NvrtcAnswer {
                // SAFETY: the caller guarantees NVRTC's contract for pointers; `write` and `text`
                // refuse null.
                #[allow(unused_unsafe, reason = "not every function has a pointer")]
                unsafe { $body }
            };
            body().err().unwrap_or(nvrtcResult::NVRTC_SUCCESS)
        }
    )*};
}

fn programs() -> MutexGuard<'static, Option<HandleTable<NvrtcSource>>> {
    PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Works on a program.
fn program<T>(handle: nvrtcProgram, work: impl FnOnce(&mut NvrtcSource) -> T) -> NvrtcAnswer<T> {
    let mut programs = programs();
    let program = programs.as_mut().and_then(|programs| programs.get_mut(handle as u64).ok());
    program.map(work).ok_or(nvrtcResult::NVRTC_ERROR_INVALID_PROGRAM)
}

/// Writes a result.
///
/// # Safety
/// `to` is null or may be written to.
unsafe fn write<T>(to: *mut T, value: T) -> NvrtcAnswer {
    if to.is_null() {
        return Err(nvrtcResult::NVRTC_ERROR_INVALID_INPUT);
    }
    // SAFETY: the caller's contract.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes bytes.
///
/// # Safety
/// `to` is null or has room for them.
unsafe fn write_all(to: *mut c_char, bytes: &[u8]) -> NvrtcAnswer {
    if to.is_null() {
        return Err(nvrtcResult::NVRTC_ERROR_INVALID_INPUT);
    }
    // SAFETY: the caller's contract.
    unsafe { bytes.as_ptr().copy_to_nonoverlapping(to.cast(), bytes.len()) };
    Ok(())
}

/// Reads a text.
///
/// # Safety
/// `from` is null or a C string.
unsafe fn text(from: *const c_char) -> NvrtcAnswer<String> {
    if from.is_null() {
        return Err(nvrtcResult::NVRTC_ERROR_INVALID_INPUT);
    }
    // SAFETY: the caller's contract.
    Ok(unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned())
}

/// Reads `count` texts.
///
/// # Safety
/// `from` points to `count` C strings.
unsafe fn texts(from: *const *const c_char, count: c_int) -> NvrtcAnswer<Vec<String>> {
    let count = usize::try_from(count).map_err(|_| nvrtcResult::NVRTC_ERROR_INVALID_INPUT)?;
    if from.is_null() && count > 0 {
        return Err(nvrtcResult::NVRTC_ERROR_INVALID_INPUT);
    }
    // SAFETY: the caller's contract.
    (0..count).map(|at| unsafe { text(*from.add(at)) }).collect()
}

nvrtc! {
    /// The version of CUDA.
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) {
        write(major, 13)?;
        write(minor, 0)
    }

    /// Creates a program, with the headers that it includes by name.
    fn nvrtcCreateProgram(
        prog: *mut nvrtcProgram,
        src: *const c_char,
        name: *const c_char,
        numHeaders: c_int,
        headers: *const *const c_char,
        includeNames: *const *const c_char,
    ) {
        let name = if name.is_null() { NAME.to_string() } else { text(name)? };
        let source = SourceText { name, text: text(src)? };
        let names = texts(includeNames, numHeaders)?.into_iter();
        let headers = names.zip(texts(headers, numHeaders)?);
        let headers = headers.map(|(name, text)| SourceText { name, text }).collect();
        let program = NvrtcSource { source, headers, code: vec![], log: String::new() };
        let mut programs = programs();
        let handle = programs.get_or_insert_with(HandleTable::new).insert(program);
        write(prog, handle as nvrtcProgram)
    }

    /// Compiles a program with the C++ compiler.
    fn nvrtcCompileProgram(
        prog: nvrtcProgram,
        numOptions: c_int,
        options: *const *const c_char,
    ) {
        let options = texts(options, numOptions)?;
        let (source, headers) = program(prog, |of| (of.source.clone(), of.headers.clone()))?;
        // Without the lock, so that other threads can compile at the same time.
        let (code, log, result) = match compile(&source, &headers, &options) {
            Ok(compiled) => (compiled.code, compiled.log, Ok(())),
            Err(CompileError::Option(log)) => {
                (vec![], log, Err(nvrtcResult::NVRTC_ERROR_INVALID_OPTION))
            }
            Err(CompileError::Program(log)) => {
                (vec![], log, Err(nvrtcResult::NVRTC_ERROR_COMPILATION))
            }
            Err(CompileError::Compiler(why)) => {
                eprintln!("meristem-standin: nvrtcCompileProgram: {why}");
                (vec![], why, Err(nvrtcResult::NVRTC_ERROR_BUILTIN_OPERATION_FAILURE))
            }
        };
        program(prog, |of| (of.code, of.log) = (code, log))?;
        result
    }

    /// Bytes of the log with its final zero.
    fn nvrtcGetProgramLogSize(prog: nvrtcProgram, logSizeRet: *mut usize) {
        program(prog, |of| write(logSizeRet, of.log.len() + 1))?
    }

    /// Messages of the compiler, with a final zero.
    fn nvrtcGetProgramLog(prog: nvrtcProgram, log: *mut c_char) {
        program(prog, |of| write_all(log, &[of.log.as_bytes(), &[0]].concat()))?
    }

    /// Bytes of the code.
    fn nvrtcGetCUBINSize(prog: nvrtcProgram, cubinSizeRet: *mut usize) {
        program(prog, |of| write(cubinSizeRet, of.code.len()))?
    }

    /// The code, for `cuModuleLoadData`.
    fn nvrtcGetCUBIN(prog: nvrtcProgram, cubin: *mut c_char) {
        program(prog, |of| write_all(cubin, &of.code))?
    }

    /// Bytes of the code, which has no other form here.
    fn nvrtcGetPTXSize(prog: nvrtcProgram, ptxSizeRet: *mut usize) {
        program(prog, |of| write(ptxSizeRet, of.code.len()))?
    }

    /// The code, which has no other form here.
    fn nvrtcGetPTX(prog: nvrtcProgram, ptx: *mut c_char) {
        program(prog, |of| write_all(ptx, &of.code))?
    }

    /// Destroys a program and sets its handle to null.
    fn nvrtcDestroyProgram(prog: *mut nvrtcProgram) {
        if prog.is_null() {
            return Err(nvrtcResult::NVRTC_ERROR_INVALID_INPUT);
        }
        let handle = *prog as u64;
        let mut programs = programs();
        let removed = programs.as_mut().and_then(|programs| programs.remove(handle).ok());
        removed.ok_or(nvrtcResult::NVRTC_ERROR_INVALID_PROGRAM)?;
        write(prog, std::ptr::null_mut())
    }
}

/// The name of an error.
#[allow(non_snake_case, reason = "NVRTC's name")]
#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetErrorString(result: nvrtcResult) -> *const c_char {
    use nvrtcResult as R;
    let name = match result {
        R::NVRTC_SUCCESS => c"NVRTC_SUCCESS",
        R::NVRTC_ERROR_INVALID_INPUT => c"NVRTC_ERROR_INVALID_INPUT",
        R::NVRTC_ERROR_INVALID_PROGRAM => c"NVRTC_ERROR_INVALID_PROGRAM",
        R::NVRTC_ERROR_INVALID_OPTION => c"NVRTC_ERROR_INVALID_OPTION",
        R::NVRTC_ERROR_COMPILATION => c"NVRTC_ERROR_COMPILATION",
        R::NVRTC_ERROR_BUILTIN_OPERATION_FAILURE => c"NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
        _ => c"NVRTC_ERROR unknown",
    };
    name.as_ptr()
}

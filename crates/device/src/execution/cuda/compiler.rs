//! The compiler of kernels, NVRTC, which turns the text of a source into code for a device.

use std::ffi::{CString, c_char, c_int};
use std::fmt;
use std::ptr;

use cudarc::nvrtc::sys as nvrtc;

use super::bindings::functions;
use super::driver::Called;
use crate::execution::call::{KernelHeader, KernelSource};
use crate::ground::CudaError;

/// The header that every source includes: spans of elements, and functions that CUDA C++ lacks.
static HEADER: KernelHeader =
    KernelHeader { name: c"meristem.cuh", text: include_str!("meristem.cuh") };

functions!(nvrtc, nvrtc::nvrtcResult, "libnvrtc", {
    nvrtcVersion(*mut c_int, *mut c_int);
    nvrtcCreateProgram(
        *mut nvrtc::nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char,
        *const *const c_char,
    );
    nvrtcCompileProgram(nvrtc::nvrtcProgram, c_int, *const *const c_char);
    nvrtcGetProgramLogSize(nvrtc::nvrtcProgram, *mut usize);
    nvrtcGetProgramLog(nvrtc::nvrtcProgram, *mut c_char);
    nvrtcGetCUBINSize(nvrtc::nvrtcProgram, *mut usize);
    nvrtcGetCUBIN(nvrtc::nvrtcProgram, *mut c_char);
    nvrtcDestroyProgram(*mut nvrtc::nvrtcProgram);
});

/// Architecture of a device, such as `sm_90a`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Architecture(String);

impl Architecture {
    /// The architecture of a device with this compute capability (major, minor), including features
    /// that only this architecture has.
    pub(super) fn from_capability((major, minor): (i32, i32)) -> Architecture {
        let own = if major >= 9 { "a" } else { "" };
        Architecture(format!("sm_{major}{minor}{own}"))
    }

    /// Options of the compiler. Products are not contracted into sums unless a kernel calls `fmaf`,
    /// so that results do not depend on the compiler's choice. NVRTC 13.0 compiles a generic lambda
    /// in a kernel as a host function, unless functions are device functions by default.
    fn options(&self) -> [String; 4] {
        [
            format!("--gpu-architecture={self}"),
            "--std=c++17".into(),
            "--fmad=false".into(),
            "--device-as-default-execution-space".into(),
        ]
    }

    /// Everything that the code of a source depends on, apart from the compiler.
    pub(super) fn inputs(&self, source: &KernelSource) -> String {
        let headers = headers(source).map(|header| header.text);
        let texts: Vec<&str> = headers.chain([source.text]).collect();
        format!("{}\n{}", self.options().join(" "), texts.join("\n"))
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The compiler's library.
pub(super) struct KernelCompiler {
    functions: Functions,
    /// Its version, as `13.0`.
    pub(super) version: String,
}

impl KernelCompiler {
    /// Finds the library.
    pub(super) fn find() -> Called<KernelCompiler> {
        // SAFETY: this loads the library named libnvrtc, whose initialisers are the compiler's own.
        if !unsafe { nvrtc::is_culib_present() } {
            return Err(CudaError::NoCompiler);
        }
        let functions = Functions::find()?;
        let (mut major, mut minor): (c_int, c_int) = (0, 0);
        // SAFETY: writes two numbers.
        check("nvrtcVersion", unsafe { (functions.nvrtcVersion)(&mut major, &mut minor) })?;
        Ok(KernelCompiler { functions, version: format!("{major}.{minor}") })
    }

    /// Compiles a source to code for the target.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's messages.
    pub(super) fn compile(
        &self,
        source: &'static KernelSource,
        target: &Architecture,
    ) -> Called<Vec<u8>> {
        let program = NvrtcProgram::new(&self.functions, source)?;
        let options = target.options().map(|option| c_string("option", &option));
        let options = options.into_iter().collect::<Called<Vec<CString>>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program lives, and the options for the call.
        let code = unsafe {
            let count = pointers.len() as c_int;
            (self.functions.nvrtcCompileProgram)(program.raw, count, pointers.as_ptr())
        };
        if code == nvrtc::nvrtcResult::NVRTC_ERROR_COMPILATION as u32 {
            let (source_name, architecture) = (source.name, target.to_string());
            return Err(CudaError::Compile { source_name, architecture, log: program.log()? });
        }
        check("nvrtcCompileProgram", code)?;
        program.code()
    }
}

fn headers(source: &KernelSource) -> impl Iterator<Item = &KernelHeader> {
    std::iter::once(&HEADER).chain(source.headers)
}

/// A program of the compiler.
struct NvrtcProgram<'a> {
    functions: &'a Functions,
    raw: nvrtc::nvrtcProgram,
}

impl<'a> NvrtcProgram<'a> {
    fn new(functions: &'a Functions, source: &'static KernelSource) -> Called<NvrtcProgram<'a>> {
        let (text, name) = (c_string("source", source.text)?, c_string("name", source.name)?);
        let texts = headers(source).map(|header| c_string("header", header.text));
        let texts = texts.collect::<Called<Vec<CString>>>()?;
        let contents: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
        let names: Vec<*const c_char> = headers(source).map(|h| h.name.as_ptr()).collect();
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle; all texts live for the call, and both lists have one entry per
        // header.
        let code = unsafe {
            (functions.nvrtcCreateProgram)(
                &mut raw,
                text.as_ptr(),
                name.as_ptr(),
                names.len() as c_int,
                contents.as_ptr(),
                names.as_ptr(),
            )
        };
        check("nvrtcCreateProgram", code)?;
        Ok(NvrtcProgram { functions, raw })
    }

    /// Messages of the compilation.
    fn log(&self) -> Called<String> {
        let mut size = 0;
        // SAFETY: writes one number.
        let code = unsafe { (self.functions.nvrtcGetProgramLogSize)(self.raw, &mut size) };
        check("nvrtcGetProgramLogSize", code)?;
        let mut log = vec![0u8; size];
        // SAFETY: writes `size` bytes, the last of them zero.
        let code =
            unsafe { (self.functions.nvrtcGetProgramLog)(self.raw, log.as_mut_ptr().cast()) };
        check("nvrtcGetProgramLog", code)?;
        Ok(String::from_utf8_lossy(&log).trim_end_matches('\0').trim_end().to_owned())
    }

    /// The compiled code.
    fn code(&self) -> Called<Vec<u8>> {
        let mut size = 0;
        // SAFETY: writes one number.
        let code = unsafe { (self.functions.nvrtcGetCUBINSize)(self.raw, &mut size) };
        check("nvrtcGetCUBINSize", code)?;
        let mut binary = vec![0u8; size];
        // SAFETY: writes `size` bytes.
        let code = unsafe { (self.functions.nvrtcGetCUBIN)(self.raw, binary.as_mut_ptr().cast()) };
        check("nvrtcGetCUBIN", code)?;
        Ok(binary)
    }
}

impl Drop for NvrtcProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: created once by `new`. A failure cannot be reported.
        let _ = unsafe { (self.functions.nvrtcDestroyProgram)(&mut self.raw) };
    }
}

/// Turns a code of the compiler into a result.
fn check(function: &'static str, code: u32) -> Called {
    if code == nvrtc::nvrtcResult::NVRTC_SUCCESS as u32 {
        return Ok(());
    }
    let message = "NVRTC's documentation lists its codes (nvrtcResult)".to_owned();
    Err(CudaError::Call { function, code: format!("code {code}"), message })
}

fn c_string(what: &'static str, text: &str) -> Called<CString> {
    CString::new(text).map_err(|_| CudaError::Call {
        function: "nvrtcCreateProgram",
        code: "NVRTC_ERROR_INVALID_INPUT".to_owned(),
        message: format!("the {what} holds a zero byte"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_the_devices_own_architecture() {
        assert_eq!(Architecture::from_capability((8, 0)).to_string(), "sm_80");
        assert_eq!(Architecture::from_capability((9, 0)).to_string(), "sm_90a");
        assert_eq!(Architecture::from_capability((10, 0)).to_string(), "sm_100a");
    }
}

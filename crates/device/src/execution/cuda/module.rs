//! Loaded kernels.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;

use cudarc::driver::sys as cu;

use super::cache::KernelCache;
use super::compiler::{Architecture, KernelCompiler};
use super::driver::{Called, check, driver};
use crate::execution::call::{Kernel, KernelSource};
use crate::ground::sync::{Mutex, lock};

/// The kernels of a source on one device.
pub(super) struct KernelModule {
    raw: cu::CUmodule,
    functions: Mutex<HashMap<&'static str, KernelFunction>>,
}

/// A kernel's function.
#[derive(Clone, Copy)]
pub(super) struct KernelFunction {
    pub(super) raw: cu::CUfunction,
    /// Largest number of bytes of dynamic shared memory, as set so far.
    shared: u32,
    /// Largest number of threads of a block, as its registers allow.
    pub(super) threads: u32,
}

// SAFETY: modules and functions are handles of the driver, which locks their objects.
unsafe impl Send for KernelModule {}
// SAFETY: as above.
unsafe impl Sync for KernelModule {}

impl KernelModule {
    /// Compiles and loads a source, or loads its code from the cache. The context is current.
    pub(super) fn load(
        source: &'static KernelSource,
        target: &Architecture,
    ) -> Called<KernelModule> {
        let (cache, inputs) = (KernelCache::for_user(), target.inputs(source));
        let compiler = KernelCompiler::find();
        let version = compiler.as_ref().ok().map(|compiler| compiler.version.as_str());
        let cached = cache.as_ref().and_then(|cache| cache.load(&inputs, version));
        // Code that the driver refuses was damaged, or made for another driver.
        if let Some(module) = cached.and_then(|code| KernelModule::from_code(&code).ok()) {
            return Ok(module);
        }
        let compiler = compiler?;
        let code = compiler.compile(source, target)?;
        let module = KernelModule::from_code(&code)?;
        if let Some(cache) = cache {
            cache.store(&inputs, &compiler.version, &code);
        }
        Ok(module)
    }

    fn from_code(code: &[u8]) -> Called<KernelModule> {
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle. The driver checks the code, and reads the number of bytes in
        // the header. The compiler wrote the header, and the cache keeps complete files only.
        check("cuModuleLoadData", unsafe {
            (driver().cuModuleLoadData)(&mut raw, code.as_ptr().cast::<c_void>())
        })?;
        Ok(KernelModule { raw, functions: Mutex::default() })
    }

    /// The function of a kernel, with at least `shared` bytes of dynamic shared memory.
    pub(super) fn function(&self, kernel: &'static Kernel, shared: u32) -> Called<KernelFunction> {
        let mut functions = lock(&self.functions);
        let known = functions.get(kernel.entry).copied();
        let mut function = known.map_or_else(|| self.find(kernel.entry), Ok)?;
        if shared > function.shared {
            let attribute =
                cu::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function belongs to this module, which lives.
            check("cuFuncSetAttribute", unsafe {
                (driver().cuFuncSetAttribute)(function.raw, attribute, shared as i32)
            })?;
            function.shared = shared;
        }
        functions.insert(kernel.entry, function);
        Ok(function)
    }

    fn find(&self, entry: &'static str) -> Called<KernelFunction> {
        let name = CString::new(entry).unwrap_or_default();
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle; the module and the name live.
        check("cuModuleGetFunction", unsafe {
            (driver().cuModuleGetFunction)(&mut raw, self.raw, name.as_ptr())
        })?;
        use cu::CUfunction_attribute as Attribute;
        let shared = attribute(raw, Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?;
        let threads = attribute(raw, Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
        Ok(KernelFunction { raw, shared, threads })
    }
}

fn attribute(function: cu::CUfunction, of: cu::CUfunction_attribute) -> Called<u32> {
    let mut value = 0;
    // SAFETY: writes one number; the function's module lives.
    check("cuFuncGetAttribute", unsafe {
        (driver().cuFuncGetAttribute)(&mut value, of, function)
    })?;
    Ok(u32::try_from(value).unwrap_or(0))
}

impl Drop for KernelModule {
    fn drop(&mut self) {
        // SAFETY: loaded once by `from_code`; it is dropped with its context, whose work is done. A
        // failure cannot be reported.
        let _ = unsafe { (driver().cuModuleUnload)(self.raw) };
    }
}

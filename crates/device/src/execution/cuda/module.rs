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

/// Bytes of shared memory of a block from which a kernel requests the largest shared memory of a
/// multiprocessor (its carveout). A multiprocessor has registers for four blocks of such a kernel,
/// which together need more than half of that memory: with a smaller carveout fewer would run.
const CARVEOUT_FROM_BYTES: u32 = 32 << 10;

/// A kernel's function.
#[derive(Clone, Copy)]
pub(super) struct KernelFunction {
    pub(super) raw: cu::CUfunction,
    /// Bytes of static shared memory of a block.
    fixed: u32,
    /// Whether the largest shared memory of a multiprocessor was requested for this function.
    carved: bool,
    /// Limit of the dynamic shared memory of a block, in bytes, that the driver was given for this
    /// function.
    shared_max: u32,
    /// Largest number of threads of a block, as its registers allow.
    pub(super) threads_max: u32,
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
        use cu::CUfunction_attribute as Attribute;
        if shared > function.shared_max {
            let of = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            set_attribute(function.raw, of, shared)?;
            function.shared_max = shared;
        }
        if !function.carved && function.fixed + shared >= CARVEOUT_FROM_BYTES {
            let of = Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            set_attribute(function.raw, of, 100)?; // percent
            function.carved = true;
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
        let shared_max =
            attribute(raw, Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?;
        let threads_max = attribute(raw, Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
        let fixed = attribute(raw, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        Ok(KernelFunction { raw, fixed, carved: false, shared_max, threads_max })
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

fn set_attribute(function: cu::CUfunction, of: cu::CUfunction_attribute, value: u32) -> Called {
    // SAFETY: the function's module lives.
    check("cuFuncSetAttribute", unsafe {
        (driver().cuFuncSetAttribute)(function, of, value as i32)
    })
}

impl Drop for KernelModule {
    fn drop(&mut self) {
        // SAFETY: loaded once by `from_code`; it is dropped with its context, whose work is done. A
        // failure cannot be reported.
        let _ = unsafe { (driver().cuModuleUnload)(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::execution::cuda::context::CudaContext;
    use crate::ground::DeviceId;

    static SOURCE: KernelSource = KernelSource {
        name: "module.rs",
        text: "extern \"C\" __global__ void fixed(float* to) {
            __shared__ volatile float of[4096];
            of[threadIdx.x] = to[threadIdx.x];
            to[threadIdx.x] = of[threadIdx.x];
        }",
        headers: &[],
    };
    static FIXED: Kernel = Kernel { source: &SOURCE, entry: "fixed", operands: &[], values: 8 };

    #[test]
    #[ignore = "needs a GPU or the stand-in"]
    fn a_kernel_with_much_shared_memory_has_all_of_a_multiprocessor() {
        let context = CudaContext::open(DeviceId::Cuda(0)).unwrap();
        let module = context.module(&SOURCE).unwrap();
        let carve_out = |shared: u32| {
            let function = module.function(&FIXED, shared).unwrap();
            let of = cu::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            attribute(function.raw, of).unwrap()
        };
        // 16 KiB are static. Without a preference it is -1, which is no number of percent.
        assert_eq!([0, 8 << 10].map(carve_out), [0, 0]);
        assert_eq!([16 << 10, 0].map(carve_out), [100, 100]);
    }
}

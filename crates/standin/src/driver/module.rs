//! Modules, kernels and their launches.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule, CUresult, CUstream};

use super::call::{DriverAnswer, INVALID, driver, in_context, wait, write};
use super::copy::check;
use super::stream::stream;
use crate::kernel::{KernelGrid, LoadedModule, THREADS_MAX};
use crate::order::{DeviceWork, LoadedFunction, SimMachine};

/// Bytes of dynamic shared memory that a kernel may have by default.
const DYNAMIC_DEFAULT: usize = 48 << 10;

/// A launch, as the caller describes it.
pub(super) struct KernelLaunch {
    pub(super) function: CUfunction,
    pub(super) blocks: [c_uint; 3],
    pub(super) threads: [c_uint; 3],
    pub(super) shared: c_uint,
    pub(super) values: *mut *mut c_void,
    pub(super) extra: *mut *mut c_void,
}

impl KernelLaunch {
    /// The grid, with a copy of the arguments.
    ///
    /// # Safety
    /// `values` points to as many pointers as the kernel has arguments, each to one of its type.
    pub(super) unsafe fn grid(&self, machine: &SimMachine) -> DriverAnswer<DeviceWork> {
        let function = machine.functions.get(self.function as u64)?;
        let LoadedFunction { module, kernel, dynamic_max, .. } = function;
        let product = |sizes: [c_uint; 3]| sizes.iter().map(|size| u64::from(*size)).product();
        let threads: u64 = product(self.threads);
        let [_, y, z] = self.blocks;
        let most = module.threads_max(*kernel).unwrap_or(THREADS_MAX).min(THREADS_MAX);
        let wrong = threads == 0
            || threads > most as u64
            || self.threads[2] > 64
            || product(self.blocks) == 0
            || self.blocks[0] > c_int::MAX as c_uint
            || y.max(z) > 65535
            || self.shared as usize > *dynamic_max
            || !self.extra.is_null()
            || (self.values.is_null() && !module.arguments(*kernel).is_empty());
        if wrong {
            let Self { blocks, threads, shared, .. } = self;
            eprintln!(
                "meristem-standin: kernel {}: {blocks:?} blocks of {threads:?} threads (at most \
                 {most}) with {shared} bytes of dynamic shared memory (at most {dynamic_max}), \
                 arguments by `kernelParams`",
                module.name(*kernel)
            );
            return Err(INVALID);
        }
        let (module, shared) = (Arc::clone(module), self.shared as usize);
        // SAFETY: the caller's contract.
        let grid = DeviceWork::Grid(unsafe {
            KernelGrid::new(module, *kernel, self.blocks, self.threads, shared, self.values)
        });
        check(machine, &grid)?;
        Ok(grid)
    }
}

driver! {
    /// Loads code from `nvrtcGetCUBIN`.
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) {
        in_context(|machine, device| {
            if image.is_null() || module.is_null() {
                return Err(INVALID);
            }
            let loaded = LoadedModule::load(image.cast()).map_err(|why| {
                eprintln!("meristem-standin: cuModuleLoadData: {why}");
                CUresult::CUDA_ERROR_INVALID_IMAGE
            })?;
            write(module, machine.modules.insert((device, Arc::new(loaded))) as CUmodule)
        })
    }

    /// Unloads a module with its kernels, after all work that was enqueued on the device.
    fn cuModuleUnload(hmod: CUmodule) {
        let owner = hmod as u64;
        wait(|machine, device| machine.modules.get(owner).map(|_| machine.ends(device)))?;
        in_context(|machine, _| {
            machine.functions.retain(|_, function| function.owner != owner);
            machine.modules.remove(owner).map(drop)
        })
    }

    /// A kernel of a module by its name.
    fn cuModuleGetFunction(hfunc: *mut CUfunction, hmod: CUmodule, name: *const c_char) {
        in_context(|machine, _| {
            if hfunc.is_null() || name.is_null() {
                return Err(INVALID);
            }
            let owner = hmod as u64;
            let module = Arc::clone(&machine.modules.get(owner)?.1);
            let kernel = module.find(CStr::from_ptr(name));
            let kernel = kernel.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
            let same = |known: &LoadedFunction| known.owner == owner && known.kernel == kernel;
            let known = machine.functions.iter().find(|(_, function)| same(function));
            let handle = known.map(|(handle, _)| handle).unwrap_or_else(|| {
                let (dynamic_max, carve_out) = (DYNAMIC_DEFAULT, -1);
                let function = LoadedFunction { owner, module, kernel, dynamic_max, carve_out };
                machine.functions.insert(function)
            });
            write(hfunc, handle as CUfunction)
        })
    }

    /// A number that describes a kernel. Registers and local memory are not known: 0.
    fn cuFuncGetAttribute(pi: *mut c_int, attrib: CUfunction_attribute, hfunc: CUfunction) {
        use CUfunction_attribute as A;
        in_context(|machine, _| {
            let function = machine.functions.get(hfunc as u64)?;
            let value = match attrib {
                A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT => {
                    return write(pi, function.carve_out);
                }
                A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => {
                    function.module.threads_max(function.kernel).unwrap_or(THREADS_MAX)
                }
                A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES => function.module.shared_bytes(),
                A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => function.dynamic_max,
                A::CU_FUNC_ATTRIBUTE_PTX_VERSION | A::CU_FUNC_ATTRIBUTE_BINARY_VERSION => 90,
                A::CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES
                | A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
                | A::CU_FUNC_ATTRIBUTE_NUM_REGS => 0,
                _ => return Err(INVALID),
            };
            write(pi, value as c_int)
        })
    }

    /// Permits more dynamic shared memory, or states a preference, which changes nothing.
    fn cuFuncSetAttribute(hfunc: CUfunction, attrib: CUfunction_attribute, value: c_int) {
        use CUfunction_attribute as A;
        in_context(|machine, _| {
            let most = machine.shared_max;
            let function = machine.functions.get_mut(hfunc as u64)?;
            match attrib {
                A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => {
                    let bytes = usize::try_from(value).ok().filter(|bytes| *bytes <= most);
                    function.dynamic_max = bytes.ok_or(INVALID)?;
                    Ok(())
                }
                A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT => {
                    let percent = (-1..=100).contains(&value).then_some(value);
                    function.carve_out = percent.ok_or(INVALID)?;
                    Ok(())
                }
                _ => Err(INVALID),
            }
        })
    }

    /// Launches a kernel in stream order. Its arguments are copied now.
    fn cuLaunchKernel(
        f: CUfunction,
        gridDimX: c_uint,
        gridDimY: c_uint,
        gridDimZ: c_uint,
        blockDimX: c_uint,
        blockDimY: c_uint,
        blockDimZ: c_uint,
        sharedMemBytes: c_uint,
        hStream: CUstream,
        kernelParams: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        in_context(|machine, device| {
            let launch = KernelLaunch {
                function: f,
                blocks: [gridDimX, gridDimY, gridDimZ],
                threads: [blockDimX, blockDimY, blockDimZ],
                shared: sharedMemBytes,
                values: kernelParams,
                extra,
            };
            let handle = stream(machine, device, hStream)?;
            let work = launch.grid(machine)?;
            machine.enqueue(handle, vec![], work).map(drop)
        })
    }
}

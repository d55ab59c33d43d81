//! Cases that run in separate processes, and wrappers of the driver's functions without pointers.

use std::ffi::{CStr, CString, c_void};
use std::ops::Range;
use std::process::{Command, Output};
use std::{env, fs, ptr};

use cudarc::driver::sys::{
    CUcontext, CUdeviceptr, CUevent, CUfunction, CUmodule, CUresult, CUstream,
};
use cudarc::nvrtc::sys::nvrtcResult;
use meristem_standin::driver::{context, copy, device, event, memory, module, stream};
use meristem_standin::nvrtc;

/// Environment variable of a process that runs a case: the file with the case's code.
const CODE: &str = "MERISTEM_STANDIN_TEST_CODE";

/// Value of the variable where the case compiles its kernels itself.
const COMPILE: &str = "compile";

/// A case: its test, its kernels, and the function that its process runs.
pub(crate) struct Case {
    /// Path of the test, as `cargo test` prints it.
    pub(crate) name: &'static str,
    pub(crate) source: &'static str,
    pub(crate) body: fn(&Gpu),
}

/// Output of a case's process.
pub(crate) struct Said {
    pub(crate) seed: u64,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Case {
    /// Runs the case once for each seed. In the process of a case there is nothing to look at.
    pub(crate) fn run(&self, seeds: Range<u64>) -> Vec<Said> {
        if self.is_here() {
            return vec![];
        }
        let file = env::temp_dir().join(format!(
            "meristem-standin-test-{}-{}",
            std::process::id(),
            self.name.replace(':', "_")
        ));
        fs::write(&file, compile(self.source, &[]).unwrap()).unwrap();
        let said = seeds.map(|seed| {
            let mut command = self.command(seed);
            let (succeeded, said) = finish(command.env(CODE, &file), seed);
            assert!(succeeded, "seed {seed}: {}\n{}", said.stdout, said.stderr);
            said
        });
        let said = said.collect();
        fs::remove_file(&file).unwrap();
        said
    }

    /// Runs the case once, with kernels that AddressSanitizer instruments and whose error must end
    /// the process. Returns the report.
    pub(crate) fn run_under_asan(&self) -> Option<String> {
        if self.is_here() {
            return None;
        }
        let found = Command::new("g++").arg("-print-file-name=libasan.so").output().unwrap();
        let library = String::from_utf8(found.stdout).unwrap();
        let mut command = self.command(0);
        command.env(CODE, COMPILE).env("LD_PRELOAD", library.trim());
        command.env("MERISTEM_STANDIN_FLAGS", "-fsanitize=address -g1");
        command.env("ASAN_OPTIONS", "detect_leaks=0");
        let (succeeded, said) = finish(&mut command, 0);
        assert!(!succeeded, "{}\n{}", said.stdout, said.stderr);
        Some(said.stderr)
    }

    /// Runs the case's function, if this process was started for it.
    fn is_here(&self) -> bool {
        let Ok(code) = env::var(CODE) else { return false };
        let code = match code.as_str() {
            COMPILE => compile(self.source, &[]).unwrap(),
            path => fs::read(path).unwrap(),
        };
        (self.body)(&Gpu::open(&code));
        true
    }

    fn command(&self, seed: u64) -> Command {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args([self.name, "--exact", "--nocapture"]);
        command.env("MERISTEM_STANDIN_SEED", seed.to_string());
        command
    }
}

/// Runs a process; whether it succeeded, and its output.
fn finish(command: &mut Command, seed: u64) -> (bool, Said) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let [stdout, stderr] =
        [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    (status.success(), Said { seed, stdout, stderr })
}

/// Values that a case printed with `say`.
pub(crate) fn values(said: &Said) -> Vec<&str> {
    said.stdout.lines().filter_map(|line| line.strip_prefix("value: ")).collect()
}

/// Prints a value of a case.
pub(crate) fn say(value: impl std::fmt::Debug) {
    println!("\nvalue: {value:?}");
}

/// A header that all kernels may include.
const HEADER: (&CStr, &CStr) =
    (c"twice.cuh", c"#pragma once\ntemplate <class T> __device__ T twice(T x) { return x + x; }\n");

/// Compiles kernels; the error is the log.
pub(crate) fn compile(source: &str, options: &[&str]) -> Result<Vec<u8>, String> {
    let source = CString::new(source).unwrap();
    let standard = ["--gpu-architecture=sm_90a", "--fmad=false", "-default-device"];
    let options = standard.iter().chain(options).map(|option| CString::new(*option).unwrap());
    let options: Vec<CString> = options.collect();
    let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
    let mut program = ptr::null_mut();
    // SAFETY: all pointers point to values of the types that the functions require.
    unsafe {
        let (place, source, name) = (&raw mut program, source.as_ptr(), c"test.cu".as_ptr());
        let (header, text) = (&HEADER.0.as_ptr(), &HEADER.1.as_ptr());
        let made = nvrtc::nvrtcCreateProgram(place, source, name, 1, text, header);
        assert_eq!(made, nvrtcResult::NVRTC_SUCCESS);
        let count = options.len() as i32;
        let compiled = nvrtc::nvrtcCompileProgram(program, count, options.as_ptr());
        let mut size = 0;
        nvrtc::nvrtcGetProgramLogSize(program, &raw mut size);
        let mut log = vec![0u8; size];
        nvrtc::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
        let log = CStr::from_bytes_with_nul(&log).unwrap().to_string_lossy().into_owned();
        nvrtc::nvrtcGetCUBINSize(program, &raw mut size);
        let mut code = vec![0u8; size];
        nvrtc::nvrtcGetCUBIN(program, code.as_mut_ptr().cast());
        nvrtc::nvrtcDestroyProgram(&raw mut program);
        match compiled {
            nvrtcResult::NVRTC_SUCCESS => Ok(code),
            _ => Err(format!("{compiled:?}: {log}")),
        }
    }
}

/// Fails unless the driver was content.
#[track_caller]
pub(crate) fn good(code: CUresult) {
    assert_eq!(code, CUresult::CUDA_SUCCESS);
}

/// Blocks, threads of each, and bytes of dynamic shared memory of each.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    pub(crate) shared: u32,
}

/// A shape without dynamic shared memory.
pub(crate) fn shape(blocks: u32, threads: u32) -> Shape {
    Shape { blocks, threads, shared: 0 }
}

/// Device 0 with a module.
pub(crate) struct Gpu {
    pub(crate) context: CUcontext,
    pub(crate) module: CUmodule,
}

impl Gpu {
    fn open(code: &[u8]) -> Self {
        let mut gpu = Self { context: ptr::null_mut(), module: ptr::null_mut() };
        // SAFETY: the places are ours, the code is whole.
        unsafe {
            good(device::cuInit(0));
            good(context::cuDevicePrimaryCtxRetain(&raw mut gpu.context, 0));
            good(context::cuCtxSetCurrent(gpu.context));
            good(module::cuModuleLoadData(&raw mut gpu.module, code.as_ptr().cast()));
        }
        gpu
    }

    pub(crate) fn function(&self, name: &CStr) -> CUfunction {
        self.find(name).unwrap()
    }

    /// The kernel with this name.
    pub(crate) fn find(&self, name: &CStr) -> Result<CUfunction, CUresult> {
        let mut function = ptr::null_mut();
        // SAFETY: the place is ours.
        match unsafe { module::cuModuleGetFunction(&raw mut function, self.module, name.as_ptr()) }
        {
            CUresult::CUDA_SUCCESS => Ok(function),
            code => Err(code),
        }
    }

    /// Memory for `count` values of four bytes.
    pub(crate) fn allocate(&self, count: usize) -> CUdeviceptr {
        let mut address = 0;
        // SAFETY: the place is ours.
        unsafe { good(memory::cuMemAlloc_v2(&raw mut address, count * 4)) };
        address
    }

    /// Page-locked memory for values of four bytes.
    pub(crate) fn pinned(&self, count: usize) -> &'static mut [u32] {
        let mut address = ptr::null_mut();
        // SAFETY: the place is ours; the memory is never freed.
        unsafe {
            good(memory::cuMemHostAlloc(&raw mut address, count * 4, 0));
            std::slice::from_raw_parts_mut(address.cast(), count)
        }
    }

    pub(crate) fn stream(&self) -> CUstream {
        let mut made = ptr::null_mut();
        // SAFETY: the place is ours.
        unsafe { good(stream::cuStreamCreate(&raw mut made, 1)) };
        made
    }

    /// An event recorded at the end of a stream.
    pub(crate) fn record(&self, on: CUstream) -> CUevent {
        let mut made = ptr::null_mut();
        // SAFETY: the place is ours.
        unsafe {
            good(event::cuEventCreate(&raw mut made, 2));
            good(event::cuEventRecord(made, on));
        }
        made
    }

    /// Launches a kernel; the arguments are values of eight bytes at most.
    pub(crate) fn launch(
        &self,
        on: CUstream,
        name: &CStr,
        Shape { blocks, threads, shared }: Shape,
        values: &[u64],
    ) -> CUresult {
        let mut values: Vec<*mut c_void> =
            values.iter().map(|value| ptr::from_ref(value).cast_mut().cast()).collect();
        let (function, values) = (self.function(name), values.as_mut_ptr());
        let none = ptr::null_mut();
        // SAFETY: there is one argument for each parameter of the kernel.
        unsafe {
            module::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, on, values, none)
        }
    }

    /// Copies to the device in stream order.
    pub(crate) fn upload(&self, on: CUstream, to: CUdeviceptr, values: &[u32]) {
        let bytes = values.len() * 4;
        // SAFETY: the values are live; values in pageable memory are read before the call returns.
        unsafe { good(copy::cuMemcpyHtoDAsync_v2(to, values.as_ptr().cast(), bytes, on)) };
    }

    /// Copies back in stream order, and waits.
    pub(crate) fn download(&self, on: CUstream, from: CUdeviceptr, count: usize) -> Vec<u32> {
        let mut values = vec![0u32; count];
        let to = values.as_mut_ptr().cast();
        // SAFETY: there is room for the values.
        unsafe { good(copy::cuMemcpyDtoHAsync_v2(to, from, count * 4, on)) };
        values
    }

    pub(crate) fn wait(&self, on: CUstream) -> CUresult {
        // SAFETY: has no pointers.
        unsafe { stream::cuStreamSynchronize(on) }
    }
}

//! A stand-in for the CUDA driver, NVRTC and NCCL, on a machine without a GPU.
//!
//! The library exports the functions that the CUDA backend loads. `cargo xtask standin COMMAND`
//! runs a command with it in place of `libcuda.so`, `libnvrtc.so` and `libnccl.so.2`, so the tested
//! backend is exactly the backend that runs on a GPU. This crate uses no other crate of Meristem,
//! and none uses it. All signatures use the types of `cudarc`, so that they cannot drift.
//!
//! # How it works
//! - **Lazy and adversarial.** A stream is a queue. It advances when the host needs a result (a
//!   synchronisation, a blocking copy, `cuMemFree`), or queries it (a query runs a random number of
//!   commands). The seed determines the order, which only stream order and events restrict. This
//!   reveals a missing wait, and a page-locked buffer or memory that is reused or freed too early.
//!   The same seed and the same calls give the same order, except with NCCL, whose threads run
//!   streams as well.
//! - **Kernels are compiled** by the C++ compiler, behind a header (`kernel/shim.h`) with the
//!   built-in functions of CUDA. Threads of a block are fibers. Blocks run forward, reversed or
//!   shuffled, and so do the threads of a block between two barriers.
//! - **Memory is hostile.** Fresh memory and shared memory are full of poison (a NaN). Next to each
//!   allocation are a guard zone, checked after each command, and inaccessible pages. The pages of
//!   freed memory are unmapped. Pointers among the arguments of kernels and of graph nodes are
//!   checked against live allocations when they are enqueued and when they run.
//! - **Exchanges of NCCL** are commands, too, and go over sockets to other processes of this
//!   machine, each of which has its own simulated devices.
//! - **A fault stays**: every later call on the context returns the same error. One line on stderr
//!   describes it.
//!
//! # Kernels
//! The sources are the sources that NVRTC gets. The header requires:
//!
//! | subject | rule |
//! |---|---|
//! | kernels | `extern "C" __global__ void NAME(…)`, also from macros and headers |
//! | exchanges of a warp | the mask 0xffffffff, and all 32 lanes there |
//! | `__syncthreads` | all threads that have not ended, at the same line |
//! | atomics | `int`, `unsigned`, `unsigned long long`; with floats a compile error |
//! | `expf`, `tanhf`, … | a compile error: a device gives other bits; to be written with `fmaf` |
//! | vectors | aligned accesses; others are a fault |
//!
//! `MERISTEM_STANDIN` is defined, for code that a device needs in assembly. The header has these
//! functions instead:
//!
//! | instruction | function |
//! |---|---|
//! | `cp.async` | `__pipeline_memcpy_async`, `__pipeline_commit`, `__pipeline_wait_prior` |
//! | `mma.sync` m16n8k8, TF32 | `meristem_mma_tf32` |
//! | `mma.sync` m16n8k16, bf16 | `meristem_mma_bf16` |
//! | `cvt.rna.tf32.f32` | `meristem_to_tf32` |
//!
//! # Settings
//! | variable | meaning | default |
//! |---|---|---|
//! | `MERISTEM_STANDIN_SEED` | decides every order | 0 |
//! | `MERISTEM_STANDIN_DEVICES` | number of devices | 1 |
//! | `MERISTEM_STANDIN_MEMORY` | bytes of memory of each device | 8 GiB |
//! | `MERISTEM_STANDIN_SHARED` | most bytes of dynamic shared memory (sm_86: 101376) | 232448 |
//! | `MERISTEM_STANDIN_NCCL` | version of NCCL, as 22703 | 2.27.3 |
//! | `MERISTEM_STANDIN_NCCL_DIE` | number of the point in NCCL's work at which the process dies | |
//! | `MERISTEM_STANDIN_NCCL_HANG` | number of the group of calls whose thread hangs | |
//! | `MERISTEM_STANDIN_NCCL_FAIL` | number of the group of calls that is refused | |
//! | `MERISTEM_STANDIN_NCCL_STALL` | number of the group of calls that stays in progress | |
//! | `MERISTEM_STANDIN_NCCL_VANISH` | number of the group at which the machine vanishes | |
//! | `MERISTEM_STANDIN_NCCL_SLOW` | seconds before a message of more than 16 MiB is read | 0 |
//! | `MERISTEM_STANDIN_NCCL_NOTICES` | 1, 0: a lost process is noticed, or not | by chance |
//! | `MERISTEM_STANDIN_SERIAL` | 1: `cuEventQuery` waits while an exchange waits for others | 0 |
//! | `MERISTEM_STANDIN_CALLS` | file to which the names of called driver functions go | |
//! | `MERISTEM_STANDIN_COMPILER` | the C++ compiler, GCC 12 or newer | `g++` |
//! | `MERISTEM_STANDIN_FLAGS` | more flags for it, such as `-fsanitize=address` | |
//!
//! # Limits
//! It cannot model durations, occupancy, the memory model of a GPU (threads take turns, so each
//! sees all writes of the others at once) and the rounding of tensor cores. Device variables
//! without a value in the source (`__device__ float x;`) are taken for shared memory.
//!
//! Events measure times of a device that runs all streams at once, each kernel, copy, fill or
//! exchange for one microsecond: a trace shows which work the order of the streams permits at the
//! same time.

pub mod driver;
mod ground;
mod kernel;
mod memory;
pub mod nvrtc;
mod order;

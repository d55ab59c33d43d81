//! Errors of CUDA: of the driver, the compiler of kernels, and NCCL.

use std::error::Error as StdError;
use std::sync::Arc;

/// Lowest driver version whose functions this crate calls: CUDA 13.0.
pub(crate) const DRIVER_NEEDED: i32 = 13_000;
/// Lowest NCCL version, the first for CUDA 13: 2.27.
pub(crate) const NCCL_NEEDED: i32 = 22_700;

/// Reason why CUDA cannot be used, or why a call of CUDA failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library was not found.
    #[error(
        "no CUDA driver was found: libcuda.so is neither in a folder of LD_LIBRARY_PATH nor in \
         the system's library folders; install NVIDIA's driver (the command nvidia-smi then works)"
    )]
    NoDriver,
    /// The driver is older than this build.
    #[error(
        "the CUDA driver supports CUDA {}, and CUDA {} is needed; install a newer driver",
        version(*found),
        version(DRIVER_NEEDED)
    )]
    DriverTooOld {
        /// CUDA version of the driver, as 1000 × major + 10 × minor.
        found: i32,
    },
    /// A function is missing in a library of CUDA.
    #[error("{library} has no function {function}; install a newer driver and CUDA toolkit")]
    MissingFunction {
        /// The library.
        library: &'static str,
        /// The function.
        function: &'static str,
    },
    /// There is no device of this number.
    #[error("there is no CUDA device {asked}; {}", counted(*found))]
    NoSuchDevice {
        /// Ordinal asked for.
        asked: u32,
        /// Number of devices.
        found: i32,
    },
    /// The device's architecture is older than the kernels.
    #[error(
        "{name} has compute capability {}.{}, and 8.0 is needed; use another device or the cpu",
        capability.0,
        capability.1
    )]
    DeviceTooOld {
        /// Name of the device.
        name: String,
        /// Its compute capability, major and minor.
        capability: (i32, i32),
    },
    /// The compiler's library was not found.
    #[error(
        "no CUDA compiler was found: libnvrtc.so is neither in a folder of LD_LIBRARY_PATH nor in \
         the system's library folders; install the CUDA toolkit, or NVRTC alone \
         (`pip install nvidia-cuda-nvrtc`) and add its folder to LD_LIBRARY_PATH"
    )]
    NoCompiler,
    /// NCCL's library was not found.
    #[error(
        "NCCL was not found: neither libnccl.so.2 nor libnccl.so is in a folder of LD_LIBRARY_PATH \
         or in the system's library folders; install NCCL (Debian: libnccl2, or \
         `pip install nvidia-nccl-cu13` with its `lib` folder in LD_LIBRARY_PATH), or use another \
         kind of ranks"
    )]
    NoNccl,
    /// NCCL is older than this build needs.
    #[error(
        "the NCCL that was found is version {}, and {} is needed; install a newer one",
        nccl_version(*found),
        nccl_version(NCCL_NEEDED)
    )]
    NcclTooOld {
        /// Its version, as 10000 × major + 100 × minor + patch.
        found: i32,
    },
    /// A source of kernels does not compile.
    #[error("the compiler refused {source_name} for {architecture}:\n{log}")]
    Compile {
        /// Name of the source.
        source_name: &'static str,
        /// Architecture compiled for, such as `sm_90a`.
        architecture: String,
        /// Messages of the compiler.
        log: String,
    },
    /// Exchanges with other devices were aborted, because a rank of the group is lost.
    #[error("its exchanges were aborted: {0}")]
    ExchangeAborted(#[source] Arc<dyn StdError + Send + Sync>),
    /// NCCL has noticed that another process of the group is gone; it does not say which.
    #[error("{function}: {message}")]
    PeerLost {
        /// The function of NCCL.
        function: &'static str,
        /// NCCL's explanation.
        message: String,
    },
    /// The system did not lock the memory of host buffers.
    #[error(
        "the system did not lock {count} host buffers of {bytes} bytes in memory ({cause}); for \
         streamed data use smaller batches, fewer envs, or a data budget that holds the dataset"
    )]
    NoLockedMemory {
        /// Number of buffers.
        count: usize,
        /// Bytes of each.
        bytes: usize,
        /// The driver's error.
        cause: String,
    },
    /// A call failed.
    #[error("{function} failed with {code}: {message}")]
    Call {
        /// The function of the driver, the compiler or NCCL.
        function: &'static str,
        /// Name of the code that it returned.
        code: String,
        /// CUDA's explanation of the code.
        message: String,
    },
}

impl CudaError {
    /// Whether the driver had no memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_out_of_memory(&self) -> bool {
        matches!(self, CudaError::Call { code, .. } if code == "CUDA_ERROR_OUT_OF_MEMORY")
    }
}

/// A version in NCCL's form: 22703 is `2.27.3`.
fn nccl_version(number: i32) -> String {
    format!("{}.{}.{}", number / 10000, number % 10000 / 100, number % 100)
}

/// A version in CUDA's form: 13000 is `13.0`.
fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

fn counted(found: i32) -> String {
    match found {
        0 => "none was found: is a GPU there, and may this process see it (CUDA_VISIBLE_DEVICES)?"
            .to_owned(),
        1 => "the only one is cuda:0".to_owned(),
        n => format!("use cuda:0 to cuda:{}", n - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_was_found_and_what_to_do() {
        assert_eq!(
            CudaError::DriverTooOld { found: 12_040 }.to_string(),
            "the CUDA driver supports CUDA 12.4, and CUDA 13.0 is needed; install a newer driver"
        );
        assert_eq!(
            CudaError::NoSuchDevice { asked: 3, found: 2 }.to_string(),
            "there is no CUDA device 3; use cuda:0 to cuda:1"
        );
    }
}

//! Faults of a device: errors that stay until the process ends.

use cudarc::driver::sys::CUresult;

/// An error that work on the device met. Every later call on its context returns the same code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceFault {
    /// Code that calls return.
    pub(crate) code: CUresult,
    /// Cause, for the line on stderr.
    pub(crate) cause: String,
}

impl DeviceFault {
    /// A fault with its cause.
    pub(crate) fn new(code: CUresult, cause: impl Into<String>) -> Self {
        Self { code, cause: cause.into() }
    }

    /// An access to memory that is not there.
    pub(crate) fn illegal_address(cause: impl Into<String>) -> Self {
        Self::new(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, cause)
    }
}

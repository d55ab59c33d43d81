//! A query of the MPI library of this process.

use std::ffi::c_int;

/// Whether the MPI library of this process takes addresses of CUDA memory, as it says itself
/// (`MPIX_Query_cuda_support` of Open MPI and MPICH); `None` if no library has this query. Ask
/// after MPI has started.
pub fn mpi_takes_cuda_memory() -> Option<bool> {
    #[cfg(unix)]
    {
        let process = libloading::os::unix::Library::this();
        // SAFETY: both libraries declare `int MPIX_Query_cuda_support(void)`.
        let query =
            unsafe { process.get::<extern "C" fn() -> c_int>(b"MPIX_Query_cuda_support\0") };
        query.ok().map(|query| query() == 1)
    }
    #[cfg(not(unix))]
    None
}

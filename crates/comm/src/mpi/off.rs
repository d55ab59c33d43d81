//! The transport `mpi` in a build without MPI.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::transport::Transport;

/// Version text of the library: `None` in this build.
pub(crate) fn library() -> Option<String> {
    None
}

/// See [`debug_environment`](crate::Communicator::debug_environment).
pub(crate) const DEBUG_ENVIRONMENT: &[(&str, &str)] = &[];

/// Returns an error that explains how to build with MPI.
pub(crate) fn world(_deadline: Duration) -> Result<Box<dyn Transport>> {
    Err(Error::Unavailable {
        transport: "mpi",
        reason: "this build has no MPI",
        remedy: "install an MPI library with its compiler wrapper, and libclang (Debian: \
                 libopenmpi-dev openmpi-bin libclang-dev), and build with `--features mpi`",
    })
}

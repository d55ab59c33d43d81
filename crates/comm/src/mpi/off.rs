//! The transport `mpi` in a build without it.

use crate::error::{Error, Result};
use crate::transport::Transport;
use std::time::Duration;

/// There is none.
pub(crate) fn library() -> Option<String> {
    None
}

/// See [`debug_environment`](crate::Communicator::debug_environment).
pub(crate) const DEBUG_ENVIRONMENT: &[(&str, &str)] = &[];

/// Says how to get a build that has it.
pub(crate) fn world(_deadline: Duration) -> Result<Box<dyn Transport>> {
    Err(Error::Unavailable {
        transport: "mpi",
        reason: "this build has no MPI",
        remedy: "install an MPI library with its compiler wrapper, and libclang (Debian: \
                 libopenmpi-dev openmpi-bin libclang-dev), and build with `--features mpi`",
    })
}

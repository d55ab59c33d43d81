//! The error type of this crate, and errors of topologies. Other errors are beside their types.

use crate::blueprint::BlueprintError;
use crate::lifecycle::{LifecycleError, RuleError};
use crate::spec::{HostError, SlotName};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A host description is invalid, or the host does not fit the image.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A rule of growth is out of its range.
    #[error(transparent)]
    Rule(#[from] RuleError),
    /// A blueprint is invalid.
    #[error(transparent)]
    Blueprint(#[from] BlueprintError),
    /// The lifecycle does not allow an action.
    #[error(transparent)]
    Lifecycle(#[from] LifecycleError),
    /// A topology read from a file is invalid.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The network could not be built.
    #[error(transparent)]
    Graph(#[from] meristem_nn::Error),
}

/// Errors of topologies read from a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// Invalid JSON, or JSON with other fields.
    #[error(
        "cannot parse the `topology` of the weights file: {0}; the file is damaged, or was not \
         written by meristem"
    )]
    Parse(#[from] serde_json::Error),
    /// A version that this build does not read.
    #[error(
        "`topology` has version {found}, this build reads version {supported}; use the build that \
         wrote the file"
    )]
    Version {
        /// Version of the file.
        found: u32,
        /// Version of this build.
        supported: u32,
    },
    /// A list of layers that is not the one of the host's text.
    #[error(
        "the entry `host` has other layers than `{host}`, the host of the entry `topology`; the \
         file was changed, or is of a newer build"
    )]
    Host {
        /// Host of the topology.
        host: String,
    },
    /// A slot whose fields contradict each other.
    #[error("`topology`, slot {slot}: {problem}")]
    Slot {
        /// The slot.
        slot: SlotName,
        /// The contradiction.
        problem: String,
    },
}

//! The error type of this crate, and errors of topologies. The other errors are defined in the
//! modules whose rules they report.

use crate::blueprint::BlueprintError;
use crate::lifecycle::{LifecycleError, RuleError};
use crate::spec::{HostError, SlotName};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid host description, or a host that does not fit the image.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A rule of growth outside its range.
    #[error(transparent)]
    Rule(#[from] RuleError),
    /// An invalid blueprint.
    #[error(transparent)]
    Blueprint(#[from] BlueprintError),
    /// An action that the lifecycle does not allow.
    #[error(transparent)]
    Lifecycle(#[from] LifecycleError),
    /// An invalid topology in a file.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// A network that could not be built.
    #[error(transparent)]
    Graph(#[from] meristem_nn::Error),
}

/// Errors of topologies read from a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// Invalid JSON, or unexpected fields.
    #[error(
        "cannot parse the `topology` of the weights file: {0}; the file is damaged, or was not \
         written by meristem"
    )]
    Parse(#[from] serde_json::Error),
    /// An unsupported version.
    #[error(
        "`{entry}` has version {found}, and this program reads version {supported}; a newer \
         program wrote the file: use that one"
    )]
    Version {
        /// Entry of the metadata, `topology` or `host`.
        entry: &'static str,
        /// Version of the file.
        found: u32,
        /// Version of this build.
        supported: u32,
    },
    /// A list of layers that contradicts the host's text.
    #[error(
        "the entry `host` has other layers than `{host}`, the host of the entry `topology`; the \
         file was changed"
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

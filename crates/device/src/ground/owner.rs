//! Owners of memory (V3).

use std::fmt;

/// Purpose of a tensor's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Owner {
    /// Resident datasets.
    Dataset,
    /// Parameters, their gradients and optimiser state.
    Parameters,
    /// Copies of parameters for a rollback.
    Snapshots,
    /// Arenas of plans.
    Activations,
    /// Batches and their buffers.
    Batches,
    /// The learned controller: its parameters, optimiser state and rollouts.
    Policy,
    /// Buffers of gradient exchange.
    Collectives,
    /// Metrics on the device.
    Metrics,
    /// Everything else.
    Other,
}

impl Owner {
    /// All owners, in the order of reports.
    pub const ALL: [Owner; 9] = [
        Owner::Dataset,
        Owner::Parameters,
        Owner::Snapshots,
        Owner::Activations,
        Owner::Batches,
        Owner::Policy,
        Owner::Collectives,
        Owner::Metrics,
        Owner::Other,
    ];

    /// Lower-case name, as in reports.
    pub fn name(self) -> &'static str {
        match self {
            Owner::Dataset => "dataset",
            Owner::Parameters => "parameters",
            Owner::Snapshots => "snapshots",
            Owner::Activations => "activations",
            Owner::Batches => "batches",
            Owner::Policy => "policy",
            Owner::Collectives => "collectives",
            Owner::Metrics => "metrics",
            Owner::Other => "other",
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Memory of one owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnerUse {
    /// The owner.
    pub owner: Owner,
    /// Requested bytes in use now.
    pub current: usize,
    /// Largest number of requested bytes in use so far.
    pub peak: usize,
}

//! Who uses how much memory (V3).

use std::fmt;

/// What a tensor's memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Owner {
    /// Resident datasets.
    Dataset,
    /// Parameters, their gradients and optimiser state.
    Parameters,
    /// Arenas of plans.
    Activations,
    /// Batches and their buffers.
    Batches,
    /// Metrics on the device.
    Metrics,
    /// Everything else.
    Other,
}

impl Owner {
    /// All owners, in the order of reports.
    pub const ALL: [Owner; 6] = [
        Owner::Dataset,
        Owner::Parameters,
        Owner::Activations,
        Owner::Batches,
        Owner::Metrics,
        Owner::Other,
    ];

    /// Lower-case name, as in reports.
    pub fn name(self) -> &'static str {
        match self {
            Owner::Dataset => "dataset",
            Owner::Parameters => "parameters",
            Owner::Activations => "activations",
            Owner::Batches => "batches",
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
    /// Whose.
    pub owner: Owner,
    /// Bytes in tensors now.
    pub current: usize,
    /// The most bytes in tensors at any time.
    pub peak: usize,
}

/// Memory of a device. Bytes are those that tensors asked for; what rounding and kept free blocks
/// add shows in `reserved` only, so `current` and `peak` depend on no timing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryReport {
    /// Bytes in tensors now.
    pub current: usize,
    /// The most bytes in tensors at any time.
    pub peak: usize,
    /// Bytes taken from the system: in tensors, or free and kept for reuse.
    pub reserved: usize,
    /// The most bytes taken from the system at any time.
    pub reserved_peak: usize,
    /// By owner, every owner once, in the order of [`Owner::ALL`].
    pub owners: Vec<OwnerUse>,
}

/// Running totals behind a [`MemoryReport`].
#[derive(Debug, Default)]
pub(crate) struct Usage {
    current: usize,
    peak: usize,
    owners: [(usize, usize); Owner::ALL.len()],
}

impl Usage {
    pub(crate) fn take(&mut self, owner: Owner, bytes: usize) {
        self.current += bytes;
        self.peak = self.peak.max(self.current);
        let (current, peak) = &mut self.owners[owner as usize];
        *current += bytes;
        *peak = (*peak).max(*current);
    }

    pub(crate) fn give(&mut self, owner: Owner, bytes: usize) {
        self.current -= bytes;
        self.owners[owner as usize].0 -= bytes;
    }

    pub(crate) fn current(&self) -> usize {
        self.current
    }

    pub(crate) fn report(&self, reserved: usize, reserved_peak: usize) -> MemoryReport {
        let owners = Owner::ALL.map(|owner| {
            let (current, peak) = self.owners[owner as usize];
            OwnerUse { owner, current, peak }
        });
        MemoryReport {
            current: self.current,
            peak: self.peak,
            reserved,
            reserved_peak,
            owners: owners.to_vec(),
        }
    }
}

//! Counts of what a hot path must not do (V2). Every counted act goes through
//! [`Counters::note`] with its call site.

use crate::error::Result;
use crate::sync::{AtomicU64, Ordering};
use std::ops::Sub;
use std::panic::Location;

/// What a device did since it was opened; the difference of two is what happened between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Copies from the device to the host; one read-back of many tensors is one.
    pub copies_to_host: u64,
    /// Copies from the host to the device.
    pub copies_to_device: u64,
    /// Times that a host thread waited for the device.
    pub synchronizations: u64,
    /// Requests to the memory pool, whether or not the system was asked.
    pub allocations: u64,
    /// Launches of kernels. Copies, and zeros of new memory, are none.
    pub launches: u64,
}

impl Sub for Counts {
    type Output = Counts;

    /// What happened between `earlier` and `self`.
    fn sub(self, earlier: Counts) -> Counts {
        let since = |now: u64, then: u64| now.saturating_sub(then);
        Counts {
            copies_to_host: since(self.copies_to_host, earlier.copies_to_host),
            copies_to_device: since(self.copies_to_device, earlier.copies_to_device),
            synchronizations: since(self.synchronizations, earlier.synchronizations),
            allocations: since(self.allocations, earlier.allocations),
            launches: since(self.launches, earlier.launches),
        }
    }
}

/// A counted act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    CopyToHost,
    CopyToDevice,
    Synchronize,
    Allocate,
    Launch,
}

/// The counters of a device.
#[derive(Debug, Default)]
pub(crate) struct Counters([AtomicU64; 5]);

impl Counters {
    /// Counts an act that is about to happen; an error forbids it. `_site` is where the user's code
    /// asked for it: hot scopes report it.
    pub(crate) fn note(&self, act: Act, _site: &'static Location<'static>) -> Result<()> {
        // Relaxed: a count orders nothing.
        self.0[act as usize].fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn read(&self) -> Counts {
        let read = |act: Act| self.0[act as usize].load(Ordering::Relaxed);
        Counts {
            copies_to_host: read(Act::CopyToHost),
            copies_to_device: read(Act::CopyToDevice),
            synchronizations: read(Act::Synchronize),
            allocations: read(Act::Allocate),
            launches: read(Act::Launch),
        }
    }
}

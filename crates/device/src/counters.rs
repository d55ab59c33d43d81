//! Counts of operations that a hot path must avoid (V2). Every counted act goes through
//! [`Counters::note`] or [`Counters::note_under`] with its operation and call site, before it
//! happens.

use crate::error::Result;
use crate::scope;
use crate::sync::{AtomicU64, Ordering};
use std::fmt;
use std::ops::Sub;
use std::panic::Location;

/// Acts of a device since it was opened; the difference of two gives the acts in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Copies from the device to the host; one read-back of many tensors is one.
    pub copies_to_host: u64,
    /// Copies from the host to the device.
    pub copies_to_device: u64,
    /// Times that a host thread waited for the device.
    pub synchronizations: u64,
    /// Requests to the memory pool, whether or not they went to the system.
    pub allocations: u64,
    /// Launches of kernels, and copies and fills inside of the device ([`Stream::copy`],
    /// [`Stream::fill`]). Host copies and the zeroing of new memory are not counted.
    ///
    /// [`Stream::copy`]: crate::Stream::copy
    /// [`Stream::fill`]: crate::Stream::fill
    pub launches: u64,
}

impl Counts {
    /// The count of one kind of act.
    pub fn of(&self, act: Act) -> u64 {
        match act {
            Act::CopyToHost => self.copies_to_host,
            Act::CopyToDevice => self.copies_to_device,
            Act::Synchronize => self.synchronizations,
            Act::Allocate => self.allocations,
            Act::Launch => self.launches,
        }
    }

    pub(crate) fn add(&mut self, act: Act) {
        let count = match act {
            Act::CopyToHost => &mut self.copies_to_host,
            Act::CopyToDevice => &mut self.copies_to_device,
            Act::Synchronize => &mut self.synchronizations,
            Act::Allocate => &mut self.allocations,
            Act::Launch => &mut self.launches,
        };
        *count += 1;
    }
}

impl Sub for Counts {
    type Output = Counts;

    /// Acts between `earlier` and `self`.
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

/// A counted act. A hot path must avoid all but launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Act {
    /// A copy from the device to the host.
    CopyToHost,
    /// A copy from the host to the device.
    CopyToDevice,
    /// A host thread waits for the device.
    Synchronize,
    /// A request to the memory pool.
    Allocate,
    /// A launch of a kernel, or a copy or fill inside of the device: counted, and never forbidden.
    Launch,
}

impl Act {
    /// All acts.
    pub const ALL: [Act; 5] =
        [Act::CopyToHost, Act::CopyToDevice, Act::Synchronize, Act::Allocate, Act::Launch];
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Act::CopyToHost => "copy to the host",
            Act::CopyToDevice => "copy to the device",
            Act::Synchronize => "wait for the device",
            Act::Allocate => "allocation",
            Act::Launch => "launch",
        })
    }
}

/// The counters of a device.
#[derive(Debug, Default)]
pub(crate) struct Counters([AtomicU64; Act::ALL.len()]);

impl Counters {
    /// Counts an act that is about to happen. `site` is the call site in the user's code.
    ///
    /// # Errors
    /// [`crate::Error::HotScope`]: an open scope forbids the act. It must not happen, and is not
    /// counted.
    pub(crate) fn note(
        &self,
        act: Act,
        operation: &'static str,
        site: &'static Location<'static>,
    ) -> Result<()> {
        if cfg!(meristem_bare) {
            return Ok(()); // see bench/README.md
        }
        scope::admit(self, act, operation, site)?;
        // Relaxed: a count does not order anything.
        self.0[act as usize].fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Counts like [`note`](Counters::note) an act that is only ever counted under one lock, which
    /// `lock` takes: no other thread counts meanwhile, so the count needs no atomic addition.
    ///
    /// # Errors
    /// The errors of [`note`](Counters::note); the lock is then not taken.
    #[inline]
    pub(crate) fn note_under<G>(
        &self,
        act: Act,
        operation: &'static str,
        site: &'static Location<'static>,
        lock: impl FnOnce() -> G,
    ) -> Result<G> {
        if cfg!(meristem_bare) {
            return Ok(lock()); // see bench/README.md
        }
        scope::admit(self, act, operation, site)?;
        let guard = lock();
        let count = &self.0[act as usize];
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Ok(guard)
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

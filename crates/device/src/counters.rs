//! Counts of operations that a hot path must avoid (V2). Every counted act goes through
//! [`Counters::note`] or [`Counters::note_under`] with its operation and call site, before it
//! happens.

use crate::ground::sync::{AtomicU64, Ordering};
use crate::ground::{Act, Counts, Result};
use crate::scope;
use std::panic::Location;

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

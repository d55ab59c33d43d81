//! Counts of a device's acts (V2). Every counted act goes through [`Counters::count`] or
//! [`Counters::count_under`] with its operation and call site, before it happens.

use std::cell::Cell;
use std::panic::Location;

use crate::ground::sync::{AtomicU64, Ordering};
use crate::ground::{Act, Counts, Result};

/// A function that permits or refuses an act of the calling thread on a device: number of the
/// device, act, operation and call site.
pub(crate) type ActGate = fn(u64, Act, &'static str, &'static Location<'static>) -> Result<()>;

thread_local! {
    /// The thread's gate; usually `None`.
    static GATE: Cell<Option<ActGate>> = const { Cell::new(None) };
}

/// Sets or removes the gate that the calling thread's acts pass from now on.
pub(crate) fn set_gate(gate: Option<ActGate>) {
    GATE.set(gate);
}

/// Consults the gate of the calling thread, if one is set.
#[inline]
fn admit(
    device: u64,
    act: Act,
    operation: &'static str,
    site: &'static Location<'static>,
) -> Result<()> {
    match GATE.get() {
        None => Ok(()),
        Some(gate) => gate(device, act, operation, site),
    }
}

/// The counters of a device.
#[derive(Debug)]
pub(crate) struct Counters {
    /// Number of the device among those opened in this process.
    device: u64,
    counts: [AtomicU64; Act::ALL.len()],
}

impl Default for Counters {
    fn default() -> Self {
        static DEVICES: AtomicU64 = AtomicU64::new(0);
        let device = DEVICES.fetch_add(1, Ordering::Relaxed);
        Counters { device, counts: Default::default() }
    }
}

impl Counters {
    /// Number of the device, as gates get it.
    pub(crate) fn device(&self) -> u64 {
        self.device
    }

    /// Counts an act that is about to happen. `site` is the call site in the user's code.
    ///
    /// # Errors
    /// The errors of the calling thread's gate. The act is then not counted, and must not happen.
    pub(crate) fn count(
        &self,
        act: Act,
        operation: &'static str,
        site: &'static Location<'static>,
    ) -> Result<()> {
        if cfg!(meristem_bare) {
            return Ok(()); // only in the build that measures the cost of counting (bench/README.md)
        }
        admit(self.device, act, operation, site)?;
        // Relaxed: no other access depends on the order of counts.
        self.counts[act as usize].fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Counts, like [`count`](Counters::count), an act that is always counted under one lock, which
    /// `lock` takes. No other thread counts this act meanwhile, so the count needs no atomic
    /// addition.
    ///
    /// # Errors
    /// The errors of [`count`](Counters::count); the lock is then not taken.
    #[inline]
    pub(crate) fn count_under<G>(
        &self,
        act: Act,
        operation: &'static str,
        site: &'static Location<'static>,
        lock: impl FnOnce() -> G,
    ) -> Result<G> {
        if cfg!(meristem_bare) {
            return Ok(lock()); // as in `count`
        }
        admit(self.device, act, operation, site)?;
        let guard = lock();
        let count = &self.counts[act as usize];
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Ok(guard)
    }

    pub(crate) fn read(&self) -> Counts {
        let read = |act: Act| self.counts[act as usize].load(Ordering::Relaxed);
        Counts {
            copies_to_host: read(Act::CopyToHost),
            copies_to_device: read(Act::CopyToDevice),
            synchronizations: read(Act::Synchronize),
            allocations: read(Act::Allocate),
            launches: read(Act::Launch),
        }
    }
}

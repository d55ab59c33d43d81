//! The race sanitizer (S3): checks, when a launch is submitted, that every earlier conflicting
//! access is ordered before it.
//!
//! ```text
//! submit(launch on stream s, after waits W):
//!     before = clock(s) ∪ clock(host) ∪ clock(w) for each w in W      (vector clocks)
//!     for each access of the launch:
//!         for each segment of the block's shadow that it touches:
//!             for each recorded access a of the segment:
//!                 if a or the new access writes, or they are of two storages,
//!                 and a is on another stream and not in `before`:      report a race, refuse
//!         record the access in the segment
//!     clock(s) = before, from this command on
//! ```
//!
//! The shadow of a block is a sorted list of segments, bytes with the same history:
//!
//! ```text
//! bytes     0         1024       1056                2048
//! segment   [ w by a#3 │ w by a#3, │     w by b#7      ]
//!           [          │ r by b#5  │                   ]
//! ```
//!
//! The sanitizer examines the enqueued commands, not the progress of the device, so a race is found
//! on every run, whatever the timing of the kernels. Two properties ensure this. With the sanitizer
//! on, waits for completed work are kept (`hazard`), so the order between two launches follows from
//! the program alone. And the sanitizer keeps its own record of the accesses to a block's bytes
//! (`shadow`), independent of the hazards that it checks.
//!
//! A launch is ordered after another (`clock`) if
//! - both are on one stream, or a chain of stream-side waits leads from one to the other;
//! - a host thread saw the end of the other launch (a synchronisation, a read-back, an event that
//!   was done) before this launch was submitted. Host threads synchronise in ways that are
//!   invisible here (a channel, a join), so they share one clock: an end that one thread saw counts
//!   for every later submission. A race between two host threads may be missed if one of them
//!   happens to wait for the device; an existing order is never missed, so there are no false
//!   reports;
//! - the stream of the other launch is gone: its last handle was dropped after all of its work.
//!
//! A launch that races is refused before anything of it is enqueued: it is checked under the
//! submission lock. A read-back is checked after its copies, without this lock.

mod clock;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod programs;
#[cfg(test)]
mod reference;
mod shadow;

use std::collections::HashMap;
use std::panic::Location;

use clock::{StreamClock, VectorClock};
use shadow::{Shadow, ShadowAccess, StorageOrigin};

use crate::ground::sync::{Arc, AtomicU64, Mutex, MutexGuard, OnceLock, Ordering, lock};
use crate::ground::{AccessKind, Error, Race, RaceAccess, RaceKind, Result};
use crate::hooks::{
    Allocation, CommandPosition, DeviceObserver, ObserverState, SubmittedLaunch, Touched,
};

/// Largest number of races that a device remembers.
const MOST_RACES: usize = 64;

/// Commands whose end host threads have seen. One clock for the process, because an event may be of
/// another device.
fn host() -> MutexGuard<'static, Arc<VectorClock>> {
    static HOST: OnceLock<Mutex<Arc<VectorClock>>> = OnceLock::new();
    lock(HOST.get_or_init(Mutex::default))
}

/// The sanitizer of a device.
#[derive(Default)]
pub(crate) struct Sanitizer {
    /// Submissions checked so far.
    submissions: AtomicU64,
    /// History of accesses to each block's bytes, by its address.
    shadows: Mutex<HashMap<u64, Shadow>>,
    races: Mutex<Vec<Race>>,
    /// Steps recorded for the slow reference check.
    #[cfg(test)]
    log: Mutex<Vec<reference::LogStep>>,
}

impl Sanitizer {
    /// The first races found.
    pub(crate) fn races(&self) -> Vec<Race> {
        lock(&self.races).clone()
    }

    fn report(&self, race: Race) -> Error {
        tracing::error!("{race}");
        let mut races = lock(&self.races);
        if races.len() < MOST_RACES {
            races.push(race.clone());
        }
        Error::Race(Box::new(race))
    }

    /// The race of a launch that is ordered after the commands of `before`, if there is one.
    fn race(
        &self,
        launch: &SubmittedLaunch<'_>,
        clock: &StreamClock,
        before: &VectorClock,
    ) -> Option<Race> {
        let shadows = lock(&self.shadows);
        launch.touched.iter().find_map(|Touched { allocation, address, access, bytes }| {
            let shadow = shadows.get(address)?;
            let this = (*access, allocation.id);
            let (first, bytes) = shadow.conflict(bytes, this, (clock.tag(), before))?;
            let order = self.submissions.load(Ordering::Relaxed) + 1;
            let second = mark(launch, clock, order, *access, Arc::new(origin_of(allocation)));
            Some(race_between(&first, &second, bytes))
        })
    }
}

impl DeviceObserver for Sanitizer {
    fn checks_order(&self) -> bool {
        true
    }

    fn stream_opened(&self, name: &Arc<str>) -> Option<ObserverState> {
        Some(Box::new(StreamClock::new(name)))
    }

    /// Refuses a launch that is not ordered after a conflicting one, with [`Error::Race`].
    fn launch_requested(&self, launch: &SubmittedLaunch<'_>) -> Result<()> {
        let Some(clock) = clock_of(launch.at) else { return Ok(()) };
        let before = ordered_before(clock, launch.after);
        let Some(race) = self.race(launch, clock, &before) else { return Ok(()) };
        #[cfg(test)]
        self.log_submission(launch, true);
        Err(self.report(race))
    }

    fn launch_submitted(&self, launch: &SubmittedLaunch<'_>) {
        let Some(clock) = clock_of(launch.at) else { return };
        #[cfg(test)]
        self.log_submission(launch, false);
        let before = ordered_before(clock, launch.after);
        let order = self.submissions.fetch_add(1, Ordering::Relaxed) + 1;
        let mut shadows = lock(&self.shadows);
        for Touched { allocation, address, access, bytes } in launch.touched {
            let shadow = shadows.entry(*address).or_default();
            let origin = shadow.origin(allocation.id, || origin_of(allocation));
            shadow.record(bytes, &Arc::new(mark(launch, clock, order, *access, origin)), &before);
        }
        clock.learn(launch.at.seq, before);
    }

    fn waits_submitted(&self, at: CommandPosition<'_>, after: &[CommandPosition<'_>]) {
        let Some(clock) = clock_of(at) else { return };
        clock.learn(at.seq, ordered_before(clock, after));
        #[cfg(test)]
        self.log_wait(at, after);
    }

    fn memory_freed(&self, allocation: &Allocation, address: u64) {
        let shadows = lock(&self.shadows);
        let shadow = shadows.get(&address);
        if let Some(origin) = shadow.and_then(|shadow| shadow.used_by(allocation.id)) {
            let last = self.submissions.load(Ordering::Relaxed);
            origin.freed_after.store(last, Ordering::Relaxed);
        }
    }

    /// Forgets the block: the system may hand out its address again.
    fn block_returned(&self, address: u64) {
        lock(&self.shadows).remove(&address);
    }

    fn host_saw(&self, at: CommandPosition<'_>) {
        let Some(clock) = clock_of(at) else { return };
        clock.join_into(Arc::make_mut(&mut host()), at.seq);
        #[cfg(test)]
        self.log_sight(at);
    }

    /// Checks that the host has seen the end of the copy, with [`Error::Race`].
    fn host_takes(
        &self,
        from: &Allocation,
        end: CommandPosition<'_>,
        site: &'static Location<'static>,
    ) -> Result<()> {
        let Some(clock) = clock_of(end) else { return Ok(()) };
        if host().covers(clock.tag(), end.seq) {
            return Ok(());
        }
        let first = RaceAccess {
            operation: "read_back",
            site,
            stream: end.stream.name.clone(),
            seq: end.seq,
            order: self.submissions.load(Ordering::Relaxed),
            writes: false,
            origin: from.origin,
            owner: from.owner,
        };
        let second = RaceAccess { stream: "host".into(), seq: 0, ..first.clone() };
        Err(self.report(Race { kind: RaceKind::HostRead, first, second, bytes: 0..from.bytes }))
    }
}

/// The clock of a stream; `None` if its device has no sanitizer.
fn clock_of(at: CommandPosition<'_>) -> Option<&StreamClock> {
    at.stream.state()
}

/// Commands ordered before the next command of a stream that waits for `after` first.
fn ordered_before(clock: &StreamClock, after: &[CommandPosition<'_>]) -> VectorClock {
    let mut before = (*clock.now()).clone();
    before.join(&host());
    for at in after {
        if let Some(clock) = clock_of(*at) {
            clock.join_into(&mut before, at.seq);
        }
    }
    before
}

fn origin_of(allocation: &Allocation) -> StorageOrigin {
    let &Allocation { id, owner, origin: site, .. } = allocation;
    StorageOrigin { id, site, owner, freed_after: AtomicU64::new(0) }
}

/// The shadow's record of an access of a launch, which is submission number `order`.
fn mark(
    launch: &SubmittedLaunch<'_>,
    clock: &StreamClock,
    order: u64,
    access: AccessKind,
    origin: Arc<StorageOrigin>,
) -> ShadowAccess {
    let &SubmittedLaunch { at, operation, site, .. } = launch;
    ShadowAccess {
        stream: clock.tag().clone(),
        seq: at.seq,
        order,
        operation,
        site,
        access,
        origin,
    }
}

/// The race of two accesses to the same bytes.
fn race_between(
    first: &ShadowAccess,
    second: &ShadowAccess,
    bytes: std::ops::Range<usize>,
) -> Race {
    let kind = if first.origin.id == second.origin.id {
        RaceKind::Unordered
    } else {
        RaceKind::UseAfterFree { freed_after: first.origin.freed_after.load(Ordering::Relaxed) }
    };
    Race { kind, first: first.report(), second: second.report(), bytes }
}

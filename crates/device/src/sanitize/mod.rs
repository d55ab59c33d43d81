//! The race sanitizer (S3): checks, when a launch is submitted, that every conflicting access is
//! ordered before it.
//!
//! It examines what was enqueued, not the progress of the device: a race is found on every run,
//! whatever the timing of the kernels. Two properties ensure this. With the sanitizer on, no wait
//! is left out because its target is already done (`hazard`), so the order between two launches is
//! that of the program. And it keeps its own record of the accesses to a block's bytes (`shadow`),
//! independent of the hazards, which are what it checks.
//!
//! A launch is ordered after another (`clock`) if
//! - both are on one stream, or a chain of stream-side waits leads from one to the other;
//! - the host saw the other's end (a synchronisation, a read-back, an event that was done) before
//!   it submitted the launch. Host threads synchronise in ways that are invisible here (a channel,
//!   a join), so there is one clock for all of them: what one saw counts for every later
//!   submission. A race between two host threads may be missed when one of them waits for the
//!   device at the right moment; no order is ever overlooked, so there are no false reports;
//! - the other's stream is gone: its last handle was dropped after all of its work.
//!
//! A race is refused before anything is enqueued. All of this happens under the submission lock.

mod clock;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod programs;
#[cfg(test)]
mod reference;
mod shadow;

pub(crate) use clock::StreamClock;
pub(crate) use shadow::Shadow;

use crate::ground::sync::{Arc, AtomicU64, Mutex, MutexGuard, OnceLock, Ordering, lock};
use crate::ground::{Error, Race, RaceAccess, RaceKind, Result, Use};
use crate::hazard::{Access, Edge};
use crate::launch::Launch;
use crate::queue::StreamState;
use crate::storage::Storage;
use crate::submit::Touch;
use crate::tensor::Tensor;
use crate::work::{Fill, Transfer, Work};
use clock::Clock;
use shadow::{Mark, Origin};
use std::borrow::Borrow;
use std::panic::Location;

/// Contents of the memory of [`Tensor::empty`] with `MERISTEM_SANITIZE=1`, repeated: a NaN as `f32`
/// and as `f64`, and easy to recognise as an integer.
pub const POISON: u32 = 0x7FFD_EAD5;

/// Largest number of races that a device remembers.
const MOST_RACES: usize = 64;

/// Commands whose end host threads have seen. One clock for the process: an event may be of another
/// device.
fn host() -> MutexGuard<'static, Arc<Clock>> {
    static HOST: OnceLock<Mutex<Arc<Clock>>> = OnceLock::new();
    lock(HOST.get_or_init(Mutex::default))
}

/// The sanitizer of a device.
#[derive(Default)]
pub(crate) struct Sanitizer {
    /// Submissions checked so far.
    submissions: AtomicU64,
    races: Mutex<Vec<Race>>,
    /// Steps recorded for the slow reference check.
    #[cfg(test)]
    log: Mutex<Vec<reference::Step>>,
}

impl Sanitizer {
    /// Checks a launch that would be command `seq` of `stream`, after the waits `edges`. Under the
    /// submission lock.
    ///
    /// # Errors
    /// [`Error::Race`]: the launch must not be enqueued.
    pub(crate) fn check<'a>(
        &self,
        (stream, seq): (&StreamState, u64),
        edges: &[Edge],
        work: &Work,
        mut touches: impl Iterator<Item = impl Borrow<Touch<'a>>> + Clone,
    ) -> Result<()> {
        let Some(clock) = &stream.clock else { return Ok(()) };
        let before = ordered_before(clock, edges);
        #[cfg(test)]
        let all = touches.clone();
        let race = touches.find_map(|touch| {
            let Touch { storage, usage, bytes } = touch.borrow();
            let shadow = storage.shadow()?;
            let this = (*usage, storage.id());
            let (first, bytes) = shadow.conflict(bytes, this, (clock.tag(), &before))?;
            let order = self.submissions.load(Ordering::Relaxed) + 1;
            let second = Mark {
                stream: clock.tag().clone(),
                seq,
                order,
                operation: work.operation(),
                site: work.site(),
                usage: *usage,
                origin: Arc::new(origin_of(storage)),
            };
            Some(Race::new(&first, &second, bytes))
        });
        let Some(race) = race else { return Ok(()) };
        #[cfg(test)]
        self.log_submission((clock, seq), edges, all, true);
        Err(self.report(race))
    }

    /// Records a launch that was checked and is now enqueued as command `seq` of `stream`, after
    /// the waits `edges`. Under the submission lock.
    pub(crate) fn note<'a>(
        &self,
        (stream, seq): (&StreamState, u64),
        edges: &[Edge],
        work: &Work,
        touches: impl Iterator<Item = impl Borrow<Touch<'a>>> + Clone,
    ) {
        let Some(clock) = &stream.clock else { return };
        #[cfg(test)]
        self.log_submission((clock, seq), edges, touches.clone(), false);
        let before = ordered_before(clock, edges);
        let order = self.submissions.fetch_add(1, Ordering::Relaxed) + 1;
        for touch in touches {
            let Touch { storage, usage, bytes } = touch.borrow();
            let Some(mut shadow) = storage.shadow() else { continue };
            let mark = Mark {
                stream: clock.tag().clone(),
                seq,
                order,
                operation: work.operation(),
                site: work.site(),
                usage: *usage,
                origin: shadow.origin(storage.id(), || origin_of(storage)),
            };
            shadow.note(bytes, &Arc::new(mark), &before);
        }
        clock.learn(seq, before);
    }

    /// Records waits that were enqueued onto `stream`, the last of which is command `seq`.
    pub(crate) fn wait(&self, (stream, seq): (&StreamState, u64), edges: &[Edge]) {
        let Some(clock) = &stream.clock else { return };
        clock.learn(seq, ordered_before(clock, edges));
        #[cfg(test)]
        self.log_wait((clock, seq), edges);
    }

    /// Checks that the host has seen the end of the copy at `end`, whose result it is about to use.
    ///
    /// # Errors
    /// [`Error::Race`].
    pub(crate) fn host_takes(
        &self,
        end: &Access,
        from: &Storage,
        site: &'static Location<'static>,
    ) -> Result<()> {
        let Some(clock) = &end.stream.clock else { return Ok(()) };
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
            origin: from.origin(),
            owner: from.owner(),
        };
        let second = RaceAccess { stream: "host".into(), seq: 0, ..first.clone() };
        let bytes = 0..from.bytes();
        Err(self.report(Race { kind: RaceKind::HostRead, first, second, bytes }))
    }

    /// Records that a storage releases its block.
    pub(crate) fn freed(&self, storage: &Storage) {
        let Some(shadow) = storage.shadow() else { return };
        if let Some(origin) = shadow.used_by(storage.id()) {
            let last = self.submissions.load(Ordering::Relaxed);
            origin.freed_after.store(last, Ordering::Relaxed);
        }
    }

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
}

/// Records that a host thread saw the end of a stream's command.
pub(crate) fn host_saw(stream: &StreamState, seq: u64) {
    let Some(clock) = &stream.clock else { return };
    clock.join_into(Arc::make_mut(&mut host()), seq);
    #[cfg(test)]
    if let Some(sanitizer) = stream.shared.sanitizer() {
        sanitizer.log_sight((clock, seq));
    }
}

/// Fills a new tensor with [`POISON`].
///
/// # Errors
/// [`Error::Race`] if something may still use the memory.
pub(crate) fn poison(
    tensor: &mut Tensor,
    operation: &'static str,
    site: &'static Location<'static>,
) -> Result<()> {
    if tensor.poison_fresh() {
        return Ok(());
    }
    let poison = Launch::new(tensor.stream(), operation, None, site)
        .write(tensor)
        .transfer(Transfer::Fill(Fill::Word(POISON)));
    match poison {
        // New memory is available on a failed stream too; nothing on it will run.
        Err(Error::KernelPanicked { .. }) => Ok(()),
        other => other,
    }
}

/// Commands ordered before the next command of a stream that waits for `edges` first.
fn ordered_before(clock: &StreamClock, edges: &[Edge]) -> Clock {
    let mut before = (*clock.now()).clone();
    before.join(&host());
    for Edge { access, .. } in edges {
        if let Some(clock) = &access.stream.clock {
            clock.join_into(&mut before, access.seq);
        }
    }
    before
}

fn origin_of(storage: &Storage) -> Origin {
    Origin {
        id: storage.id(),
        site: storage.origin(),
        owner: storage.owner(),
        freed_after: AtomicU64::new(0),
    }
}

impl Race {
    fn new(first: &Mark, second: &Mark, bytes: std::ops::Range<usize>) -> Race {
        let kind = if first.origin.id == second.origin.id {
            RaceKind::Unordered
        } else {
            RaceKind::UseAfterFree { freed_after: first.origin.freed_after.load(Ordering::Relaxed) }
        };
        Race { kind, first: first.into(), second: second.into(), bytes }
    }
}

impl From<&Mark> for RaceAccess {
    fn from(mark: &Mark) -> RaceAccess {
        RaceAccess {
            operation: mark.operation,
            site: mark.site,
            stream: mark.stream.name.clone(),
            seq: mark.seq,
            order: mark.order,
            writes: mark.usage == Use::Write,
            origin: mark.origin.site,
            owner: mark.origin.owner,
        }
    }
}

//! The journal: one sink of events, which tells observer and file the same.

use meristem_nn::Network;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::record::event_writer::{EventWriter, EventsPosition};
use crate::record::events::Event;
use crate::record::observer::Observer;

/// An event of a step on its way to the first rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// Phase of the step.
    phase: usize,
    /// Whether the file may not lose it.
    waits: bool,
    pub(crate) event: Event,
}

/// Hands every event to the observer and to the file, which are the first rank's: in the order of a
/// single process, in which all envs go through one phase of a step after another.
pub(crate) struct Journal<'a> {
    writer: Option<EventWriter>,
    observer: &'a mut dyn Observer,
    /// Over several processes what happens in a step is kept until they meet.
    kept: Option<Vec<Kept>>,
    phase: usize,
}

impl<'a> Journal<'a> {
    /// The event sink of a process: the first rank has the writer; where there are others, they
    /// forward to it.
    pub(crate) fn new(
        writer: Option<EventWriter>,
        observer: &'a mut dyn Observer,
        has_others: bool,
    ) -> Self {
        Self { writer, observer, kept: has_others.then(Vec::new), phase: 0 }
    }

    /// Tells both what happened to an env. Does not wait; the file's queue may drop the event,
    /// which is counted.
    pub(crate) fn emit(&mut self, event: Event) {
        self.of_env(event, false);
    }

    /// As [`Journal::emit`], and waits for a place in the file's queue.
    pub(crate) fn emit_waiting(&mut self, event: Event) {
        self.of_env(event, true);
    }

    fn of_env(&mut self, event: Event, waits: bool) {
        match &mut self.kept {
            Some(kept) => kept.push(Kept { phase: self.phase, waits, event }),
            None => self.write(&event, waits),
        }
    }

    fn write(&mut self, event: &Event, waits: bool) {
        let Some(writer) = &mut self.writer else { return };
        self.observer.event(event);
        match waits {
            true => writer.emit_waiting(event),
            false => writer.emit(event),
        }
    }

    /// Tells both what happened to the run, and waits for a place in the file's queue.
    pub(crate) fn announce(&mut self, event: Event) {
        self.write(&event, true);
    }

    /// Tells the observer only.
    pub(crate) fn tell(&mut self, event: &Event) {
        if self.writer.is_some() {
            self.observer.event(event);
        }
    }

    /// The next phase of the step begins: what happens to any env in it follows all of the phase
    /// before.
    pub(crate) fn next_phase(&mut self) {
        self.phase += 1;
    }

    /// The step is over: what happened in it, if that was kept.
    pub(crate) fn take_kept(&mut self) -> Vec<Kept> {
        self.phase = 0;
        self.kept.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Tells both what happened in a step on all ranks.
    pub(crate) fn tell_kept(&mut self, by_rank: impl Iterator<Item = Vec<Kept>>) {
        let mut all: Vec<Kept> = by_rank.flatten().collect();
        // Stable: within a phase by rank, and on a rank in its order.
        all.sort_by_key(|kept| kept.phase);
        all.iter().for_each(|kept| self.write(&kept.event, kept.waits));
    }

    /// Tells the observer of a batch in the inner loop.
    ///
    /// # Errors
    /// The observer's.
    pub(crate) fn batch_enqueued(&mut self, env: usize, network: &Network) -> Result<()> {
        self.observer.batch_enqueued(env, network)
    }

    /// At a step boundary: whether this process was asked to stop.
    ///
    /// # Errors
    /// The file cannot be written any more.
    pub(crate) fn stop_requested(&self) -> Result<bool> {
        self.writer.as_ref().map_or(Ok(()), EventWriter::check)?;
        Ok(self.observer.stop_requested())
    }

    /// Waits until every event so far is on the disk; where the file then stands.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn sync(&mut self) -> Result<EventsPosition> {
        self.writer.as_mut().map_or(Ok(EventsPosition::default()), EventWriter::sync)
    }

    /// Seconds since the run started, without those between a kill and a resume.
    pub(crate) fn seconds(&self) -> f64 {
        self.writer.as_ref().map_or(0.0, EventWriter::seconds)
    }

    /// Writes what is queued; the number of events that were dropped.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn close(self) -> Result<u64> {
        self.writer.map_or(Ok(0), EventWriter::close)
    }
}

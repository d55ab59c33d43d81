//! Journal of a run: passes every event to the observer and to the file.

use meristem_nn::Network;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::record::event_writer::{EventWriter, EventsPosition};
use crate::record::events::Event;
use crate::record::observer::Observer;

/// An event of a step, on its way to rank 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct KeptEvent {
    /// Phase of the step.
    phase: usize,
    /// Whether the file must not lose it.
    waits: bool,
    pub(crate) event: Event,
}

/// The process of a journal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JournalRank {
    /// Whether it is rank 0.
    pub(crate) is_first: bool,
    /// Whether the run has other processes.
    pub(crate) has_others: bool,
}

/// Passes every event to rank 0's observer and file, in the order of a single process, where all
/// envs go through one phase of a step before the next.
pub(crate) struct Journal<'a> {
    writer: Option<EventWriter>,
    observer: &'a mut dyn Observer,
    /// Whether this is rank 0, whose observer receives the events.
    is_first: bool,
    /// Events kept until the processes meet, if there are several.
    kept: Option<Vec<KeptEvent>>,
    phase: usize,
}

impl<'a> Journal<'a> {
    /// The journal of a process. Rank 0 has the writer, if the run has a folder; if there are other
    /// processes, they forward their events to it.
    pub(crate) fn new(
        writer: Option<EventWriter>,
        observer: &'a mut dyn Observer,
        JournalRank { is_first, has_others }: JournalRank,
    ) -> Self {
        Self { writer, observer, is_first, kept: has_others.then(Vec::new), phase: 0 }
    }

    /// Records an event of an env. Does not wait; a full queue drops the event, which is counted.
    pub(crate) fn emit(&mut self, event: Event) {
        self.of_env(event, false);
    }

    /// Like [`Journal::emit`], but waits if the file's queue is full.
    pub(crate) fn emit_waiting(&mut self, event: Event) {
        self.of_env(event, true);
    }

    fn of_env(&mut self, event: Event, waits: bool) {
        match &mut self.kept {
            Some(kept) => kept.push(KeptEvent { phase: self.phase, waits, event }),
            None => self.write(&event, waits),
        }
    }

    fn write(&mut self, event: &Event, waits: bool) {
        self.notify(event);
        if let Some(writer) = &mut self.writer {
            if waits { writer.emit_waiting(event) } else { writer.emit(event) }
        }
    }

    /// Records an event of the run; waits if the file's queue is full.
    pub(crate) fn announce(&mut self, event: Event) {
        self.write(&event, true);
    }

    /// Passes an event to the observer only.
    pub(crate) fn notify(&mut self, event: &Event) {
        if self.is_first {
            self.observer.event(event);
        }
    }

    /// Starts the next phase of the step: events of all envs in it follow all events of the
    /// phase before.
    pub(crate) fn next_phase(&mut self) {
        self.phase += 1;
    }

    /// Ends the step and returns its events, if they were kept.
    pub(crate) fn take_kept(&mut self) -> Vec<KeptEvent> {
        self.phase = 0;
        self.kept.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Records the events of a step from all ranks.
    pub(crate) fn record_kept(&mut self, by_rank: impl Iterator<Item = Vec<KeptEvent>>) {
        let mut all: Vec<KeptEvent> = by_rank.flatten().collect();
        // The sort is stable: within a phase, events stay in order of rank and time.
        all.sort_by_key(|kept| kept.phase);
        all.iter().for_each(|kept| self.write(&kept.event, kept.waits));
    }

    /// Notifies the observer of an enqueued batch, in the inner loop.
    ///
    /// # Errors
    /// The observer's error.
    pub(crate) fn batch_enqueued(&mut self, env: usize, network: &Network) -> Result<()> {
        self.observer.batch_enqueued(env, network)
    }

    /// Whether the process was asked to stop, at a step boundary.
    ///
    /// # Errors
    /// Writing the file failed.
    pub(crate) fn stop_requested(&self) -> Result<bool> {
        self.writer.as_ref().map_or(Ok(()), EventWriter::check)?;
        Ok(self.observer.stop_requested())
    }

    /// Waits until all events so far are on the disk. Returns the position in the file.
    ///
    /// # Errors
    /// Writing the file failed.
    pub(crate) fn sync(&mut self) -> Result<EventsPosition> {
        self.writer.as_mut().map_or(Ok(EventsPosition::default()), EventWriter::sync)
    }

    /// Seconds since the run started, without the time between a kill and a resume.
    pub(crate) fn seconds(&self) -> f64 {
        self.writer.as_ref().map_or(0.0, EventWriter::seconds)
    }

    /// Writes the queued events. Returns the number of events that are lost, and whether writing
    /// the file failed.
    pub(crate) fn close(self) -> (u64, Result<()>) {
        self.writer.map_or((0, Ok(())), EventWriter::close)
    }
}

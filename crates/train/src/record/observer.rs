//! Who watches a run, and the journal that tells observer and file the same.

use meristem_nn::Network;

use crate::checkpoint::EventsPosition;
use crate::error::Result;
use crate::record::event_writer::EventWriter;
use crate::record::events::Event;

/// Watches a run, and may ask it to stop. Called on the thread that runs it: what takes long here delays the
/// run.
///
/// Over several processes each has one. That of the first rank is told what happens to the envs of all, once a step;
/// the others are told of no event. Whichever asks to stop, all stop.
pub trait Observer {
    /// The run begins, or goes on, in this process: its rank. Over threads there is one process, of rank 0.
    fn joined(&mut self, _rank: usize) {}

    /// Something happened. The same events are written to `events.jsonl`.
    fn event(&mut self, _event: &Event) {}

    /// A training step of an env of this process was enqueued; called in the inner loop, for every batch. What is done to `network`
    /// here is on the hot path: a copy, a wait or an allocation is refused by the hot scope `train_step`
    /// (V2), and an error ends the run.
    ///
    /// # Errors
    /// What the observer could not do.
    fn batch_enqueued(&mut self, _env: usize, _network: &Network) -> Result<()> {
        Ok(())
    }

    /// Whether to end the run at the next step boundary, with weights and summary.
    fn stop_requested(&self) -> bool {
        false
    }
}

/// Watches nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {}

/// Something that happened in a step, on its way to the first rank: in which phase of the step, and whether the file
/// may not lose it.
pub(crate) type Told = (usize, bool, Event);

/// Hands every event to the observer and to the file, which are the first rank's: in the order of a single process,
/// in which all envs go through one phase of a step after another.
pub(crate) struct Journal<'a> {
    writer: Option<EventWriter>,
    observer: &'a mut dyn Observer,
    /// Over several processes what happens in a step is kept until they meet.
    kept: Option<Vec<Told>>,
    phase: usize,
}

impl<'a> Journal<'a> {
    /// Of a process, which has a writer if it is the first of all, and others beside it or not.
    pub(crate) fn new(
        writer: Option<EventWriter>,
        observer: &'a mut dyn Observer,
        has_others: bool,
    ) -> Self {
        Self { writer, observer, kept: has_others.then(Vec::new), phase: 0 }
    }

    /// Tells both what happened to an env. Does not wait; the file's queue may drop the event, which is counted.
    pub(crate) fn emit(&mut self, event: Event) {
        self.of_env(event, false);
    }

    /// As [`Journal::emit`], and waits for a place in the file's queue.
    pub(crate) fn emit_waiting(&mut self, event: Event) {
        self.of_env(event, true);
    }

    fn of_env(&mut self, event: Event, waits: bool) {
        match &mut self.kept {
            Some(kept) => kept.push((self.phase, waits, event)),
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

    /// The next phase of the step begins: what happens to any env in it follows all of the phase before.
    pub(crate) fn next_phase(&mut self) {
        self.phase += 1;
    }

    /// The step is over: what happened in it, if that was kept.
    pub(crate) fn take_kept(&mut self) -> Vec<Told> {
        self.phase = 0;
        self.kept.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Tells both what happened in a step on all ranks.
    pub(crate) fn tell_kept(&mut self, by_rank: impl Iterator<Item = Vec<Told>>) {
        let mut all: Vec<Told> = by_rank.flatten().collect();
        // Stable: within a phase by rank, and on a rank in its order.
        all.sort_by_key(|(phase, ..)| *phase);
        all.iter().for_each(|(_, waits, event)| self.write(event, *waits));
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

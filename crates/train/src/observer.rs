//! Who watches a run, and the journal that tells observer and file the same.

use meristem_nn::Network;

use crate::checkpoint::EventsPosition;
use crate::error::Result;
use crate::event_writer::EventWriter;
use crate::events::Event;

/// Watches a run, and may ask it to stop. Called on the thread that runs it: what takes long here delays the
/// run.
pub trait Observer {
    /// Something happened. The same events are written to `events.jsonl`.
    fn event(&mut self, _event: &Event) {}

    /// An env's training step was enqueued; called in the inner loop, for every batch. What is done to `network`
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

/// Hands every event to the observer and to the file.
pub(crate) struct Journal<'a> {
    writer: EventWriter,
    observer: &'a mut dyn Observer,
}

impl<'a> Journal<'a> {
    pub(crate) fn new(writer: EventWriter, observer: &'a mut dyn Observer) -> Self {
        Self { writer, observer }
    }

    /// Tells both. Does not wait; the file's queue may drop the event, which is counted.
    pub(crate) fn emit(&mut self, event: Event) {
        self.observer.event(&event);
        self.writer.emit(&event);
    }

    /// Tells the observer only.
    pub(crate) fn tell(&mut self, event: &Event) {
        self.observer.event(event);
    }

    /// Tells both, and waits for a place in the file's queue.
    pub(crate) fn emit_waiting(&mut self, event: Event) {
        self.observer.event(&event);
        self.writer.emit_waiting(&event);
    }

    /// Tells the observer of a batch in the inner loop.
    ///
    /// # Errors
    /// The observer's.
    pub(crate) fn batch_enqueued(&mut self, env: usize, network: &Network) -> Result<()> {
        self.observer.batch_enqueued(env, network)
    }

    /// At a step boundary: whether to stop.
    ///
    /// # Errors
    /// The file cannot be written any more.
    pub(crate) fn stop_requested(&self) -> Result<bool> {
        self.writer.check()?;
        Ok(self.observer.stop_requested())
    }

    /// Waits until every event so far is on the disk; where the file then stands.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn sync(&mut self) -> Result<EventsPosition> {
        self.writer.sync()
    }

    /// Seconds since the run started, without those between a kill and a resume.
    pub(crate) fn seconds(&self) -> f64 {
        self.writer.seconds()
    }

    /// Writes what is queued; the number of events that were dropped.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn close(self) -> Result<u64> {
        self.writer.close()
    }
}

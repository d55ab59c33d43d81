//! The observer of a run.

use meristem_nn::Network;

use crate::error::Result;
use crate::record::events::Event;

/// Watches a run, and may ask it to stop. Called on the thread that runs it: what takes long here
/// delays the run.
///
/// Over several processes each has one. That of the first rank is told what happens to the envs of
/// all, once a step; the others are told of no event. Whichever asks to stop, all stop.
pub trait Observer {
    /// The run begins, or goes on, in this process: its rank. Over threads there is one process, of
    /// rank 0.
    fn joined(&mut self, _rank: usize) {}

    /// Something happened. The same events are written to `events.jsonl`.
    fn event(&mut self, _event: &Event) {}

    /// A training step of an env of this process was enqueued; called in the inner loop, for every
    /// batch. What is done to `network` here is on the hot path: a copy, a wait or an allocation is
    /// refused by the hot scope `train_step` (V2), and an error ends the run.
    ///
    /// # Errors
    /// The observer's.
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

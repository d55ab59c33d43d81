//! The observer of a run.

use std::path::Path;

use meristem_nn::{Network, Precision};

use crate::error::Result;
use crate::record::events::Event;

/// Watches a run, and may ask it to stop. Methods are called on the run's own thread, so slow code
/// here delays the run.
///
/// Every process has an observer. Rank 0's gets the events of all envs, once a step; the others get
/// no events. If any observer asks to stop, all processes stop.
pub trait Observer {
    /// Reports the rank of this process when the run starts or resumes. With threads as ranks there
    /// is one process, of rank 0.
    fn joined(&mut self, _rank: usize) {}

    /// Reports, before anything runs, that a run goes on on other devices than those it began on.
    /// Other kinds of devices round differently. Called in the first process.
    fn devices_changed(&mut self, _began: &[String], _now: &[String]) {}

    /// Reports, before anything runs, that a run goes on at another precision than it began at.
    /// Called in the first process.
    fn precision_changed(&mut self, _began: Precision, _now: Precision) {}

    /// Reports the folder of the run, before its first event. Called in the first process.
    fn folder_opened(&mut self, _folder: &Path) {}

    /// Reports, before anything runs, that an extended run may differ from a run that was planned
    /// with this many steps, because its controller has looked ahead to the end of `began` steps.
    /// Called in the first process.
    fn controller_looked_ahead(&mut self, _began: usize, _now: usize) {}

    /// Reports an event. The same events are written to `events.jsonl`.
    fn event(&mut self, _event: &Event) {}

    /// Reports that a training step of an env of this process was enqueued. Called in the inner
    /// loop, for every batch, so everything done to `network` here is on the hot path: the hot
    /// scope `train_step` refuses copies, waits and allocations, and an error ends the run.
    ///
    /// # Errors
    /// An error of the observer.
    fn batch_enqueued(&mut self, _env: usize, _network: &Network) -> Result<()> {
        Ok(())
    }

    /// Whether to end the run at the next step boundary, with weights and summary.
    fn stop_requested(&self) -> bool {
        false
    }
}

/// Observer that ignores everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {}

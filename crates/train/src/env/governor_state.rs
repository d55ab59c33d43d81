//! State of the governor about an env.

use meristem_control::LossMonitor;
use serde::{Deserialize, Serialize};

/// State of the governor about an env in an episode, apart from the snapshot. Steps are the env's
/// own.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct GovernorState {
    /// Detector of failures, with the history of losses.
    #[serde(rename = "vitals")]
    pub(crate) monitor: LossMonitor,
    /// Step after which the snapshot was taken; `None` if it was taken before the first step.
    pub(crate) snapshot_step: Option<usize>,
    /// Failures since the last snapshot that reset this count (`Env::snapshot_taken`).
    pub(crate) failures: u32,
    /// Step of the trajectory's last transition that changed the network.
    pub(crate) changed: Option<usize>,
    /// Number of rollbacks.
    pub(crate) rollbacks: usize,
}

impl GovernorState {
    /// The state at the beginning of an episode.
    pub(crate) fn new() -> Self {
        let monitor = LossMonitor::default();
        Self { monitor, snapshot_step: None, failures: 0, changed: None, rollbacks: 0 }
    }

    /// Step of the transition that is blamed for a failure in `step`.
    pub(crate) fn cause(&self, step: usize) -> Option<usize> {
        self.changed.or(step.checked_sub(1))
    }

    /// Records that the env went back to its snapshot.
    pub(crate) fn rolled_back(&mut self) {
        self.monitor.rolled_back();
        self.changed = None;
        self.rollbacks += 1;
    }
}

//! The governor's memory of an env.

use meristem_control::Vitals;
use serde::{Deserialize, Serialize};

/// The governor's memory of an env in an episode, besides the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Guard {
    pub(crate) vitals: Vitals,
    /// Step after which the snapshot was taken; `None`: before the first.
    pub(crate) snapshot_step: Option<usize>,
    /// Failures since the snapshot was taken.
    pub(crate) failures: u32,
    /// Step of the trajectory's last transition that changed something.
    pub(crate) changed: Option<usize>,
    /// Rollbacks.
    pub(crate) rollbacks: usize,
}

impl Guard {
    /// The memory of an env that begins an episode, with so many classes.
    pub(crate) fn new(classes: usize) -> Self {
        let vitals = Vitals::new(classes);
        Self { vitals, snapshot_step: None, failures: 0, changed: None, rollbacks: 0 }
    }

    /// The transition that a failure in `step` is put down to.
    pub(crate) fn cause(&self, step: usize) -> Option<usize> {
        self.changed.or(step.checked_sub(1))
    }

    /// The env is back at its snapshot.
    pub(crate) fn rolled_back(&mut self) {
        self.vitals.rolled_back();
        self.changed = None;
        self.rollbacks += 1;
    }
}

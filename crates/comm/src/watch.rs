//! Views of a group for threads that watch it: ranks whose devices exchange elements by themselves
//! need to learn of a loss while they wait for a device.

use crate::error::Error;
use std::time::Duration;

/// State of a rank's device, for the other ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulse {
    /// Number of exchanges that the device has reached.
    pub reached: u64,
    /// Trouble with the exchange that it is in.
    pub trouble: Option<Trouble>,
}

/// Trouble of a device with an exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trouble {
    /// It has waited for the others until the deadline.
    Overdue,
    /// It failed, for this reason.
    Failed(String),
}

/// View of a group for a thread that watches it while the rank itself is busy or waits.
pub trait Watch: Send {
    /// Reports the state of this rank's device. Returns the error for which the group cannot
    /// continue, if the device may wait in vain because of it; a rank that left in order has ended
    /// its exchanges. Does not wait for other ranks' calls.
    fn pulse(&mut self, pulse: &Pulse) -> Option<Error>;
}

/// The view of a transport that knows nothing between calls. It names the lowest other rank if this
/// one's device waits until the deadline.
pub(crate) struct Blind {
    rank: usize,
    deadline: Duration,
    failure: Option<Error>,
}

impl Blind {
    pub(crate) fn new(rank: usize, deadline: Duration) -> Blind {
        Blind { rank, deadline, failure: None }
    }
}

impl Watch for Blind {
    fn pulse(&mut self, pulse: &Pulse) -> Option<Error> {
        if pulse.trouble == Some(Trouble::Overdue) && self.failure.is_none() {
            let (operation, rank) = ("exchange", usize::from(self.rank == 0));
            let seconds = self.deadline.as_secs_f64();
            self.failure = Some(Error::RankLate { operation, rank, seconds });
        }
        self.failure.clone()
    }
}

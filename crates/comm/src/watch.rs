//! Views of a group for threads that watch it: ranks whose devices exchange elements by themselves
//! need to learn of a loss while they wait for a device.

use crate::error::Error;
use std::time::Duration;

/// Longest time between two pulses of a rank.
pub(crate) const PULSE: Duration = Duration::from_secs(1);
/// Time without a pulse after which something is wrong with a rank: several of them, as a machine
/// may be busy.
pub(crate) const SILENT: Duration = Duration::from_secs(5);

/// State of a rank's device, for the other ranks. Each rank sends one about every second.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pulse {
    /// Number of its membership in a group of devices, from 1.
    pub membership: u64,
    /// Number of exchanges of the membership that the device has reached.
    pub reached: u64,
    /// Number of exchanges of the membership that it has ended.
    pub ended: u64,
    /// Whether no more come, and the rank waits for the others' devices to end as many.
    pub closing: bool,
    /// Trouble with the exchange that it is in.
    pub trouble: Option<Trouble>,
}

impl Pulse {
    /// How many exchanges the device has ended, for comparisons with other ranks.
    pub(crate) fn ends(&self) -> (u64, u64) {
        (self.membership, self.ended)
    }
}

/// Trouble of a device with an exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trouble {
    /// It has waited for the others until the deadline.
    Overdue,
    /// It has not got to an exchange by the deadline, since a call of its library does not end.
    Stuck,
    /// Some other process is gone; which one is not known here.
    Lost,
    /// It failed, for this reason.
    Failed(String),
}

/// State of the group, as a watching thread learns it.
#[derive(Debug, Clone)]
pub enum News {
    /// Nothing is known that devices might wait for in vain.
    Sound,
    /// Likewise; the devices of all ranks have ended as many exchanges as this rank's.
    Ended,
    /// The error for which the group cannot continue.
    Lost(Error),
}

/// View of a group for a thread that watches it while the rank itself is busy or waits. Dropping it
/// says that the rank's device exchanges nothing more, so that its silence is no loss.
pub trait GroupWatch: Send {
    /// Reports the state of this rank's device. Returns the error for which the group cannot
    /// continue, if the device may wait in vain because of it; a rank that left in order is no loss
    /// while it sends pulses. Does not wait for other ranks' calls.
    fn pulse(&mut self, pulse: &Pulse) -> News;
}

/// The view of a transport that knows nothing between calls. It names nobody.
pub(crate) struct Blind {
    pub(crate) deadline: Duration,
}

impl GroupWatch for Blind {
    fn pulse(&mut self, pulse: &Pulse) -> News {
        match pulse.trouble {
            Some(Trouble::Overdue | Trouble::Stuck) => News::Lost(endless(self.deadline)),
            _ => News::Ended,
        }
    }
}

/// The error for an exchange that does not end, though no rank is known to be lost.
pub(crate) fn endless(deadline: Duration) -> Error {
    Error::Endless { operation: "exchange", seconds: deadline.as_secs_f64() }
}

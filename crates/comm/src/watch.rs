//! Views of a group for threads that watch it. Ranks whose devices exchange elements directly need
//! to learn of a lost rank while they wait for a device.

use std::time::Duration;

use crate::error::Error;

/// Longest time between two pulses of a rank.
pub(crate) const PULSE: Duration = Duration::from_secs(1);
/// Time without a pulse after which a rank is considered silent: several pulses, because a machine
/// may be busy.
pub(crate) const SILENT: Duration = Duration::from_secs(5);

/// State of a rank's device, for the other ranks. Each rank sends a pulse about every second.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pulse {
    /// Number of the device's membership in a group of devices, from 1.
    pub membership: u64,
    /// Number of exchanges of the membership that the device has reached.
    pub reached: u64,
    /// Number of exchanges of the membership that the device has ended.
    pub ended: u64,
    /// Whether the rank is leaving: it makes no more exchanges, and waits until the devices of the
    /// other ranks have ended as many.
    pub closing: bool,
    /// Trouble with the current exchange.
    pub trouble: Option<Trouble>,
}

impl Pulse {
    /// The membership and the number of ended exchanges, for comparisons with other ranks.
    pub(crate) fn ends(&self) -> (u64, u64) {
        (self.membership, self.ended)
    }
}

/// Trouble of a device with an exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trouble {
    /// The device has waited for the other devices until the deadline.
    Overdue,
    /// The device has not begun an exchange by the deadline, because a call of its library does not
    /// return.
    Stuck,
    /// An unknown other process is gone.
    Lost,
    /// The device failed, for this reason.
    Failed(String),
}

/// State of the group, reported to a watching thread.
#[derive(Debug, Clone)]
pub enum News {
    /// No rank is known to be lost.
    Sound,
    /// No rank is known to be lost, and the devices of all ranks have ended as many exchanges as
    /// this rank's device.
    Ended,
    /// The error for which the group cannot continue.
    Lost(Error),
}

/// View of a group for a thread that watches it while the rank itself is busy or waits. Dropping it
/// announces that the rank's device makes no more exchanges, so that the rank's silence is no loss.
pub trait GroupWatch: Send {
    /// Reports the state of this rank's device, and returns the state of the group. A rank that
    /// left in order is no loss while it sends pulses. Does not wait for other ranks' calls.
    fn pulse(&mut self, pulse: &Pulse) -> News;
}

/// The view of a transport that has no information between calls. It cannot name a lost rank.
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

/// The error for an exchange that does not end, although no rank is known to be lost.
pub(crate) fn endless(deadline: Duration) -> Error {
    Error::Endless { operation: "exchange", seconds: deadline.as_secs_f64() }
}

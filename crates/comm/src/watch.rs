//! Monitoring of a group by another thread. While ranks wait for devices that exchange elements
//! directly, only such a thread can report a lost rank.

use std::time::Duration;

use crate::error::Error;

/// Longest time between two heartbeats of a rank.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(1);
/// Time without a heartbeat after which a rank is silent; several heartbeats, because the machine
/// may be busy.
pub(crate) const SILENT: Duration = Duration::from_secs(5);

/// State of a rank's device, sent to the other ranks about every second.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Heartbeat {
    /// Number of groups of devices that the device has joined, this one included.
    pub membership: u64,
    /// Number of exchanges in this group that the device has reached.
    pub reached: u64,
    /// Number of exchanges in this group that the device has ended.
    pub ended: u64,
    /// Whether the rank is leaving: it starts no more exchanges, and waits for the other devices to
    /// end theirs.
    pub closing: bool,
    /// Problem with the current exchange.
    pub problem: Option<ExchangeProblem>,
}

impl Heartbeat {
    /// The group and the number of ended exchanges, for comparison between ranks.
    pub(crate) fn ends(&self) -> (u64, u64) {
        (self.membership, self.ended)
    }
}

/// Problem of a device with an exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExchangeProblem {
    /// The device waits for other devices beyond the deadline.
    Overdue,
    /// The device has not begun an exchange by the deadline, because a library call does not
    /// return.
    Stuck,
    /// Another process is gone; which one is unknown.
    Lost,
    /// The device failed; contains the reason.
    Failed(String),
}

/// State of the group, as reported to a watching thread.
#[derive(Debug, Clone)]
pub enum GroupStatus {
    /// No rank is known to be lost.
    Sound,
    /// No rank is known to be lost, and the devices of all ranks have ended at least the exchanges
    /// of this rank's device.
    Ended,
    /// The group cannot continue because of this error.
    Lost(Error),
}

/// A watching thread's view of a group. Over TCP and between threads, dropping it announces that
/// the rank's device starts no more exchanges, so that later silence is no loss.
pub trait GroupWatch: Send {
    /// Reports the state of this rank's device and returns the state of the group. A rank that left
    /// in order does not count as lost while it sends heartbeats. Does not wait for other ranks'
    /// calls.
    fn heartbeat(&mut self, heartbeat: &Heartbeat) -> GroupStatus;
}

/// The view of a transport without information between calls. It cannot name a lost rank.
pub(crate) struct DeadlineWatch {
    pub(crate) deadline: Duration,
}

impl GroupWatch for DeadlineWatch {
    fn heartbeat(&mut self, heartbeat: &Heartbeat) -> GroupStatus {
        match heartbeat.problem {
            Some(ExchangeProblem::Overdue | ExchangeProblem::Stuck) => {
                GroupStatus::Lost(endless(self.deadline))
            }
            _ => GroupStatus::Ended,
        }
    }
}

/// The error for an exchange that does not end although no rank is known to be lost.
pub(crate) fn endless(deadline: Duration) -> Error {
    Error::Endless { operation: "exchange", seconds: deadline.as_secs_f64() }
}

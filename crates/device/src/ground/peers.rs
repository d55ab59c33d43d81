//! Values that describe a group of devices that exchange data.

use std::time::Duration;

/// Bytes of the id of a group.
pub(crate) const ID_BYTES: usize = 128;

/// Place of a device in a new group.
#[derive(Debug, Clone, Copy)]
pub struct PeerPlace {
    /// Id of the group, from [`Peers::new_id`](crate::Peers::new_id) of one member.
    pub id: [u8; ID_BYTES],
    /// Number of this device in the group.
    pub rank: usize,
    /// Number of devices in the group.
    pub size: usize,
    /// Time in which the thread that watches the group must give the reason for an error of NCCL.
    pub patience: Duration,
}

/// Progress of a membership: numbers of exchanges, each counted from the first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PeerProgress {
    /// Exchanges that were submitted; joining the group is the first.
    pub submitted: u64,
    /// Exchanges that NCCL has enqueued.
    pub enqueued: u64,
    /// Exchanges that the device has begun.
    pub reached: u64,
    /// Exchanges that it has ended.
    pub ended: u64,
}

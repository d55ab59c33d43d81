//! A group of ranks, as the MPI thread stores it.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::transport::others;

/// Largest number that identifies a group: MPI guarantees tags up to 32767, and a group uses three.
/// A split uses as many numbers as it has ranks.
pub(super) const GROUPS_MAX: i32 = 10_000;

/// State of a group.
pub(super) struct MpiGroup {
    pub(super) context: i32,
    /// Rank among all processes, per rank of the group.
    pub(super) members: Arc<[i32]>,
    pub(super) rank: usize,
    pub(super) deadline: Duration,
    /// Number of exchanges begun.
    pub(super) step: u64,
    /// Notice of each rank that left, by rank.
    pub(super) left: Vec<Option<RankDeparture>>,
    /// Progress of each rank's device, by rank: the number of its group of devices, and the number
    /// of ended exchanges in it.
    pub(super) ended: Vec<(u64, u64)>,
    pub(super) failure: Option<Error>,
}

/// Notice of a rank that left.
#[derive(Clone, Copy)]
pub(super) struct RankDeparture {
    /// Number of exchanges that the rank made.
    pub(super) steps: u64,
    pub(super) panicked: bool,
    pub(super) in_order: bool,
}

impl MpiGroup {
    pub(super) fn new(
        context: i32,
        members: Arc<[i32]>,
        rank: usize,
        deadline: Duration,
    ) -> MpiGroup {
        let (left, ended) = (vec![None; members.len()], vec![(0, 0); members.len()]);
        MpiGroup { context, members, rank, deadline, step: 0, left, ended, failure: None }
    }

    /// The other ranks.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        others(self.rank, self.members.len())
    }
}

/// Message tags of a group with a number below [`GROUPS_MAX`].
pub(super) struct MpiTags {
    pub(super) header: i32,
    pub(super) elements: i32,
    pub(super) notice: i32,
}

impl MpiTags {
    pub(super) fn for_group(context: i32) -> MpiTags {
        let first = 3 * context.min(GROUPS_MAX);
        MpiTags { header: first, elements: first + 1, notice: first + 2 }
    }
}

//! Memory in use, by owner (V3).

use super::watermark::{Watermark, WatermarkId};
use crate::ground::{Owner, OwnerUse};

/// Running totals. `current`, `peak` and the owners count bytes requested for tensors and for
/// temporary memory of kernels; `reserved` counts bytes of blocks.
#[derive(Default)]
pub(crate) struct Usage {
    /// Requested bytes in use now.
    pub(crate) current: usize,
    /// Largest number of requested bytes in use so far.
    pub(crate) peak: usize,
    /// Bytes taken from the system now.
    pub(crate) reserved: usize,
    /// Largest number of bytes taken from the system so far.
    pub(crate) reserved_peak: usize,
    /// Requested bytes in use by each owner, now and at most, in the order of [`Owner::ALL`].
    owners: [(usize, usize); Owner::ALL.len()],
    /// Watermarks of the measured calls: usually none.
    watermarks: Vec<Watermark>,
    watermarks_opened: u64,
}

impl Usage {
    /// Adds bytes to an owner; returns the owner's total.
    pub(crate) fn take(&mut self, owner: Owner, bytes: usize) -> usize {
        self.current += bytes;
        self.peak = self.peak.max(self.current);
        let (current, peak) = &mut self.owners[owner as usize];
        *current += bytes;
        *peak = (*peak).max(*current);
        let (total, of_owner) = (self.current, *current);
        self.watermarks.iter_mut().for_each(|mark| mark.raise(total, owner, of_owner));
        of_owner
    }

    /// Subtracts bytes from an owner; returns the owner's total.
    pub(crate) fn give(&mut self, owner: Owner, bytes: usize) -> usize {
        self.current -= bytes;
        let of_owner = &mut self.owners[owner as usize].0;
        *of_owner -= bytes;
        *of_owner
    }

    /// Starts to measure the peak from now on.
    pub(crate) fn open_watermark(&mut self) -> WatermarkId {
        self.watermarks_opened += 1;
        let id = WatermarkId(self.watermarks_opened);
        let owners = self.owners.map(|(current, _)| current);
        self.watermarks.push(Watermark { id, peak: self.current, owners });
        id
    }

    /// Ends a measurement; `None` if it ended before.
    pub(crate) fn close_watermark(&mut self, id: WatermarkId) -> Option<Watermark> {
        let at = self.watermarks.iter().position(|mark| mark.id == id)?;
        Some(self.watermarks.swap_remove(at))
    }

    /// Bytes of each owner, in the order of [`Owner::ALL`].
    pub(crate) fn owners(&self) -> Vec<OwnerUse> {
        let of = |owner| {
            let (current, peak) = self.owners[owner as usize];
            OwnerUse { owner, current, peak }
        };
        Owner::ALL.map(of).to_vec()
    }
}

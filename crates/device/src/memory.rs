//! Memory in use, by owner (V3).

use crate::ground::{Owner, OwnerUse};
use crate::watermark::{Watermark, WatermarkId};

/// Memory of a device. Bytes are those that tensors asked for; rounding and cached free blocks are
/// only in `reserved`, so `current` and `peak` do not depend on timing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryReport {
    /// Bytes in tensors now.
    pub current: usize,
    /// Largest number of bytes in tensors so far.
    pub peak: usize,
    /// Bytes taken from the system: in tensors, or free and cached for reuse.
    pub reserved: usize,
    /// Largest number of bytes taken from the system so far.
    pub reserved_peak: usize,
    /// By owner, every owner once, in the order of [`Owner::ALL`].
    pub owners: Vec<OwnerUse>,
}

/// Running totals behind a [`MemoryReport`].
#[derive(Default)]
pub(crate) struct Usage {
    current: usize,
    peak: usize,
    owners: [(usize, usize); Owner::ALL.len()],
    /// Watermarks of the calls being measured: usually none.
    watermarks: Vec<Watermark>,
    watermarks_opened: u64,
}

impl Usage {
    /// Adds bytes to an owner's; returns how many it has.
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

    /// Takes bytes from an owner's; returns how many it has.
    pub(crate) fn give(&mut self, owner: Owner, bytes: usize) -> usize {
        self.current -= bytes;
        let of_owner = &mut self.owners[owner as usize].0;
        *of_owner -= bytes;
        *of_owner
    }

    pub(crate) fn current(&self) -> usize {
        self.current
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

    pub(crate) fn report(&self, reserved: usize, reserved_peak: usize) -> MemoryReport {
        let owners = Owner::ALL.map(|owner| {
            let (current, peak) = self.owners[owner as usize];
            OwnerUse { owner, current, peak }
        });
        MemoryReport {
            current: self.current,
            peak: self.peak,
            reserved,
            reserved_peak,
            owners: owners.to_vec(),
        }
    }
}

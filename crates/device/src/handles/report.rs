//! Reports of a device's memory (V3).

use super::{Device, Stream};
use crate::ground::{Owner, OwnerUse};
use crate::memory::{Pool, Usage, WatermarkId};

/// Memory of a device. `current` and `peak` count the bytes requested for tensors, which do not
/// depend on timing, and for temporary memory of kernels ([`Scratch`](crate::Scratch)), which can
/// count until the kernels that use it have ended. Rounding and cached free blocks are only in
/// `reserved`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryReport {
    /// Requested bytes in use now.
    pub current: usize,
    /// Largest number of requested bytes in use so far.
    pub peak: usize,
    /// Bytes taken from the system: in use, or free and cached for reuse.
    pub reserved: usize,
    /// Largest number of bytes taken from the system so far.
    pub reserved_peak: usize,
    /// Use of each owner, in the order of [`Owner::ALL`].
    pub owners: Vec<OwnerUse>,
}

impl MemoryReport {
    pub(super) fn from_usage(usage: &Usage) -> Self {
        let &Usage { current, peak, reserved, reserved_peak, .. } = usage;
        MemoryReport { current, peak, reserved, reserved_peak, owners: usage.owners() }
    }

    /// Runs `call`, and reports the memory of `device` before, after, and at the peak in between,
    /// however short that was. Calls may be nested, and may run concurrently on several threads:
    /// each report includes all allocations on the device during its call, from any thread. Bytes
    /// of a tensor count from its creation until its last handle is dropped, not until kernels in
    /// flight have ended, so they do not depend on the timing of the device. Does not wait.
    pub fn around<T>(device: &Device, call: impl FnOnce() -> T) -> (T, MemoryAround) {
        let pool = device.pool();
        let (before, id) =
            pool.with_usage(|usage| (MemoryReport::from_usage(usage), usage.open_watermark()));
        let open = OpenWatermark { pool, id };
        let result = call();
        let (after, mark) = pool
            .with_usage(|usage| (MemoryReport::from_usage(usage), usage.close_watermark(open.id)));
        let (peak, owners) = match mark {
            Some(mark) => (mark.peak, mark.owners),
            None => (after.current, [0; Owner::ALL.len()]),
        };
        (result, MemoryAround { before, after, peak, owners })
    }
}

/// Memory of a device before, during and after a call; see [`MemoryReport::around`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryAround {
    /// Memory at the start of the call.
    pub before: MemoryReport,
    /// Memory after the call returned.
    pub after: MemoryReport,
    /// Largest number of requested bytes in use at any moment of the call, requests from before the
    /// call included.
    pub peak: usize,
    owners: [usize; Owner::ALL.len()],
}

impl MemoryAround {
    /// Largest number of bytes of one owner at any moment of the call. Owners' peaks need not
    /// coincide.
    pub fn owner_peak(&self, owner: Owner) -> usize {
        self.owners[owner as usize]
    }
}

/// Ends the measurement when the call panics.
struct OpenWatermark<'a> {
    pool: &'a Pool<Stream>,
    id: WatermarkId,
}

impl Drop for OpenWatermark<'_> {
    fn drop(&mut self) {
        self.pool.with_usage(|usage| usage.close_watermark(self.id));
    }
}

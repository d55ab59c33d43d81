//! The most memory in use while a call runs (V3).
//!
//! A call that is measured sets a watermark, which every allocation raises. There may be several at
//! once, of calls inside of each other and of calls side by side; each is raised by all of them, as
//! all use the same device.

use crate::device::Device;
use crate::memory::{MemoryReport, Owner};
use crate::pool::Pool;

/// Which watermark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WatermarkId(pub(crate) u64);

/// The most bytes in tensors since it was set.
#[derive(Debug)]
pub(crate) struct Watermark {
    pub(crate) id: WatermarkId,
    pub(crate) peak: usize,
    /// Each owner's own most, in the order of [`Owner::ALL`].
    pub(crate) owners: [usize; Owner::ALL.len()],
}

impl Watermark {
    pub(crate) fn raise(&mut self, total: usize, owner: Owner, of_owner: usize) {
        self.peak = self.peak.max(total);
        let peak = &mut self.owners[owner as usize];
        *peak = (*peak).max(of_owner);
    }
}

/// Memory of a device before, during and after a call; see [`MemoryReport::around`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryAround {
    /// When the call began.
    pub before: MemoryReport,
    /// When it had returned.
    pub after: MemoryReport,
    /// The most bytes in tensors at any moment of the call, those from before included.
    pub peak: usize,
    owners: [usize; Owner::ALL.len()],
}

impl MemoryAround {
    /// The most bytes of one owner at any moment of the call. Owners' peaks need not fall together.
    pub fn owner_peak(&self, owner: Owner) -> usize {
        self.owners[owner as usize]
    }
}

impl MemoryReport {
    /// Runs `call`, and says what it did to the memory of `device`: before, after, and the true peak
    /// within, however short it lasted. Calls may be nested, and may run side by side on several
    /// threads: every one sees all that happens on the device during it, whoever does it. Bytes
    /// count from the moment a tensor is made until its last handle goes, not by what kernels in
    /// flight still hold, so the figures depend on no timing of the device. Waits for nothing.
    pub fn around<T>(device: &Device, call: impl FnOnce() -> T) -> (T, MemoryAround) {
        let pool = &device.shared().pool;
        let (before, id) = pool.report_with(|usage| usage.open_watermark());
        let open = Open { pool, id };
        let result = call();
        let (after, mark) = pool.report_with(|usage| usage.close_watermark(open.id));
        let (peak, owners) = match mark {
            Some(mark) => (mark.peak, mark.owners),
            None => (after.current, [0; Owner::ALL.len()]),
        };
        (result, MemoryAround { before, after, peak, owners })
    }
}

/// Ends the watch when the call panics.
struct Open<'a> {
    pool: &'a Pool,
    id: WatermarkId,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.pool.report_with(|usage| usage.close_watermark(self.id));
    }
}

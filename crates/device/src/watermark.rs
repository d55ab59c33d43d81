//! Peak memory in use during a call (V3).
//!
//! A measured call sets a watermark, which every allocation raises. There may be several at once,
//! of nested and of concurrent calls; each is raised by all allocations, as all are on the same
//! device.

use crate::device::Device;
use crate::ground::Owner;
use crate::memory::MemoryReport;
use crate::pool::Pool;

/// Id of a watermark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WatermarkId(pub(crate) u64);

/// Peak of the bytes in tensors since the watermark was set.
#[derive(Debug)]
pub(crate) struct Watermark {
    pub(crate) id: WatermarkId,
    pub(crate) peak: usize,
    /// Each owner's own peak, in the order of [`Owner::ALL`].
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
    /// Memory at the start of the call.
    pub before: MemoryReport,
    /// Memory after the call returned.
    pub after: MemoryReport,
    /// Largest number of bytes in tensors at any moment of the call, earlier ones included.
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

impl MemoryReport {
    /// Runs `call`, and reports its effect on the memory of `device`: before, after, and the true
    /// peak in between, however short it lasted. Calls may be nested, and may run concurrently on
    /// several threads: every one sees everything that happens on the device during it, from any
    /// thread. Bytes count from the creation of a tensor until its last handle is dropped, not
    /// until kernels in flight have ended, so the figures do not depend on the timing of the
    /// device. Does not wait.
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

/// Ends the measurement when the call panics.
struct Open<'a> {
    pool: &'a Pool,
    id: WatermarkId,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.pool.report_with(|usage| usage.close_watermark(self.id));
    }
}

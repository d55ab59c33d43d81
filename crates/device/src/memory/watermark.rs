//! Peak memory in use during a call (V3).
//!
//! A measured call sets a watermark, which every allocation on the device raises. Nested and
//! concurrent calls have several watermarks at once; an allocation raises all of them.

use crate::ground::Owner;

/// Id of a watermark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WatermarkId(pub(crate) u64);

/// Peak of the requested bytes in use since the watermark was set.
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

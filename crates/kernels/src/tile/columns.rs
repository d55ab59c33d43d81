//! Products divided by columns into parts, which idle workers may run. A product of few rows and
//! many weights, as in linear layers and in the steps of an LSTM, has no images to divide.

use std::ops::Range;

use meristem_device::in_parts;

use super::PANEL;
use crate::parts::MOST;

/// Least columns of a part: a wide convolution divides its images, not its columns.
const LEAST_COLS: usize = 4 * PANEL;

/// Least multiply-adds of a part, some 10 µs of a core.
const LEAST: usize = 1_000_000;

/// Output of a product that several threads write.
pub(super) struct SharedOutput(pub(super) *mut f32);

// SAFETY: an address. Each writer proves that no other thread writes the same elements, see
// `run_block`.
unsafe impl Sync for SharedOutput {}

/// Runs `run` for ranges of columns that cover `cols`; all except the last consist of whole panels.
/// `work` is the multiply-adds of one column. Columns are independent, so the bits do not depend on
/// the number of parts.
pub(super) fn in_columns(cols: usize, work: usize, run: impl Fn(Range<usize>) + Sync) {
    let parts = (cols / LEAST_COLS).min(cols.saturating_mul(work) / LEAST).clamp(1, MOST);
    let each = cols.div_ceil(parts).next_multiple_of(PANEL);
    let parts = u16::try_from(cols.div_ceil(each)).expect("a few parts");
    in_parts(parts, |k| run(k * each..((k + 1) * each).min(cols)));
}

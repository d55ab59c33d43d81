//! Columns of a product in parts, some of which idle workers take over: few rows times many
//! weights, as in linear layers and in the steps of an LSTM, have no images to divide.

use std::ops::Range;

use meristem_device::in_parts;

use super::PANEL;
use crate::kernels::parts::MOST;

/// Columns of a part at least: of a wide convolution none are divided, whose images are.
const LEAST_COLS: usize = 4 * PANEL;

/// Multiply-adds of a part at least, some 10 µs of a core.
const LEAST: usize = 1_000_000;

/// Where a product is written by several threads.
pub(super) struct Output(pub(super) *mut f32);

// SAFETY: an address. Whoever writes there proves that no other thread does, see `run_block`.
unsafe impl Sync for Output {}

/// Runs `run` for ranges of columns that cover `cols`, each of whole panels but the last. A column
/// does not depend on the others, so neither does a bit on how many parts there are.
pub(super) fn in_columns(cols: usize, work: usize, run: impl Fn(Range<usize>) + Sync) {
    let parts = (cols / LEAST_COLS).min(cols.saturating_mul(work) / LEAST).clamp(1, MOST);
    let each = cols.div_ceil(parts).next_multiple_of(PANEL);
    let parts = u16::try_from(cols.div_ceil(each)).expect("a few parts");
    in_parts(parts, |k| run(k * each..((k + 1) * each).min(cols)));
}

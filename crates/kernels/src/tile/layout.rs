//! Arrangements of a product's weights in memory, and their packing.

use super::Nest;
use crate::isa::Level;
use crate::{Isa, PAD, pad16};

/// Arrangement of B in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MatrixLayout {
    /// Row after row; the value is the distance between rows, in elements.
    Rows(usize),
    /// Panels of [`PANEL`] columns, each with all its rows together. The last panel has the
    /// remaining columns, padded to a multiple of [`PAD`]. A tile reads contiguous memory; in wide
    /// rows, its columns would share few cache sets, and each row would be on a separate page.
    Panels,
    /// At most 8 columns, two rows in a vector, see [`to_pairs`]. For AVX-512 only. Runs of the
    /// depth must be contiguous in A.
    Pairs,
}

/// Elements of B in [`MatrixLayout::Pairs`] for a depth.
pub(crate) const fn paired_len(depth: &Nest) -> usize {
    let [outer, middle, run] = depth.counts;
    outer * middle * run.div_ceil(2) * PAD
}

/// Packs the first 8 columns of `b`, which has rows of [`PAD`] columns, for
/// [`MatrixLayout::Pairs`].
pub(crate) fn to_pairs(depth: &Nest, b: &[f32], to: &mut [f32]) {
    let run = depth.counts[2];
    let pairs = b.chunks_exact(run * PAD).flat_map(|run| run.chunks(2 * PAD));
    for (to, pair) in to[..paired_len(depth)].chunks_exact_mut(PAD).zip(pairs) {
        for (c, to) in to.chunks_exact_mut(2).enumerate() {
            to[0] = pair[c];
            to[1] = pair.get(PAD + c).copied().unwrap_or(0.0);
        }
    }
}

/// Whether products of `cols` columns are faster in [`MatrixLayout::Pairs`], over a depth with
/// contiguous runs in A.
pub(crate) fn takes_pairs(isa: Isa, cols: usize) -> bool {
    isa.level() == Level::Avx512 && (5..=8).contains(&cols)
}

/// Columns of a panel: of the widest tile.
pub(super) const PANEL: usize = 32;

/// First element of the panel of column `col`, in memory of `depth` rows, and the panel's number of
/// columns.
pub(super) const fn panel(depth: usize, cols: usize, col: usize) -> (usize, usize) {
    let first = col / PANEL * PANEL;
    let left = pad16(cols) - first;
    (depth * first, if left < PANEL { left } else { PANEL })
}

/// First element of columns `col` and later in row `k`, in panels of `depth` rows; the columns
/// extend at least to the next multiple of [`PAD`].
pub(crate) const fn in_panels(depth: usize, cols: usize, k: usize, col: usize) -> usize {
    let (start, step) = panel(depth, cols, col);
    start + k * step + col % PANEL
}

/// Packed weights `[depth][pad16(cols)]` as panels, which take as much memory.
pub(crate) fn to_panels(depth: usize, cols: usize, b: &[f32], to: &mut [f32]) {
    let width = pad16(cols);
    for col in (0..cols).step_by(PANEL) {
        let (start, step) = panel(depth, cols, col);
        let rows = to[start..start + depth * step].chunks_exact_mut(step);
        rows.zip(b.chunks_exact(width)).for_each(|(to, b)| to.copy_from_slice(&b[col..][..step]));
    }
}

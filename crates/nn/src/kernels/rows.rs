//! Rows side by side: concatenation, and embeddings.

use super::macros::isa_kernels;
use super::{GradOut, Isa};

/// Columns `first..first + count` of rows with `width` columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnRange {
    /// Columns of the whole.
    pub width: usize,
    /// The first one.
    pub first: usize,
    /// Number of columns.
    pub count: usize,
}

isa_kernels! {
    /// Writes the columns `at` of `whole` `[N][width]` from `part` `[N][count]`.
    pub fn put(isa: Isa, at: ColumnRange, part: &[f32], whole: &mut [f32]) {
        let rows = whole.chunks_exact_mut(at.width).zip(part.chunks_exact(at.count));
        rows.for_each(|(whole, part)| whole[at.first..at.first + at.count].copy_from_slice(part));
    }

    /// Takes the columns `at` of `whole` `[N][width]` to `part` `[N][count]`.
    pub fn take(isa: Isa, at: ColumnRange, whole: &[f32], part: GradOut<'_>) {
        let rows = whole.chunks_exact(at.width).zip(part.values.chunks_exact_mut(at.count));
        for (whole, to) in rows {
            let from = &whole[at.first..at.first + at.count];
            if part.accumulate {
                to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            } else {
                to.copy_from_slice(from);
            }
        }
    }

    /// `y` `[N][size]` becomes the rows of `table` `[entries][size]` at `indices` `[N]`. An index
    /// out of range panics: writers of indices take them from a list.
    pub(crate) fn embed(isa: Isa, size: usize, table: &[f32], indices: &[u32], y: &mut [f32]) {
        for (y, &index) in y.chunks_exact_mut(size).zip(indices) {
            y.copy_from_slice(&table[index as usize * size..][..size]);
        }
    }

    /// Adds the gradient of [`embed`] with respect to the table, index by index in their order.
    pub(crate) fn embed_backward(
        isa: Isa,
        size: usize,
        indices: &[u32],
        dy: &[f32],
        dtable: &mut [f32],
    ) {
        for (dy, &index) in dy.chunks_exact(size).zip(indices) {
            let to = &mut dtable[index as usize * size..][..size];
            to.iter_mut().zip(dy).for_each(|(to, dy)| *to += dy);
        }
    }
}

//! Rows side by side: concatenation, embeddings, and transposes.

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

/// Matrices of one shape, one after the other: `[count][rows][columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrices {
    /// Matrices.
    pub count: usize,
    /// Rows of each.
    pub rows: usize,
    /// Columns of each.
    pub columns: usize,
}

impl Matrices {
    /// Elements of all of them.
    pub const fn len(&self) -> usize {
        self.count * self.rows * self.columns
    }

    /// Whether there is no element.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The shape of the transposed matrices.
    pub const fn transposed(self) -> Self {
        Self { count: self.count, rows: self.columns, columns: self.rows }
    }
}

/// Side of the squares in which a matrix is transposed: their rows on either side stay in the
/// nearest cache.
const SQUARE: usize = 16;

isa_kernels! {
    /// Transposes each matrix of `x` `[count][rows][columns]` to `y` `[count][columns][rows]`.
    pub fn transpose(isa: Isa, of: Matrices, x: &[f32], y: GradOut<'_>) {
        let Matrices { rows, columns, .. } = of;
        let each = (rows * columns).max(1);
        for (x, to) in x.chunks_exact(each).zip(y.values.chunks_exact_mut(each)) {
            for row in (0..rows).step_by(SQUARE) {
                for column in (0..columns).step_by(SQUARE) {
                    let height = SQUARE.min(rows - row);
                    for c in column..columns.min(column + SQUARE) {
                        let to = &mut to[c * rows + row..][..height];
                        for (k, to) in to.iter_mut().enumerate() {
                            let from = x[(row + k) * columns + c];
                            *to = if y.accumulate { *to + from } else { from };
                        }
                    }
                }
            }
        }
    }

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
    pub fn embed(isa: Isa, size: usize, table: &[f32], indices: &[u32], y: &mut [f32]) {
        for (y, &index) in y.chunks_exact_mut(size).zip(indices) {
            y.copy_from_slice(&table[index as usize * size..][..size]);
        }
    }

    /// Adds the gradient of [`embed`] with respect to the table, index by index in their order.
    pub fn embed_backward(
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

//! Steps of embeddings, of vectors side by side, and of transposes.

use super::operand::{Signature, StepOperands, f32s, u32s, values};
use crate::kernels::rows::{self, ColumnRange, Matrices};
use crate::kernels::{GradOut, Isa};

/// Shape of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// Indices.
    pub indices: usize,
    /// Rows of the table.
    pub entries: usize,
    /// Length of a row.
    pub size: usize,
}

/// Row operations, forward and backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RowsOp {
    /// Reads indices (u32), table; writes the table's rows at the indices.
    Embed(Lookup),
    /// Reads indices (u32), dy; adds to dtable, index by index in their order.
    EmbedGradient(Lookup),
    /// Reads indices (u32); writes a copy of them.
    CopyIndices {
        /// Indices.
        len: usize,
    },
    /// Reads a part; writes its columns of the whole, and keeps the other columns.
    Put {
        /// Rows.
        rows: usize,
        /// Columns of the whole.
        at: ColumnRange,
    },
    /// Reads the whole; writes a part.
    Take {
        /// Rows.
        rows: usize,
        /// Columns of the whole.
        at: ColumnRange,
        /// Add to the part.
        accumulate: bool,
    },
    /// Reads matrices; writes them transposed.
    Transpose {
        /// Shape of the matrices read.
        of: Matrices,
        /// Add to the written ones.
        accumulate: bool,
    },
}

impl RowsOp {
    pub(super) fn signature(&self) -> Signature {
        match *self {
            RowsOp::Embed(of) => {
                let (table, y) = (f32s(of.entries * of.size), values(of.indices * of.size));
                Signature::new(&[u32s(of.indices), table], &[y])
            }
            RowsOp::EmbedGradient(of) => {
                let (table, y) = (f32s(of.entries * of.size), values(of.indices * of.size));
                Signature::new(&[u32s(of.indices), y], &[table])
            }
            RowsOp::CopyIndices { len } => Signature::new(&[u32s(len)], &[u32s(len)]),
            RowsOp::Put { rows, at } => {
                Signature::new(&[values(rows * at.count)], &[values(rows * at.width)])
            }
            RowsOp::Take { rows, at, .. } => {
                Signature::new(&[values(rows * at.width)], &[values(rows * at.count)])
            }
            RowsOp::Transpose { of, .. } => {
                Signature::new(&[values(of.len())], &[values(of.len())])
            }
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: StepOperands<'_>) {
        match *self {
            RowsOp::Embed(of) => {
                let ([indices, table], [y]) = operands.split();
                rows::embed(isa, of.size, table.elements(), indices.elements(), y.elements());
            }
            RowsOp::EmbedGradient(of) => {
                let ([indices, dy], [dtable]) = operands.split();
                rows::embed_backward(
                    isa,
                    of.size,
                    indices.elements(),
                    dy.elements(),
                    dtable.elements(),
                );
            }
            RowsOp::CopyIndices { .. } => {
                let ([from], [to]) = operands.split();
                to.elements::<u32>().copy_from_slice(from.elements());
            }
            RowsOp::Put { at, .. } => {
                let ([part], [whole]) = operands.floats();
                rows::put(isa, at, part, whole);
            }
            RowsOp::Take { at, accumulate, .. } => {
                let ([whole], [values]) = operands.floats();
                rows::take(isa, at, whole, GradOut { values, accumulate });
            }
            RowsOp::Transpose { of, accumulate } => {
                let ([x], [values]) = operands.floats();
                rows::transpose(isa, of, x, GradOut { values, accumulate });
            }
        }
    }
}

//! Steps of embeddings, and of vectors side by side.

use super::operand::{Operands, Signature, f32s, u32s};
use crate::kernels::rows::{self, Columns};
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
pub enum Op {
    /// Reads indices (u32), table; writes the table's rows at the indices.
    Embed(Lookup),
    /// Reads indices (u32), dy; adds to dtable, index by index in their order.
    EmbedGradient(Lookup),
    /// Reads indices (u32); writes them.
    CopyIndices {
        /// Indices.
        len: usize,
    },
    /// Reads a part; writes its columns of the whole, and leaves the others.
    Put {
        /// Rows.
        rows: usize,
        /// Columns of the whole.
        at: Columns,
    },
    /// Reads the whole; writes a part.
    Take {
        /// Rows.
        rows: usize,
        /// Columns of the whole.
        at: Columns,
        /// Add to the part.
        accumulate: bool,
    },
}

impl Op {
    pub(super) fn signature(&self) -> Signature {
        match *self {
            Op::Embed(of) => {
                let (table, y) = (f32s(of.entries * of.size), f32s(of.indices * of.size));
                Signature::new(&[u32s(of.indices), table], &[y])
            }
            Op::EmbedGradient(of) => {
                let (table, y) = (f32s(of.entries * of.size), f32s(of.indices * of.size));
                Signature::new(&[u32s(of.indices), y], &[table])
            }
            Op::CopyIndices { len } => Signature::new(&[u32s(len)], &[u32s(len)]),
            Op::Put { rows, at } => {
                Signature::new(&[f32s(rows * at.count)], &[f32s(rows * at.width)])
            }
            Op::Take { rows, at, .. } => {
                Signature::new(&[f32s(rows * at.width)], &[f32s(rows * at.count)])
            }
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: Operands<'_>) {
        match *self {
            Op::Embed(of) => {
                let ([indices, table], [y]) = operands.split();
                rows::embed(isa, of.size, table.elements(), indices.elements(), y.elements());
            }
            Op::EmbedGradient(of) => {
                let ([indices, dy], [dtable]) = operands.split();
                rows::embed_backward(
                    isa,
                    of.size,
                    indices.elements(),
                    dy.elements(),
                    dtable.elements(),
                );
            }
            Op::CopyIndices { .. } => {
                let ([from], [to]) = operands.split();
                to.elements::<u32>().copy_from_slice(from.elements());
            }
            Op::Put { at, .. } => {
                let ([part], [whole]) = operands.floats();
                rows::put(isa, at, part, whole);
            }
            Op::Take { at, accumulate, .. } => {
                let ([whole], [values]) = operands.floats();
                rows::take(isa, at, whole, GradOut { values, accumulate });
            }
        }
    }
}

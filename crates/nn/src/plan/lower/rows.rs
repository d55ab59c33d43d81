//! Embeddings, channels side by side, and images as vectors.

use crate::graph::{NodeId, ParamId};
use crate::kernels::rows::{ColumnRange, Matrices};
use crate::ops::RowsOp;
use crate::ops::rows::Lookup;
use crate::plan::builder::{EmitBackward, PlanBuilder};

/// `Embedding`.
pub(super) fn embedding(
    b: &mut PlanBuilder<'_>,
    node: NodeId,
    x: NodeId,
    table: ParamId,
) -> EmitBackward {
    let indices = b.shape(x).len();
    let size = b.shape(node).c / b.shape(x).c;
    let entries = b.layout.param(table).len / size.max(1);
    let of = Lookup { indices, entries, size };
    let (indices, values) = (b.node(x), b.param(table));
    let y = b.output(node);
    b.emit(RowsOp::Embed(of), &[indices, values], &[y]);
    Box::new(move |b, dy| {
        let dtable = b.param_gradient(table);
        b.emit(RowsOp::EmbedGradient(of), &[indices, dy], &[dtable]);
    })
}

/// `Concat`.
pub(super) fn concat(b: &mut PlanBuilder<'_>, node: NodeId, parts: &[NodeId]) -> EmitBackward {
    // A pixel is a row.
    let (rows, width) = (b.batch() * b.shape(node).pixels(), b.shape(node).c);
    let mut first = 0;
    let columns: Vec<(NodeId, ColumnRange)> = parts
        .iter()
        .map(|part| {
            let at = ColumnRange { width, first, count: b.shape(*part).c };
            first += at.count;
            (*part, at)
        })
        .collect();
    let y = b.output(node);
    for (part, at) in &columns {
        let value = b.node(*part);
        b.emit(RowsOp::Put { rows, at: *at }, &[value], &[y]);
    }
    Box::new(move |b, dy| {
        for (part, at) in columns {
            let op = |accumulate| RowsOp::Take { rows, at, accumulate };
            b.send_gradient(node, part, &[dy], op);
        }
    })
}

/// `Flatten`. Values are stored with channels innermost, so an image with several channels and
/// several pixels is transposed. Any other is in order already: its vector is another name for it.
pub(super) fn flatten(b: &mut PlanBuilder<'_>, node: NodeId, x: NodeId) -> EmitBackward {
    let (shape, value) = (b.shape(x), b.node(x));
    if shape.c == 1 || shape.pixels() == 1 {
        b.bind(node, value);
        return Box::new(move |b, dy| b.pass_gradient(node, x, dy));
    }
    let of = Matrices { count: shape.batch, rows: shape.pixels(), columns: shape.c };
    let y = b.output(node);
    b.emit(RowsOp::Transpose { of, accumulate: false }, &[value], &[y]);
    Box::new(move |b, dy| {
        let op = |accumulate| RowsOp::Transpose { of: of.transposed(), accumulate };
        b.send_gradient(node, x, &[dy], op);
    })
}

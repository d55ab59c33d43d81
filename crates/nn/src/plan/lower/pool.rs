//! Max pooling, average pooling and global average pooling.

use crate::graph::{NodeId, NodeOp, PoolGeometry};
use crate::kernels::pool::PoolShape;
use crate::ops::PoolOp;
use crate::plan::builder::{EmitBackward, PlanBuilder, PooledGradient};
use crate::plan::value::ValueId;

/// A max pooling node after its forward step.
#[derive(Clone, Copy)]
struct Pooled {
    node: NodeId,
    x: NodeId,
    shape: PoolShape,
    y: ValueId,
    positions: ValueId,
}

impl Pooled {
    /// Emits the forward step. Backward needs the winners' positions, one byte each except in large
    /// windows, and no values.
    fn forward(b: &mut PlanBuilder<'_>, node: NodeId) -> Option<Self> {
        let NodeOp::MaxPool2d { x, window } = b.graph.nodes[node.index()].op else {
            return None;
        };
        let shape = PoolShape { input: b.shape(x), window };
        let input = b.node(x);
        let y = b.output(node);
        let saved = b.backward() && b.needs_gradient(node);
        let positions = match (saved, shape.is_wide()) {
            (false, _) => ValueId::NONE,
            (true, false) => b.arena_bytes(shape.output().len()),
            (true, true) => b.arena_words(shape.output().len()),
        };
        b.emit(PoolOp::Max(shape), &[input], &[y, positions]);
        Some(Self { node, x, shape, y, positions })
    }

    fn backward(self, b: &mut PlanBuilder<'_>, dy: ValueId) {
        let Self { node, x, shape, positions, .. } = self;
        let op = |accumulate| PoolOp::MaxGradient { shape, accumulate };
        b.send_gradient(node, x, &[dy, positions], op);
    }
}

/// `MaxPool2d`.
pub(super) fn max(b: &mut PlanBuilder<'_>, node: NodeId) -> Option<EmitBackward> {
    let pooled = Pooled::forward(b, node)?;
    Some(Box::new(move |b, dy| pooled.backward(b, dy)))
}

/// `MaxPool2d` after a `StraightThrough`: the module receives its gradient as usual. The norm unit
/// with output `norm_output` receives the gradient of the pooling's output with its codes, and
/// routes it back itself, as if pooling were part of the unit.
pub(super) fn straight_max(
    b: &mut PlanBuilder<'_>,
    node: NodeId,
    norm_output: NodeId,
) -> Option<EmitBackward> {
    let pooled = Pooled::forward(b, node)?;
    Some(Box::new(move |b, dy| {
        let len = pooled.shape.output().len();
        let codes = b.arena_bytes(len);
        b.emit(PoolOp::NormCodes { len }, &[pooled.y, pooled.positions], &[codes]);
        b.give_pooled(norm_output, PooledGradient { dout: dy, codes, out: pooled.y });
        pooled.backward(b, dy);
    }))
}

/// `AvgPool2d`.
pub(super) fn average(
    b: &mut PlanBuilder<'_>,
    node: NodeId,
    x: NodeId,
    window: PoolGeometry,
) -> EmitBackward {
    let shape = PoolShape { input: b.shape(x), window };
    let input = b.node(x);
    let y = b.output(node);
    b.emit(PoolOp::WindowAverage(shape), &[input], &[y]);
    Box::new(move |b, dy| {
        let op = |accumulate| PoolOp::WindowAverageGradient { shape, accumulate };
        b.send_gradient(node, x, &[dy], op);
    })
}

/// `GlobalAvgPool`.
pub(super) fn global_average(b: &mut PlanBuilder<'_>, node: NodeId, x: NodeId) -> EmitBackward {
    let shape = b.shape(x);
    let input = b.node(x);
    let y = b.output(node);
    b.emit(PoolOp::Average(shape), &[input], &[y]);
    Box::new(move |b, dy| {
        let op = |accumulate| PoolOp::AverageGradient { shape, accumulate };
        b.send_gradient(node, x, &[dy], op);
    })
}

//! Dropout.

use meristem_device::DType;

use crate::graph::{DROPOUT_NUMBERS, GroupId, HYPERPARAMETERS, NodeId};
use crate::ops::DropoutOp;
use crate::plan::builder::{EmitBackward, PlanBuilder};
use crate::plan::value::ValueId;
use crate::space::{Space, SpaceSpan};

/// A mask and its application. (Plans without a backward pass have no dropout.)
pub(super) fn dropout(
    b: &mut PlanBuilder<'_>,
    node: NodeId,
    x: NodeId,
    layer: usize,
) -> EmitBackward {
    let (shape, input) = (b.shape(node), b.node(x));
    let (samples, len) = (shape.batch, shape.len());
    let batches = batches(b, b.graph.dropouts[layer].group);
    let (numbers, mask) = (numbers(b, layer), b.arena_bytes(len));
    b.emit(DropoutOp::Draw { samples, each: len / samples }, &[numbers, batches], &[mask]);
    let y = b.output(node);
    b.emit(DropoutOp::Apply { len, accumulate: false }, &[input, mask, numbers], &[y]);
    Box::new(move |b, dy| {
        let op = |accumulate| DropoutOp::Apply { len, accumulate };
        b.send_gradient(node, x, &[dy, mask, numbers], op);
    })
}

/// Emits the count of a batch, after the last use of its masks, so that the next batch has other
/// masks. Only modes with optimisers count: consecutive runs with `PlanMode::Gradient` have the
/// same masks.
pub(in crate::plan) fn count(b: &mut PlanBuilder<'_>) {
    for group in b.graph.groups_with_dropout() {
        let batches = batches(b, group);
        b.emit(DropoutOp::Count, &[], &[batches]);
    }
}

/// Numbers of a layer, after those of the optimisers.
fn numbers(b: &mut PlanBuilder<'_>, layer: usize) -> ValueId {
    let optimisers: usize = b.graph.groups.iter().map(|group| group.optimisers().count()).sum();
    let start = optimisers * HYPERPARAMETERS + layer * DROPOUT_NUMBERS;
    b.fixed(SpaceSpan::new(Space::Hyperparameters, DType::F64, start, DROPOUT_NUMBERS))
}

/// The count of batches of a group.
fn batches(b: &mut PlanBuilder<'_>, group: GroupId) -> ValueId {
    // The layout of a group with a dropout layer has the counter.
    let place = b.layout.dropout[group.index()];
    place.map_or(ValueId::NONE, |place| b.fixed(batches_span(group, place)))
}

/// The count of batches among a group's counters.
pub(crate) fn batches_span(group: GroupId, place: usize) -> SpaceSpan {
    SpaceSpan::new(Space::Counters(group), DType::I64, place, 1)
}

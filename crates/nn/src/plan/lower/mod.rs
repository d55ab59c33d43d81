//! From operations to kernel calls, forward and backward: one file per family.
//!
//! To add an operation: its shape in `graph`, its kernel in `kernels`, and here one function that
//! emits its forward steps (values of [`ops`](crate::ops)) and returns the closure that emits its
//! backward steps.

mod blend;
mod conv;
mod elementwise;
mod lstm;
mod norm;
mod pool;
mod rows;
pub(super) mod stage;
pub(super) mod train;

use super::builder::{Backward, Builder};
use super::fuse::Unit;
use crate::error::Result;
use crate::graph::{NodeId, Op};

/// Emits the forward steps of a unit; what comes back emits its backward steps.
pub(super) fn forward(b: &mut Builder<'_>, unit: &Unit) -> Result<Option<Backward>> {
    match unit {
        Unit::Node(node) => Ok(self::node(b, *node)),
        Unit::Norm(unit) if unit.stage => stage::convolution(b, unit),
        Unit::Norm(unit) => norm::batch_norm(b, unit),
        Unit::StraightPool { pool, norm } => Ok(pool::straight_max(b, *pool, *norm)),
        Unit::Head { pool, linear } => Ok(stage::head(b, *pool, *linear)),
    }
}

fn node(b: &mut Builder<'_>, node: NodeId) -> Option<Backward> {
    let graph = b.graph;
    match graph.nodes[node.index()].op {
        Op::Input(_) | Op::Indices(_) | Op::State(_) => {
            if let Some(value) = b.input(node) {
                b.bind(node, value);
            }
            None
        }
        Op::Conv2d { .. } => conv::conv(b, node),
        // A unit of its own, see `fuse`.
        Op::BatchNorm { .. } => None,
        Op::GroupNorm { .. } => norm::group_norm(b, node),
        Op::Activation(function, x) => Some(elementwise::activation(b, node, x, function)),
        Op::MaxPool2d { .. } => pool::max(b, node),
        Op::GlobalAvgPool(x) => Some(pool::global_average(b, node, x)),
        Op::Embedding { x, table } => Some(rows::embedding(b, node, x, table)),
        Op::Concat(ref parts) => Some(rows::concat(b, node, parts)),
        Op::Lstm { x, keep, state, params } => Some(lstm::lstm(b, node, [x, keep, state], params)),
        Op::Add(x, y) => Some(elementwise::add(b, node, [x, y])),
        Op::ScaleChannels { x, scale, factor } => {
            Some(elementwise::scale_channels(b, node, [x, scale], factor))
        }
        Op::TanhMix { x, y, mix } => Some(blend::tanh_mix(b, node, [x, y], mix)),
        Op::Detach(x) => {
            b.bind(node, b.node(x)); // another name of the value; no gradient
            None
        }
        Op::StraightThrough { host, module } => {
            Some(blend::straight_through(b, node, [host, module]))
        }
        Op::Blend { inputs, mode, alpha } => Some(blend::blend(b, node, mode, alpha, inputs)),
    }
}

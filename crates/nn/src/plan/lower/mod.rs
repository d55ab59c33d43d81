//! Lowers operations to steps, forward and backward: one file per family.
//!
//! To add an operation: its shape in `graph`, its kernel in `kernels`, and here one function that
//! emits its forward steps (values of [`ops`](crate::ops)) and returns the closure that emits its
//! backward steps.

mod blend;
mod conv;
pub(super) mod dropout;
mod elementwise;
pub(super) mod fused;
mod lstm;
mod norm;
mod pool;
mod rows;
pub(super) mod train;

use super::builder::{EmitBackward, PlanBuilder};
use super::fuse::Unit;
use crate::error::Result;
use crate::graph::{NodeId, NodeOp};

/// Emits the forward steps of a unit; the returned closure emits its backward steps.
pub(super) fn forward(b: &mut PlanBuilder<'_>, unit: &Unit) -> Result<Option<EmitBackward>> {
    match unit {
        Unit::Node(node) => Ok(self::node(b, *node)),
        Unit::Norm(unit) if unit.fused_convolution => fused::convolution(b, unit),
        Unit::Norm(unit) => norm::batch_norm(b, unit),
        Unit::StraightPool { pool, norm_output } => Ok(pool::straight_max(b, *pool, *norm_output)),
        Unit::Head { pool, linear } => Ok(fused::head(b, *pool, *linear)),
    }
}

fn node(b: &mut PlanBuilder<'_>, node: NodeId) -> Option<EmitBackward> {
    let graph = b.graph;
    match graph.nodes[node.index()].op {
        NodeOp::Input(_) | NodeOp::Indices(_) | NodeOp::State(_) => {
            if let Some(value) = b.input(node) {
                b.bind(node, value);
            }
            None
        }
        NodeOp::Conv2d { .. } => conv::conv(b, node),
        // Always a unit, see `fuse`.
        NodeOp::BatchNorm { .. } => None,
        NodeOp::GroupNorm { .. } => norm::group_norm(b, node),
        NodeOp::LayerNorm { x, weight, bias, eps } => {
            Some(norm::layer_norm(b, node, x, (weight, Some(bias)), eps))
        }
        NodeOp::RmsNorm { x, weight, eps } => {
            Some(norm::layer_norm(b, node, x, (weight, None), eps))
        }
        NodeOp::Activation(function, x) => Some(elementwise::activation(b, node, x, function)),
        NodeOp::Dropout { x, layer } => Some(dropout::dropout(b, node, x, layer)),
        NodeOp::MaxPool2d { .. } => pool::max(b, node),
        NodeOp::AvgPool2d { x, window } => Some(pool::average(b, node, x, window)),
        NodeOp::GlobalAvgPool(x) => Some(pool::global_average(b, node, x)),
        NodeOp::Embedding { x, table } => Some(rows::embedding(b, node, x, table)),
        NodeOp::Concat(ref parts) => Some(rows::concat(b, node, parts)),
        NodeOp::Flatten(x) => Some(rows::flatten(b, node, x)),
        NodeOp::Lstm { x, keep, state, params } => {
            Some(lstm::lstm(b, node, [x, keep, state], params))
        }
        NodeOp::Add(x, y) => Some(elementwise::add(b, node, [x, y])),
        NodeOp::Multiply(x, y) => Some(elementwise::multiply(b, node, [x, y])),
        NodeOp::ScaleChannels { x, scale, factor } => {
            Some(elementwise::scale_channels(b, node, [x, scale], factor))
        }
        NodeOp::TanhMix { x, y, mix } => Some(blend::tanh_mix(b, node, [x, y], mix)),
        NodeOp::Detach(x) => {
            b.bind(node, b.node(x)); // another name of the value; no gradient
            None
        }
        NodeOp::StraightThrough { host, module } => {
            Some(blend::straight_through(b, node, host, module))
        }
        NodeOp::Blend { inputs, mode, alpha } => Some(blend::blend(b, node, mode, alpha, inputs)),
    }
}

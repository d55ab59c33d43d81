//! Activations, sums, products, channel scaling.

use crate::graph::NodeId;
use crate::ops::elementwise::{ElementwiseOp, UnaryFunction};
use crate::plan::builder::{EmitBackward, PlanBuilder};

/// ReLU, sigmoid and the other functions of one element.
pub(super) fn activation(
    b: &mut PlanBuilder<'_>,
    node: NodeId,
    x: NodeId,
    function: UnaryFunction,
) -> EmitBackward {
    let (input, len) = (b.node(x), b.shape(node).len());
    let y = b.output(node);
    b.emit(ElementwiseOp::Forward { function, len }, &[input], &[y]);
    let saved = if function.saves_input() { input } else { y };
    Box::new(move |b, dy| {
        let op = |accumulate| ElementwiseOp::Gradient { function, len, accumulate };
        b.send_gradient(node, x, &[saved, dy], op);
    })
}

/// Residual sum: its gradient goes to both unchanged.
pub(super) fn add(b: &mut PlanBuilder<'_>, node: NodeId, inputs: [NodeId; 2]) -> EmitBackward {
    let values = inputs.map(|x| b.node(x));
    let len = b.shape(node).len();
    let y = b.output(node);
    b.emit(ElementwiseOp::Add { len }, &values, &[y]);
    Box::new(move |b, dy| inputs.into_iter().for_each(|x| b.pass_gradient(node, x, dy)))
}

/// Product: the gradient of either factor is the other one times the gradient of the product.
pub(super) fn multiply(b: &mut PlanBuilder<'_>, node: NodeId, inputs: [NodeId; 2]) -> EmitBackward {
    let values = inputs.map(|x| b.node(x));
    let len = b.shape(node).len();
    let y = b.output(node);
    b.emit(ElementwiseOp::Product { len, accumulate: false }, &values, &[y]);
    Box::new(move |b, dy| {
        for (x, other) in inputs.into_iter().zip([values[1], values[0]]) {
            let op = |accumulate| ElementwiseOp::Product { len, accumulate };
            b.send_gradient(node, x, &[other, dy], op);
        }
    })
}

/// `factor · x · scale`, one scale per sample and channel.
pub(super) fn scale_channels(
    b: &mut PlanBuilder<'_>,
    node: NodeId,
    inputs: [NodeId; 2],
    factor: f32,
) -> EmitBackward {
    let shape = b.shape(node);
    let [x, scale] = inputs.map(|input| b.node(input));
    let y = b.output(node);
    b.emit(ElementwiseOp::Scale { shape, factor }, &[x, scale], &[y]);
    Box::new(move |b, dy| {
        b.send_gradients(node, inputs, |b, targets| {
            let accumulate = targets.map(|t| t.accumulate);
            let op = ElementwiseOp::ScaleGradient { shape, factor, accumulate };
            b.emit(op, &[x, scale, dy], &targets.map(|t| t.value));
        });
    })
}

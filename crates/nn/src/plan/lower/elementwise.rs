//! Activations, sums, channel scaling.

use crate::graph::{NodeId, Op};
use crate::ops::elementwise::{self, Function};
use crate::plan::builder::{Backward, Builder};

/// ReLU, sigmoid, tanh.
pub(super) fn activation(b: &mut Builder<'_>, node: NodeId) -> Option<Backward> {
    let (x, function) = match b.graph.nodes[node.index()].op {
        Op::Relu(x) => (x, Function::Relu),
        Op::Sigmoid(x) => (x, Function::Sigmoid),
        Op::Tanh(x) => (x, Function::Tanh),
        _ => return None,
    };
    let (input, len) = (b.node(x), b.shape(node).len());
    let y = b.output(node);
    b.emit(elementwise::Op::Forward { function, len }, &[input], &[y]);
    Some(Box::new(move |b, dy| {
        b.send_gradients(node, [x], |b, [dx]| {
            let accumulate = dx.accumulate;
            let op = elementwise::Op::Gradient { function, len, accumulate };
            b.emit(op, &[y, dy], &[dx.value]);
        });
    }))
}

/// Residual sum: its gradient goes to both unchanged.
pub(super) fn add(b: &mut Builder<'_>, node: NodeId, inputs: [NodeId; 2]) -> Backward {
    let values = inputs.map(|x| b.node(x));
    let len = b.shape(node).len();
    let y = b.output(node);
    b.emit(elementwise::Op::Add { len }, &values, &[y]);
    Box::new(move |b, dy| inputs.into_iter().for_each(|x| b.pass_gradient(node, x, dy)))
}

/// `factor · x · scale`, one scale per sample and channel.
pub(super) fn scale_channels(
    b: &mut Builder<'_>,
    node: NodeId,
    inputs: [NodeId; 2],
    factor: f32,
) -> Backward {
    let shape = b.shape(node);
    let [x, scale] = inputs.map(|input| b.node(input));
    let y = b.output(node);
    b.emit(elementwise::Op::Scale { shape, factor }, &[x, scale], &[y]);
    Box::new(move |b, dy| {
        b.send_gradients(node, inputs, |b, targets| {
            let accumulate = targets.map(|t| t.accumulate);
            let op = elementwise::Op::ScaleGradient { shape, factor, accumulate };
            b.emit(op, &[x, scale, dy], &targets.map(|t| t.value));
        });
    })
}

//! Activations, sums, channel scaling.

use crate::graph::{NodeId, Op};
use crate::kernels::elementwise::{self, ScaleChannels};
use crate::kernels::{GradOut, ImageShape};
use crate::plan::builder::{Backward, Builder};
use crate::plan::step::{Call, Context};

use super::wanted;

/// Copies its input, or adds it to what is there.
#[derive(Debug)]
pub(crate) struct Pass {
    pub(crate) accumulate: bool,
}

impl Call for Pass {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([x], [y]) = cx.operands.split();
        elementwise::pass(cx.isa, x, GradOut { values: y, accumulate: self.accumulate });
    }
}

/// A function of one element.
#[derive(Clone, Copy, Debug)]
enum Function {
    Relu,
    Sigmoid,
    Tanh,
}

#[derive(Debug)]
struct Forward(Function);

impl Call for Forward {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([x], [y]) = cx.operands.split();
        match self.0 {
            Function::Relu => elementwise::relu(cx.isa, x, y),
            Function::Sigmoid => elementwise::sigmoid(cx.isa, x, y),
            Function::Tanh => elementwise::tanh(cx.isa, x, y),
        }
    }
}

/// Gradient from the function's output y.
#[derive(Debug)]
struct Gradient {
    function: Function,
    accumulate: bool,
}

impl Call for Gradient {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([y, dy], [dx]) = cx.operands.split();
        let dx = GradOut { values: dx, accumulate: self.accumulate };
        match self.function {
            Function::Relu => elementwise::relu_backward(cx.isa, y, dy, dx),
            Function::Sigmoid => elementwise::sigmoid_backward(cx.isa, y, dy, dx),
            Function::Tanh => elementwise::tanh_backward(cx.isa, y, dy, dx),
        }
    }
}

/// ReLU, sigmoid, tanh.
pub(super) fn activation(b: &mut Builder<'_>, node: NodeId) -> Option<Backward> {
    let (x, function) = match b.graph.nodes[node.index()].op {
        Op::Relu(x) => (x, Function::Relu),
        Op::Sigmoid(x) => (x, Function::Sigmoid),
        Op::Tanh(x) => (x, Function::Tanh),
        _ => return None,
    };
    let input = b.node(x);
    let y = b.output(node);
    b.emit(Forward(function), &[input], &[y]);
    Some(Box::new(move |b, dy| {
        b.send_gradients(node, [x], |b, [dx]| {
            b.emit(Gradient { function, accumulate: dx.accumulate }, &[y, dy], &[dx.value]);
        });
    }))
}

#[derive(Debug)]
struct Add;

impl Call for Add {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([a, b], [y]) = cx.operands.split();
        elementwise::add(cx.isa, a, b, y);
    }
}

/// Residual sum: its gradient goes to both unchanged.
pub(super) fn add(b: &mut Builder<'_>, node: NodeId, inputs: [NodeId; 2]) -> Backward {
    let values = inputs.map(|x| b.node(x));
    let y = b.output(node);
    b.emit(Add, &values, &[y]);
    Box::new(move |b, dy| inputs.into_iter().for_each(|x| b.pass_gradient(node, x, dy)))
}

#[derive(Debug)]
struct Scale {
    shape: ImageShape,
    factor: f32,
}

impl Call for Scale {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([x, scale], [y]) = cx.operands.split();
        elementwise::scale_channels(cx.isa, &self.shape, x, scale, self.factor, y);
    }
}

#[derive(Debug)]
struct ScaleGradient {
    shape: ImageShape,
    factor: f32,
    accumulate: [bool; 2],
}

impl Call for ScaleGradient {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([x, scale, dy], [dx, dscale]) = cx.operands.split();
        let of = ScaleChannels { x, scale, factor: self.factor };
        let dx = wanted(dx, self.accumulate[0]);
        let dscale = wanted(dscale, self.accumulate[1]);
        elementwise::scale_channels_backward(cx.isa, &self.shape, &of, dy, dx, dscale);
    }
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
    b.emit(Scale { shape, factor }, &[x, scale], &[y]);
    Box::new(move |b, dy| {
        b.send_gradients(node, inputs, |b, targets| {
            let accumulate = targets.map(|t| t.accumulate);
            let call = ScaleGradient { shape, factor, accumulate };
            b.emit(call, &[x, scale, dy], &targets.map(|t| t.value));
        });
    })
}

//! 2-d convolutions and linear layers.

use crate::graph::{NodeId, Op, ParamId};
use crate::kernels::conv::ConvShape;
use crate::ops::conv;
use crate::plan::builder::{Backward, Builder};
use crate::plan::value::ValueId;

/// A convolution or linear node: what its steps need to know.
#[derive(Clone, Copy, Debug)]
pub(super) struct Conv {
    node: NodeId,
    x: NodeId,
    weight: ParamId,
    bias: Option<ParamId>,
    shape: ConvShape,
}

impl Conv {
    /// The convolution or linear layer at a node; `None` if there is another operation.
    pub(super) fn at(b: &Builder<'_>, node: NodeId) -> Option<Self> {
        let (x, weight, bias, geometry) = match b.graph.nodes[node.index()].op {
            Op::Conv2d { x, weight, bias, geometry } => (x, weight, bias, Some(geometry)),
            Op::Linear { x, weight, bias } => (x, weight, bias, None),
            _ => return None,
        };
        let (input, output) = (b.shape(x), b.shape(node));
        let shape = match geometry {
            None => ConvShape::linear(b.batch(), input.c, output.c),
            Some(geometry) => ConvShape {
                batch: input.batch,
                in_c: input.c,
                in_h: input.h,
                in_w: input.w,
                out_c: output.c,
                kernel: geometry.kernel,
                stride: geometry.stride,
                padding: geometry.padding,
                groups: geometry.groups,
            },
        };
        Some(Self { node, x, weight, bias, shape })
    }

    /// Emits the forward step; with `stats` (mean and variance) it also gathers those of its
    /// output. Returns the output.
    pub(super) fn forward(self, b: &mut Builder<'_>, stats: Option<[ValueId; 2]>) -> ValueId {
        let reads = [b.node(self.x), b.param(self.weight), b.optional_param(self.bias)];
        let y = b.output(self.node);
        match stats {
            Some([mean, var]) => {
                b.emit(conv::Op::ForwardWithStats(self.shape), &reads, &[y, mean, var]);
            }
            None => b.emit(conv::Op::Forward(self.shape), &reads, &[y]),
        }
        y
    }

    /// Emits the backward steps from the gradient of the output.
    pub(super) fn backward(self, b: &mut Builder<'_>, dy: ValueId) {
        let Self { node, x, weight, bias, shape } = self;
        let to = [b.param_gradient(weight), b.optional_param_gradient(bias)];
        b.emit(conv::Op::WeightGradient(shape), &[b.node(x), dy], &to);
        let w = b.param(weight);
        b.send_gradient([node, x], &[dy, w], |accumulate| conv::Op::DataGradient {
            shape,
            accumulate,
        });
    }
}

/// `Linear`, or `Conv2d` without batch norm behind it.
pub(super) fn conv(b: &mut Builder<'_>, node: NodeId) -> Option<Backward> {
    let conv = Conv::at(b, node)?;
    conv.forward(b, None);
    Some(Box::new(move |b, dy| conv.backward(b, dy)))
}

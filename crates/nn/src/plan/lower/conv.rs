//! 2-d convolution.

use crate::graph::{NodeId, Op, ParamId};
use crate::kernels::conv::ConvShape;
use crate::ops::conv;
use crate::plan::builder::{Backward, Builder};
use crate::plan::value::ValueId;

/// A convolution node: what its steps need to know.
#[derive(Clone, Copy, Debug)]
pub(super) struct Conv {
    node: NodeId,
    x: NodeId,
    weight: ParamId,
    bias: Option<ParamId>,
    pub(super) shape: ConvShape,
}

impl Conv {
    /// The convolution at a node; `None` if there is another operation.
    pub(super) fn at(b: &Builder<'_>, node: NodeId) -> Option<Self> {
        let Op::Conv2d { x, weight, bias, geometry } = b.graph.nodes[node.index()].op else {
            return None;
        };
        let (input, output) = (b.shape(x), b.shape(node));
        let shape = ConvShape {
            batch: input.batch,
            in_c: input.c,
            in_h: input.h,
            in_w: input.w,
            out_c: output.c,
            kernel: geometry.kernel,
            stride: geometry.stride,
            padding: geometry.padding,
            groups: geometry.groups,
        };
        Some(Self { node, x, weight, bias, shape })
    }

    /// Emits the forward step; with `stats` (mean and variance) it also gathers those of its
    /// output. Returns the output.
    pub(super) fn forward(self, b: &mut Builder<'_>, stats: Option<[ValueId; 2]>) -> ValueId {
        let reads = [b.node(self.x), b.param(self.weight), b.optional_param(self.bias)];
        let y = b.output(self.node);
        let scratch = b.scratch(self.shape.scratch_len());
        match stats {
            Some([mean, var]) => {
                let op = conv::Op::ForwardWithStats(self.shape);
                b.emit(op, &reads, &[y, mean, var, scratch]);
            }
            None => b.emit(conv::Op::Forward(self.shape), &reads, &[y, scratch]),
        }
        y
    }

    /// Emits the backward steps from the gradient of the output.
    pub(super) fn backward(self, b: &mut Builder<'_>, dy: ValueId) {
        let shape = self.shape;
        let x = b.node(self.x);
        let dw = b.param_gradient(self.weight);
        let db = b.optional_param_gradient(self.bias);
        let scratch = b.scratch(shape.scratch_len());
        b.emit(conv::Op::WeightGradient(shape), &[x, dy], &[dw, db, scratch]);
        if b.wants(self.x) {
            let w = b.param(self.weight);
            let scratch = b.scratch(shape.scratch_len());
            b.send_gradients(self.node, [self.x], |b, [dx]| {
                let op = conv::Op::DataGradient { shape, accumulate: dx.accumulate };
                b.emit(op, &[dy, w], &[dx.value, scratch]);
            });
        }
    }
}

/// `Conv2d` without batch norm behind it.
pub(super) fn conv2d(b: &mut Builder<'_>, node: NodeId) -> Option<Backward> {
    let conv = Conv::at(b, node)?;
    conv.forward(b, None);
    Some(Box::new(move |b, dy| conv.backward(b, dy)))
}

//! 2-d convolutions; a linear layer is a convolution with a 1×1 kernel.

use crate::graph::{ConvGeometry, NodeId, NodeOp, ParamId, ParamKind};
use crate::kernels::BatchShape;
use crate::kernels::conv::ConvShape;
use crate::ops::ConvOp;
use crate::ops::conv::ConvProduct;
use crate::plan::builder::{EmitBackward, PlanBuilder};
use crate::plan::value::ValueId;

/// A convolution node, as its steps need it.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConvNode {
    pub(super) node: NodeId,
    pub(super) x: NodeId,
    pub(super) weight: ParamId,
    pub(super) bias: Option<ParamId>,
    pub(super) product: ConvProduct,
}

impl ConvNode {
    /// The convolution at a node; `None` if there is another operation.
    pub(super) fn at(b: &PlanBuilder<'_>, node: NodeId) -> Option<Self> {
        let NodeOp::Conv2d { x, weight, bias, geometry } = b.graph.nodes[node.index()].op else {
            return None;
        };
        let ConvGeometry { kernel, stride, padding, groups, dilation } = geometry;
        let BatchShape { batch, h: in_h, w: in_w, c: in_c } = b.shape(x);
        let out_c = b.shape(node).c;
        let shape = match b.graph.params[weight.index()].kind {
            // One image with a pixel for each pixel of each sample: its weight gradient is one sum
            // over all of them.
            ParamKind::LinearWeight => ConvShape::linear(batch * in_h * in_w, in_c, out_c),
            _ => ConvShape {
                batch,
                in_c,
                in_h,
                in_w,
                out_c,
                kernel,
                stride,
                padding,
                groups,
                dilation,
            },
        };
        let product =
            ConvProduct { shape, precision: b.options.precision, tiles: b.options.tiles(&shape) };
        Some(Self { node, x, weight, bias, product })
    }

    /// Emits the forward step; with `stats` (mean and variance) the step also computes the
    /// statistics of its output. Returns the output.
    pub(super) fn forward(self, b: &mut PlanBuilder<'_>, stats: Option<[ValueId; 2]>) -> ValueId {
        let reads = [b.node(self.x), b.param(self.weight), b.optional_param(self.bias)];
        let y = b.output(self.node);
        match stats {
            Some([mean, var]) => {
                b.emit(ConvOp::ForwardWithStats(self.product), &reads, &[y, mean, var]);
            }
            None => b.emit(ConvOp::Forward(self.product), &reads, &[y]),
        }
        y
    }

    /// Emits the backward steps from the gradient of the output.
    pub(super) fn backward(self, b: &mut PlanBuilder<'_>, dy: ValueId) {
        let Self { node, x, weight, bias, product } = self;
        let to = [b.param_gradient(weight), b.optional_param_gradient(bias)];
        let input = b.node_in_backward(x);
        b.emit(ConvOp::WeightGradient(product), &[input, dy], &to);
        let w = b.param(weight);
        b.send_gradient(node, x, &[dy, w], |accumulate| ConvOp::DataGradient {
            product,
            accumulate,
        });
    }
}

/// `Conv2d` that is not part of a batch norm's unit (`fuse`).
pub(super) fn conv(b: &mut PlanBuilder<'_>, node: NodeId) -> Option<EmitBackward> {
    let conv = ConvNode::at(b, node)?;
    conv.forward(b, None);
    Some(Box::new(move |b, dy| conv.backward(b, dy)))
}

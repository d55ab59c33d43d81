//! 2-d convolutions; linear layers are those of 1×1 images.

use crate::graph::{ConvGeometry, NodeId, Op, ParamId, ParamKind};
use crate::kernels::ImageShape;
use crate::kernels::conv::ConvShape;
use crate::ops::conv::{self, Product};
use crate::plan::builder::{Backward, Builder};
use crate::plan::value::ValueId;

/// A convolution node, as its steps need it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Conv {
    pub(super) node: NodeId,
    pub(super) x: NodeId,
    pub(super) weight: ParamId,
    pub(super) bias: Option<ParamId>,
    pub(super) product: Product,
}

impl Conv {
    /// The convolution at a node; `None` if there is another operation.
    pub(super) fn at(b: &Builder<'_>, node: NodeId) -> Option<Self> {
        let Op::Conv2d { x, weight, bias, geometry } = b.graph.nodes[node.index()].op else {
            return None;
        };
        let ConvGeometry { kernel, stride, padding, groups } = geometry;
        let ImageShape { batch, h: in_h, w: in_w, c: in_c } = b.shape(x);
        let out_c = b.shape(node).c;
        let shape = match b.graph.params[weight.index()].kind {
            // One image of a pixel per sample: its weight gradient is one sum over all of them.
            ParamKind::LinearWeight => ConvShape::linear(batch, in_c, out_c),
            _ => ConvShape { batch, in_c, in_h, in_w, out_c, kernel, stride, padding, groups },
        };
        let product =
            Product { shape, precision: b.options.precision, tiles: b.options.tiles(&shape) };
        Some(Self { node, x, weight, bias, product })
    }

    /// Emits the forward step; with `stats` (mean and variance) it also gathers those of its
    /// output. Returns the output.
    pub(super) fn forward(self, b: &mut Builder<'_>, stats: Option<[ValueId; 2]>) -> ValueId {
        let reads = [b.node(self.x), b.param(self.weight), b.optional_param(self.bias)];
        let y = b.output(self.node);
        match stats {
            Some([mean, var]) => {
                b.emit(conv::Op::ForwardWithStats(self.product), &reads, &[y, mean, var]);
            }
            None => b.emit(conv::Op::Forward(self.product), &reads, &[y]),
        }
        y
    }

    /// Emits the backward steps from the gradient of the output.
    pub(super) fn backward(self, b: &mut Builder<'_>, dy: ValueId) {
        let Self { node, x, weight, bias, product } = self;
        let to = [b.param_gradient(weight), b.optional_param_gradient(bias)];
        b.emit(conv::Op::WeightGradient(product), &[b.node(x), dy], &to);
        let w = b.param(weight);
        b.send_gradient([node, x], &[dy, w], |accumulate| conv::Op::DataGradient {
            product,
            accumulate,
        });
    }
}

/// `Conv2d` without batch norm behind it.
pub(super) fn conv(b: &mut Builder<'_>, node: NodeId) -> Option<Backward> {
    let conv = Conv::at(b, node)?;
    conv.forward(b, None);
    Some(Box::new(move |b, dy| conv.backward(b, dy)))
}

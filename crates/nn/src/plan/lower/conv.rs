//! 2-d convolution.

use crate::graph::{NodeId, Op, ParamId};
use crate::kernels::GradOut;
use crate::kernels::conv::{self, ConvInputs, ConvShape, ParamGrads};
use crate::kernels::norm::BatchStats;
use crate::plan::builder::{Backward, Builder};
use crate::plan::step::{Call, Context};
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

    /// Emits the forward step; with `stats` (mean and variance) it also gathers those of its output.
    /// Returns the output.
    pub(super) fn forward(self, b: &mut Builder<'_>, stats: Option<[ValueId; 2]>) -> ValueId {
        let reads = [b.node(self.x), b.param(self.weight), b.optional_param(self.bias)];
        let y = b.output(self.node);
        let scratch = b.scratch(self.shape.scratch_len());
        match stats {
            Some([mean, var]) => {
                b.emit(ForwardWithStats(self.shape), &reads, &[y, mean, var, scratch]);
            }
            None => b.emit(Forward(self.shape), &reads, &[y, scratch]),
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
        b.emit(WeightGradient(shape), &[x, dy], &[dw, db, scratch]);
        if b.wants(self.x) {
            let w = b.param(self.weight);
            let scratch = b.scratch(shape.scratch_len());
            b.send_gradients(self.node, [self.x], |b, [dx]| {
                let call = DataGradient { shape, accumulate: dx.accumulate };
                b.emit(call, &[dy, w], &[dx.value, scratch]);
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

#[derive(Debug)]
struct Forward(ConvShape);

impl Call for Forward {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([x, w, bias], [y, scratch]) = cx.operands.split();
        let of = ConvInputs { x, w, bias: (!bias.is_empty()).then_some(bias) };
        conv::forward(cx.isa, &self.0, &of, y, scratch);
    }
}

#[derive(Debug)]
struct ForwardWithStats(ConvShape);

impl Call for ForwardWithStats {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([x, w, bias], [y, mean, var, scratch]) = cx.operands.split();
        let of = ConvInputs { x, w, bias: (!bias.is_empty()).then_some(bias) };
        conv::forward_with_stats(cx.isa, &self.0, &of, y, BatchStats { mean, var }, scratch);
    }
}

#[derive(Debug)]
struct WeightGradient(ConvShape);

impl Call for WeightGradient {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([x, dy], [dw, db, scratch]) = cx.operands.split();
        let to = ParamGrads { dw, db: (!db.is_empty()).then_some(db) };
        conv::backward_weight(cx.isa, &self.0, x, dy, to, scratch);
    }
}

#[derive(Debug)]
struct DataGradient {
    shape: ConvShape,
    accumulate: bool,
}

impl Call for DataGradient {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([dy, w], [dx, scratch]) = cx.operands.split();
        let dx = GradOut { values: dx, accumulate: self.accumulate };
        conv::backward_data(cx.isa, &self.shape, dy, w, dx, scratch);
    }
}

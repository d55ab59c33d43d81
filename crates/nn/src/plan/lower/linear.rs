//! Linear layers.

use crate::graph::{NodeId, ParamId};
use crate::kernels::GradOut;
use crate::kernels::conv::{ConvInputs, ParamGrads};
use crate::kernels::linear::{self, LinearShape};
use crate::plan::builder::{Backward, Builder};
use crate::plan::step::{Call, Context};

#[derive(Debug)]
struct Forward(LinearShape);

impl Call for Forward {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([x, w, bias], [y, scratch]) = cx.operands.split();
        let of = ConvInputs { x, w, bias: (!bias.is_empty()).then_some(bias) };
        linear::forward(cx.isa, &self.0, &of, y, scratch);
    }
}

/// Gradients of weight and bias from input and output gradient, added.
#[derive(Debug)]
pub(super) struct WeightGradient(pub(super) LinearShape);

impl Call for WeightGradient {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([x, dy], [dw, db, scratch]) = cx.operands.split();
        let to = ParamGrads { dw, db: (!db.is_empty()).then_some(db) };
        linear::backward_weight(cx.isa, &self.0, x, dy, to, scratch);
    }
}

/// Gradient of the input from output gradient and weight.
#[derive(Debug)]
pub(super) struct DataGradient {
    pub(super) shape: LinearShape,
    pub(super) accumulate: bool,
}

impl Call for DataGradient {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([dy, w], [dx, scratch]) = cx.operands.split();
        let dx = GradOut { values: dx, accumulate: self.accumulate };
        linear::backward_data(cx.isa, &self.shape, dy, w, dx, scratch);
    }
}

/// `Linear`.
pub(super) fn linear(
    b: &mut Builder<'_>,
    node: NodeId,
    x: NodeId,
    weight: ParamId,
    bias: Option<ParamId>,
) -> Backward {
    let shape = LinearShape { batch: b.batch(), in_f: b.shape(x).c, out_f: b.shape(node).c };
    let (input, w, bias_value) = (b.node(x), b.param(weight), b.optional_param(bias));
    let y = b.output(node);
    let scratch = b.scratch(shape.scratch_len());
    b.emit(Forward(shape), &[input, w, bias_value], &[y, scratch]);
    Box::new(move |b, dy| {
        let dw = b.param_gradient(weight);
        let db = b.optional_param_gradient(bias);
        let scratch = b.scratch(shape.scratch_len());
        b.emit(WeightGradient(shape), &[input, dy], &[dw, db, scratch]);
        if b.wants(x) {
            let scratch = b.scratch(shape.scratch_len());
            b.send_gradients(node, [x], |b, [dx]| {
                let call = DataGradient { shape, accumulate: dx.accumulate };
                b.emit(call, &[dy, w], &[dx.value, scratch]);
            });
        }
    })
}

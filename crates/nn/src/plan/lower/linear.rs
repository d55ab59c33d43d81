//! Linear layers.

use crate::graph::{NodeId, ParamId};
use crate::kernels::linear::LinearShape;
use crate::ops::linear;
use crate::plan::builder::{Backward, Builder};

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
    b.emit(linear::Op::Forward(shape), &[input, w, bias_value], &[y, scratch]);
    Box::new(move |b, dy| {
        let dw = b.param_gradient(weight);
        let db = b.optional_param_gradient(bias);
        let scratch = b.scratch(shape.scratch_len());
        b.emit(linear::Op::WeightGradient(shape), &[input, dy], &[dw, db, scratch]);
        if b.wants(x) {
            let scratch = b.scratch(shape.scratch_len());
            b.send_gradients(node, [x], |b, [dx]| {
                let op = linear::Op::DataGradient { shape, accumulate: dx.accumulate };
                b.emit(op, &[dy, w], &[dx.value, scratch]);
            });
        }
    })
}

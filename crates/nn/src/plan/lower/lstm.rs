//! LSTM.

use crate::graph::{LstmParams, NodeId};
use crate::kernels::lstm::LstmShape;
use crate::ops::conv::ConvProduct;
use crate::ops::{ConvOp, LstmOp};
use crate::plan::builder::{EmitBackward, PlanBuilder};

/// `Lstm`. Inputs: x, keep, state.
pub(super) fn lstm(
    b: &mut PlanBuilder<'_>,
    node: NodeId,
    inputs: [NodeId; 3],
    params: LstmParams,
) -> EmitBackward {
    let shape = LstmShape {
        steps: b.options.steps,
        sequences: b.options.sequences(),
        inputs: b.shape(inputs[0]).c,
        hidden: b.shape(node).c,
    };
    let [x, keep, state] = inputs.map(|input| b.node(input));
    let LstmParams { weight_ih, weight_hh, bias_ih, bias_hh } = params;
    let [w_ih, w_hh, b_ih, b_hh] =
        [weight_ih, weight_hh, bias_ih, bias_hh].map(|param| b.param(param));
    let precision = b.options.values().precision();
    let h = b.output(node);
    let c = b.arena(shape.rows() * shape.hidden);
    let gates = b.stored(shape.rows() * 4 * shape.hidden);
    let last = b.arena(shape.sequences * 2 * shape.hidden);
    b.last_states.push(last);
    let reads = [x, keep, state, w_ih, w_hh, b_ih, b_hh];
    b.emit(LstmOp::Forward(shape), &reads, &[h, c, gates, last]);
    Box::new(move |b, dh| {
        let dgates = b.stored(shape.rows() * 4 * shape.hidden);
        b.send_gradients(node, [inputs[2]], |b, [dstate]| {
            let op = LstmOp::Gradient { shape, accumulate: dstate.accumulate };
            b.emit(op, &[keep, state, w_hh, c, gates, dh], &[dgates, dstate.value]);
        });
        let before = b.stored(shape.rows() * shape.hidden);
        b.emit(LstmOp::StatesBefore(shape), &[h, keep, state], &[before]);
        for (of, by, weight, bias) in [
            (shape.input_product(), x, weight_ih, bias_ih),
            (shape.state_product(), before, weight_hh, bias_hh),
        ] {
            let to = [weight, bias].map(|param| b.param_gradient(param));
            let product = ConvProduct { precision, ..ConvProduct::f32(of) };
            b.emit(ConvOp::WeightGradient(product), &[by, dgates], &to);
        }
        let product = ConvProduct { precision, ..ConvProduct::f32(shape.input_product()) };
        let op = |accumulate| ConvOp::DataGradient { product, accumulate };
        b.send_gradient(node, inputs[0], &[dgates, w_ih], op);
    })
}

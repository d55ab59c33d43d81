//! LSTM.

use crate::graph::{LstmParams, NodeId};
use crate::kernels::linear::LinearShape;
use crate::kernels::lstm::LstmShape;
use crate::ops::{linear, lstm};
use crate::plan::builder::{Backward, Builder};
use crate::plan::value::ValueId;

/// `Lstm`. Inputs: x, keep, state.
pub(super) fn lstm(
    b: &mut Builder<'_>,
    node: NodeId,
    inputs: [NodeId; 3],
    params: LstmParams,
) -> Backward {
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
    let h = b.output(node);
    let c = b.arena(shape.rows() * shape.hidden);
    let gates = b.arena(shape.rows() * 4 * shape.hidden);
    let last = b.arena(shape.sequences * 2 * shape.hidden);
    b.last_states.push(last);
    let scratch = b.scratch(shape.scratch_len());
    let reads = [x, keep, state, w_ih, w_hh, b_ih, b_hh];
    b.emit(lstm::Op::Forward(shape), &reads, &[h, c, gates, last, scratch]);
    Box::new(move |b, dh| {
        let dgates = b.arena(shape.rows() * 4 * shape.hidden);
        let scratch = b.scratch(shape.scratch_len());
        b.send_gradients(node, [inputs[2]], |b, [dstate]| {
            let op = lstm::Op::Gradient { shape, accumulate: dstate.accumulate };
            let reads = [keep, state, w_hh, c, gates, dh];
            b.emit(op, &reads, &[dgates, dstate.value, scratch]);
        });
        let before = b.arena(shape.rows() * shape.hidden);
        b.emit(lstm::Op::StatesBefore(shape), &[h, keep, state], &[before]);
        for (of, by, weight, bias) in [
            (shape.input_product(), x, weight_ih, bias_ih),
            (shape.state_product(), before, weight_hh, bias_hh),
        ] {
            let to = [b.param_gradient(weight), b.param_gradient(bias)];
            weight_gradient(b, of, [by, dgates], to);
        }
        if b.wants(inputs[0]) {
            let of = shape.input_product();
            let scratch = b.scratch(of.scratch_len());
            b.send_gradients(node, [inputs[0]], |b, [dx]| {
                let op = linear::Op::DataGradient { shape: of, accumulate: dx.accumulate };
                b.emit(op, &[dgates, w_ih], &[dx.value, scratch]);
            });
        }
    })
}

fn weight_gradient(
    b: &mut Builder<'_>,
    shape: LinearShape,
    reads: [ValueId; 2],
    [dw, db]: [ValueId; 2],
) {
    let scratch = b.scratch(shape.scratch_len());
    b.emit(linear::Op::WeightGradient(shape), &reads, &[dw, db, scratch]);
}

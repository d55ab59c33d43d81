//! LSTM.

use crate::graph::{LstmParams, NodeId};
use crate::kernels::linear::LinearShape;
use crate::kernels::lstm::{self, LstmInputs, LstmOutputs, LstmSaved, LstmShape};
use crate::plan::builder::{Backward, Builder};
use crate::plan::step::{Call, Context};
use crate::plan::value::ValueId;

use super::linear::{DataGradient, WeightGradient};
use super::wanted;

#[derive(Debug)]
struct Forward(LstmShape);

impl Call for Forward {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let (reads, [h, c, gates, last, scratch]) = cx.operands.split::<7, 5>();
        let [x, keep, state, weight_ih, weight_hh, bias_ih, bias_hh] = reads;
        let of = LstmInputs { x, keep, state, weight_ih, weight_hh, bias_ih, bias_hh };
        let to = LstmOutputs { h, c, gates, last };
        lstm::forward(cx.isa, &self.0, &of, to, scratch);
    }
}

/// Back through time.
#[derive(Debug)]
struct Gradient {
    shape: LstmShape,
    accumulate: bool,
}

impl Call for Gradient {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let (reads, [dgates, dstate, scratch]) = cx.operands.split::<6, 3>();
        let [keep, state, weight_hh, c, gates, dh] = reads;
        let of = LstmSaved { keep, state, weight_hh, c, gates };
        let dstate = wanted(dstate, self.accumulate);
        lstm::backward(cx.isa, &self.shape, &of, dh, (dgates, dstate), scratch);
    }
}

/// The state h before every step.
#[derive(Debug)]
struct StatesBefore(LstmShape);

impl Call for StatesBefore {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let (reads, [before]) = cx.operands.split::<3, 1>();
        lstm::states_before(cx.isa, &self.0, reads, before);
    }
}

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
    b.emit(Forward(shape), &reads, &[h, c, gates, last, scratch]);
    Box::new(move |b, dh| {
        let dgates = b.arena(shape.rows() * 4 * shape.hidden);
        let scratch = b.scratch(shape.scratch_len());
        b.send_gradients(node, [inputs[2]], |b, [dstate]| {
            let call = Gradient { shape, accumulate: dstate.accumulate };
            let reads = [keep, state, w_hh, c, gates, dh];
            b.emit(call, &reads, &[dgates, dstate.value, scratch]);
        });
        let before = b.arena(shape.rows() * shape.hidden);
        b.emit(StatesBefore(shape), &[h, keep, state], &[before]);
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
                let call = DataGradient { shape: of, accumulate: dx.accumulate };
                b.emit(call, &[dgates, w_ih], &[dx.value, scratch]);
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
    b.emit(WeightGradient(shape), &reads, &[dw, db, scratch]);
}

//! Steps of the LSTM.

use super::operand::{Signature, StepOperands, f32s, scratch, values};
use crate::kernels::lstm::{self, LstmInputs, LstmOutputs, LstmSaved, LstmShape};
use crate::kernels::{GradOut, Isa};

/// The LSTM's forward and backward steps. Linear layers compute the products for the gradients of
/// its weights and of its input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LstmOp {
    /// Reads x, keep, state, both weights, both biases; writes h, c, gates, last state, scratch.
    Forward(LstmShape),
    /// Reads keep, state, the state's weight, c, gates, dh; writes dgates, dstate (optional),
    /// scratch.
    Gradient {
        /// Shape.
        shape: LstmShape,
        /// Add to dstate.
        accumulate: bool,
    },
    /// Reads h, keep, state; writes the h that each step begins with: that of the step before, or
    /// of the state for the first step, times keep.
    StatesBefore(LstmShape),
}

impl LstmOp {
    fn shape(&self) -> &LstmShape {
        match self {
            LstmOp::Forward(shape)
            | LstmOp::Gradient { shape, .. }
            | LstmOp::StatesBefore(shape) => shape,
        }
    }

    pub(super) fn signature(&self) -> Signature {
        let shape = self.shape();
        let [rows, hidden] = [shape.rows(), shape.hidden];
        let (keep, state) = (f32s(rows), f32s(shape.sequences * 2 * hidden));
        let [h, gates] = [hidden, 4 * hidden].map(|width| values(rows * width));
        let c = f32s(rows * hidden);
        let [w_ih, w_hh] =
            [shape.input_product(), shape.state_product()].map(|of| f32s(of.weight_len()));
        let (bias, rest) = (f32s(4 * hidden), scratch(shape.scratch_len()));
        match self {
            LstmOp::Forward(_) => {
                let x = values(rows * shape.inputs);
                let reads = [x, keep, state, w_ih, w_hh, bias, bias];
                Signature::new(&reads, &[h, c, gates, state, rest])
            }
            LstmOp::Gradient { .. } => {
                let reads = [keep, state, w_hh, c, gates, h];
                let dstate = values(state.len).optional();
                Signature::new(&reads, &[gates, dstate, rest])
            }
            LstmOp::StatesBefore(_) => Signature::new(&[h, keep, state], &[h]),
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: StepOperands<'_>) {
        match self {
            LstmOp::Forward(shape) => {
                let (reads, [h, c, gates, last, scratch]) = operands.floats::<7, 5>();
                let [x, keep, state, weight_ih, weight_hh, bias_ih, bias_hh] = reads;
                let of = LstmInputs { x, keep, state, weight_ih, weight_hh, bias_ih, bias_hh };
                let to = LstmOutputs { h, c, gates, last };
                lstm::forward(isa, shape, &of, to, scratch);
            }
            LstmOp::Gradient { shape, accumulate } => {
                let (reads, [dgates, dstate, scratch]) = operands.floats::<6, 3>();
                let [keep, state, weight_hh, c, gates, dh] = reads;
                let of = LstmSaved { keep, state, weight_hh, c, gates, dh };
                let dstate = GradOut { values: dstate, accumulate: *accumulate };
                lstm::backward(isa, shape, &of, dgates, dstate, scratch);
            }
            LstmOp::StatesBefore(shape) => {
                let ([h, keep, state], [before]) = operands.floats::<3, 1>();
                lstm::states_before(isa, shape, h, keep, state, before);
            }
        }
    }
}

//! Steps of linear layers.

use super::operand::{Operands, Signature, f32s, scratch};
use super::{present, present_mut};
use crate::kernels::conv::{ConvInputs, ParamGrads};
use crate::kernels::linear::{self, LinearShape};
use crate::kernels::{GradOut, Isa};

/// A linear layer's forward and backward steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// Reads x, weight, bias (optional); writes y, scratch.
    Forward(LinearShape),
    /// Reads x, dy; adds to dweight and dbias (optional); scratch.
    WeightGradient(LinearShape),
    /// Reads dy, weight; writes dx, scratch.
    DataGradient {
        /// Shape.
        shape: LinearShape,
        /// Add to dx.
        accumulate: bool,
    },
}

impl Op {
    pub(super) fn signature(&self) -> Signature {
        let shape = match self {
            Op::Forward(shape) | Op::WeightGradient(shape) => shape,
            Op::DataGradient { shape, .. } => shape,
        };
        let [x, y] = [shape.in_f, shape.out_f].map(|features| f32s(shape.batch * features));
        let (w, bias) = (f32s(shape.weight_len()), f32s(shape.out_f).optional());
        let rest = scratch(shape.scratch_len());
        match self {
            Op::Forward(_) => Signature::new(&[x, w, bias], &[y, rest]),
            Op::WeightGradient(_) => Signature::new(&[x, y], &[w, bias, rest]),
            Op::DataGradient { .. } => Signature::new(&[y, w], &[x, rest]),
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: Operands<'_>) {
        match self {
            Op::Forward(shape) => {
                let ([x, w, bias], [y, scratch]) = operands.floats();
                let of = ConvInputs { x, w, bias: present(bias) };
                linear::forward(isa, shape, &of, y, scratch);
            }
            Op::WeightGradient(shape) => {
                let ([x, dy], [dw, db, scratch]) = operands.floats();
                let to = ParamGrads { dw, db: present_mut(db) };
                linear::backward_weight(isa, shape, x, dy, to, scratch);
            }
            Op::DataGradient { shape, accumulate } => {
                let ([dy, w], [values, scratch]) = operands.floats();
                let dx = GradOut { values, accumulate: *accumulate };
                linear::backward_data(isa, shape, dy, w, dx, scratch);
            }
        }
    }
}

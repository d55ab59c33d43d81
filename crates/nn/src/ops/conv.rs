//! Steps of 2-d convolution, and of linear layers, whose shape is [`ConvShape::linear`].

use super::operand::{Operands, Signature, f32s, scratch};
use crate::kernels::conv::{self, ConvInputs, ConvShape, ParamGrads};
use crate::kernels::norm::BatchStats;
use crate::kernels::{GradOut, Isa};

/// A convolution's forward and backward steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// Reads x, weight, bias (optional); writes y, scratch.
    Forward(ConvShape),
    /// As [`Op::Forward`], and writes mean and variance of y per channel between y and scratch.
    ForwardWithStats(ConvShape),
    /// Reads x, dy; adds to dweight and dbias (optional); scratch.
    WeightGradient(ConvShape),
    /// Reads dy, weight; writes dx, scratch.
    DataGradient {
        /// Shape.
        shape: ConvShape,
        /// Add to dx.
        accumulate: bool,
    },
}

impl Op {
    fn shape(&self) -> &ConvShape {
        match self {
            Op::Forward(shape) | Op::ForwardWithStats(shape) | Op::WeightGradient(shape) => shape,
            Op::DataGradient { shape, .. } => shape,
        }
    }

    pub(super) fn signature(&self) -> Signature {
        let shape = self.shape();
        let [x, y] = [shape.input(), shape.output()].map(|image| f32s(image.len()));
        let (w, channels) = (f32s(shape.weight_len()), f32s(shape.out_c));
        let (bias, rest) = (channels.optional(), scratch(shape.scratch_len()));
        match self {
            Op::Forward(_) => Signature::new(&[x, w, bias], &[y, rest]),
            Op::ForwardWithStats(_) => {
                Signature::new(&[x, w, bias], &[y, channels, channels, rest])
            }
            Op::WeightGradient(_) => Signature::new(&[x, y], &[w, bias, rest]),
            Op::DataGradient { .. } => Signature::new(&[y, w], &[x, rest]),
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: Operands<'_>) {
        match self {
            Op::Forward(shape) => {
                let ([x, w, bias], [y, scratch]) = operands.floats();
                let of = ConvInputs { x, w, bias };
                conv::forward(isa, shape, &of, y, scratch);
            }
            Op::ForwardWithStats(shape) => {
                let ([x, w, bias], [y, mean, var, scratch]) = operands.floats();
                let of = ConvInputs { x, w, bias };
                let stats = BatchStats { mean, var };
                conv::forward_with_stats(isa, shape, &of, y, stats, scratch);
            }
            Op::WeightGradient(shape) => {
                let ([x, dy], [dw, db, scratch]) = operands.floats();
                let to = ParamGrads { dw, db };
                conv::backward_weight(isa, shape, x, dy, to, scratch);
            }
            Op::DataGradient { shape, accumulate } => {
                let ([dy, w], [values, scratch]) = operands.floats();
                let dx = GradOut { values, accumulate: *accumulate };
                conv::backward_data(isa, shape, dy, w, dx, scratch);
            }
        }
    }
}

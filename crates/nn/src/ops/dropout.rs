//! Steps of dropout: masks are drawn once, and applied forward and backward.
//!
//! A mask is kept until the backward pass, one byte for each element: to draw it again would take
//! several times as long as to read it. Of these steps only [`DropoutOp::Apply`] can be part of a
//! chain (`ops::chain`).

use super::operand::{Signature, StepOperands, f64s, i64s, u8s, values};
use crate::graph::DROPOUT_NUMBERS;
use crate::kernels::dropout::{self, MaskDraw};
use crate::kernels::{GradOut, Isa};

/// Steps of dropout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DropoutOp {
    /// Reads the layer's numbers (f64) and the count of batches (i64); writes the mask (u8): 1
    /// where an element is kept, else 0.
    Draw {
        /// Samples.
        samples: usize,
        /// Elements of a sample.
        each: usize,
    },
    /// Reads x, mask (u8), the layer's numbers (f64); writes `x · scale` where the mask is 1 and 0
    /// elsewhere, or adds it. The gradient is the same step with dy as x.
    Apply {
        /// Elements.
        len: usize,
        /// Add to the output.
        accumulate: bool,
    },
    /// Adds 1 to the count of batches (i64).
    Count,
}

impl DropoutOp {
    pub(super) fn signature(&self) -> Signature {
        let numbers = f64s(DROPOUT_NUMBERS);
        match *self {
            DropoutOp::Draw { samples, each } => {
                Signature::new(&[numbers, i64s(1)], &[u8s(samples * each)])
            }
            DropoutOp::Apply { len, .. } => {
                Signature::new(&[values(len), u8s(len), numbers], &[values(len)])
            }
            DropoutOp::Count => Signature::new(&[], &[i64s(1)]),
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: StepOperands<'_>) {
        match *self {
            DropoutOp::Draw { each, .. } => {
                let ([numbers, batches], [mask]) = operands.split();
                let batch = batches.elements::<i64>()[0] as u64;
                let draw = MaskDraw::from_numbers(numbers.elements(), batch, each);
                dropout::draw(isa, &draw, mask.elements());
            }
            DropoutOp::Apply { accumulate, .. } => {
                let ([x, mask, numbers], [values]) = operands.split();
                let scale = numbers.elements::<f64>()[1] as f32;
                let to = GradOut { values: values.elements(), accumulate };
                dropout::apply(isa, x.elements(), mask.elements(), scale, to);
            }
            DropoutOp::Count => {
                let ([], [batches]) = operands.split();
                batches.elements::<i64>()[0] += 1;
            }
        }
    }
}

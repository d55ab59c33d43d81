//! Steps of max pooling, average pooling and global average pooling.

use super::operand::{Signature, Spec, StepOperands, u8s, u32s, values};
use crate::kernels::norm::batch::BLOCKED;
use crate::kernels::pool::{self, PoolShape};
use crate::kernels::{BatchShape, GradOut, Isa};

/// The poolings' forward and backward steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PoolOp {
    /// Reads x; writes y, and the position of each window's maximum (u8, or u32 for a window with
    /// more positions; optional).
    Max(PoolShape),
    /// Reads dy, positions; writes dx.
    MaxGradient {
        /// Shape.
        shape: PoolShape,
        /// Add to dx.
        accumulate: bool,
    },
    /// Reads y and its positions; writes the codes of the pooled batch norm: a window with a
    /// maximum that ReLU sets to zero passes no gradient.
    NormCodes {
        /// Outputs.
        len: usize,
    },
    /// Reads x; writes the mean of each window; padding counts as zeros.
    WindowAverage(PoolShape),
    /// Reads dy; writes dx.
    WindowAverageGradient {
        /// Shape.
        shape: PoolShape,
        /// Add to dx.
        accumulate: bool,
    },
    /// Reads x; writes the mean of each channel.
    Average(BatchShape),
    /// Reads dy; writes dx.
    AverageGradient {
        /// Shape of x.
        shape: BatchShape,
        /// Add to dx.
        accumulate: bool,
    },
}

/// Positions of the maxima.
fn positions(shape: &PoolShape) -> Spec {
    let len = shape.output().len();
    if shape.is_wide() { u32s(len) } else { u8s(len) }
}

impl PoolOp {
    pub(super) fn signature(&self) -> Signature {
        match *self {
            PoolOp::Max(shape) => {
                let y = shape.output().len();
                Signature::new(
                    &[values(shape.input.len())],
                    &[values(y), positions(&shape).optional()],
                )
            }
            PoolOp::MaxGradient { shape, .. } => {
                let y = shape.output().len();
                Signature::new(&[values(y), positions(&shape)], &[values(shape.input.len())])
            }
            PoolOp::WindowAverage(shape) => {
                Signature::new(&[values(shape.input.len())], &[values(shape.output().len())])
            }
            PoolOp::WindowAverageGradient { shape, .. } => {
                Signature::new(&[values(shape.output().len())], &[values(shape.input.len())])
            }
            PoolOp::NormCodes { len } => Signature::new(&[values(len), u8s(len)], &[u8s(len)]),
            PoolOp::Average(shape) => {
                Signature::new(&[values(shape.len())], &[values(shape.batch * shape.c)])
            }
            PoolOp::AverageGradient { shape, .. } => {
                Signature::new(&[values(shape.batch * shape.c)], &[values(shape.len())])
            }
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: StepOperands<'_>) {
        match self {
            PoolOp::Max(shape) if shape.is_wide() => {
                let ([x], [y, positions]) = operands.split();
                let (x, y) = (x.elements(), y.elements());
                pool::max2d_forward_wide(isa, shape, x, y, positions.elements());
            }
            PoolOp::Max(shape) => {
                let ([x], [y, positions]) = operands.split();
                pool::max2d_forward(isa, shape, x.elements(), y.elements(), positions.elements());
            }
            PoolOp::MaxGradient { shape, accumulate } => {
                let ([dy, positions], [dx]) = operands.split();
                let dx = GradOut { values: dx.elements(), accumulate: *accumulate };
                let dy = dy.elements();
                if shape.is_wide() {
                    pool::max2d_backward_wide(isa, shape, dy, positions.elements(), dx);
                } else {
                    pool::max2d_backward(isa, shape, dy, positions.elements(), dx);
                }
            }
            PoolOp::WindowAverage(shape) => {
                let ([x], [y]) = operands.floats();
                pool::avg2d_forward(isa, shape, x, y);
            }
            PoolOp::WindowAverageGradient { shape, accumulate } => {
                let ([dy], [values]) = operands.floats();
                let dx = GradOut { values, accumulate: *accumulate };
                pool::avg2d_backward(isa, shape, dy, dx);
            }
            PoolOp::NormCodes { .. } => {
                let ([y, positions], [codes]) = operands.split();
                let from = positions.elements::<u8>().iter().zip(y.elements::<f32>());
                for (code, (&k, &y)) in codes.elements::<u8>().iter_mut().zip(from) {
                    *code = if y <= 0.0 { BLOCKED } else { k };
                }
            }
            PoolOp::Average(shape) => {
                let ([x], [y]) = operands.floats();
                pool::global_avg_forward(isa, shape, x, y);
            }
            PoolOp::AverageGradient { shape, accumulate } => {
                let ([dy], [values]) = operands.floats();
                let dx = GradOut { values, accumulate: *accumulate };
                pool::global_avg_backward(isa, shape, dy, dx);
            }
        }
    }
}

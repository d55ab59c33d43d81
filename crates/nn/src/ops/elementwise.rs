//! Steps that go element by element, or scale channels.

use super::operand::{Signature, StepOperands, f32s, values};
pub use crate::kernels::elementwise::UnaryFunction;
use crate::kernels::elementwise::{self, ScaleChannels};
use crate::kernels::{BatchShape, GradOut, Isa, parts};

/// Elementwise forward and backward steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ElementwiseOp {
    /// Writes a constant.
    Fill {
        /// Elements.
        len: usize,
        /// The constant.
        value: f32,
    },
    /// Multiplies its operand by a constant, in place.
    Multiply {
        /// Elements.
        len: usize,
        /// The constant.
        factor: f32,
    },
    /// Reads x; writes y = x, or adds x to it.
    Pass {
        /// Elements.
        len: usize,
        /// Add to y.
        accumulate: bool,
    },
    /// Reads f32; writes them as values.
    Narrow {
        /// Elements.
        len: usize,
    },
    /// Reads values; writes them as f32.
    Widen {
        /// Elements.
        len: usize,
    },
    /// Reads x; writes y = f(x).
    Forward {
        /// f.
        function: UnaryFunction,
        /// Elements.
        len: usize,
    },
    /// Reads y, or x if [`UnaryFunction::saves_input`], and dy; writes dx.
    Gradient {
        /// f.
        function: UnaryFunction,
        /// Elements.
        len: usize,
        /// Add to dx.
        accumulate: bool,
    },
    /// Reads a, b; writes a + b.
    Add {
        /// Elements.
        len: usize,
    },
    /// Reads a, b; writes a · b, or adds it to the output.
    Product {
        /// Elements.
        len: usize,
        /// Add to the output.
        accumulate: bool,
    },
    /// Reads x, and a scale per sample and channel; writes `factor · x · scale`.
    Scale {
        /// Shape of x.
        shape: BatchShape,
        /// Factor.
        factor: f32,
    },
    /// Reads x, scale, dy; writes dx (optional), dscale (optional).
    ScaleGradient {
        /// Shape of x.
        shape: BatchShape,
        /// Factor.
        factor: f32,
        /// Add to dx, to dscale.
        accumulate: [bool; 2],
    },
}

impl ElementwiseOp {
    pub(super) fn signature(&self) -> Signature {
        match *self {
            ElementwiseOp::Fill { len, .. } | ElementwiseOp::Multiply { len, .. } => {
                Signature::new(&[], &[f32s(len)])
            }
            ElementwiseOp::Pass { len, .. } | ElementwiseOp::Forward { len, .. } => {
                Signature::new(&[values(len)], &[values(len)])
            }
            ElementwiseOp::Narrow { len } => Signature::new(&[f32s(len)], &[values(len)]),
            ElementwiseOp::Widen { len } => Signature::new(&[values(len)], &[f32s(len)]),
            ElementwiseOp::Gradient { len, .. }
            | ElementwiseOp::Add { len }
            | ElementwiseOp::Product { len, .. } => {
                Signature::new(&[values(len), values(len)], &[values(len)])
            }
            ElementwiseOp::Scale { shape, .. } => {
                let (x, scale) = (values(shape.len()), values(shape.batch * shape.c));
                Signature::new(&[x, scale], &[x])
            }
            ElementwiseOp::ScaleGradient { shape, .. } => {
                let (x, scale) = (values(shape.len()), values(shape.batch * shape.c));
                Signature::new(&[x, scale, x], &[x.optional(), scale.optional()])
            }
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: StepOperands<'_>) {
        match *self {
            ElementwiseOp::Fill { value, .. } => {
                let ([], [y]) = operands.floats();
                parts::each_alone(y.chunks_mut(parts::elements(y.len())), |y| y.fill(value));
            }
            ElementwiseOp::Multiply { factor, .. } => {
                let ([], [y]) = operands.floats();
                y.iter_mut().for_each(|y| *y *= factor);
            }
            ElementwiseOp::Pass { accumulate, .. } => {
                let ([x], [values]) = operands.floats();
                elementwise::pass(isa, x, GradOut { values, accumulate });
            }
            ElementwiseOp::Narrow { .. } | ElementwiseOp::Widen { .. } => {
                let ([x], [values]) = operands.floats();
                elementwise::pass(isa, x, GradOut { values, accumulate: false });
            }
            ElementwiseOp::Forward { function, .. } => {
                let ([x], [y]) = operands.floats();
                elementwise::apply(isa, function, x, y);
            }
            ElementwiseOp::Gradient { function, accumulate, .. } => {
                let ([saved, dy], [values]) = operands.floats();
                let dx = GradOut { values, accumulate };
                elementwise::apply_backward(isa, function, saved, dy, dx);
            }
            ElementwiseOp::Add { .. } => {
                let ([a, b], [y]) = operands.floats();
                elementwise::add(isa, a, b, y);
            }
            ElementwiseOp::Product { accumulate, .. } => {
                let ([a, b], [values]) = operands.floats();
                elementwise::product(isa, a, b, GradOut { values, accumulate });
            }
            ElementwiseOp::Scale { shape, factor } => {
                let ([x, scale], [y]) = operands.floats();
                elementwise::scale_channels(isa, &shape, x, scale, factor, y);
            }
            ElementwiseOp::ScaleGradient { shape, factor, accumulate } => {
                let ([x, scale, dy], [dx, dscale]) = operands.floats();
                let of = ScaleChannels { x, scale, factor };
                let [dx, dscale] = [
                    GradOut { values: dx, accumulate: accumulate[0] },
                    GradOut { values: dscale, accumulate: accumulate[1] },
                ];
                elementwise::scale_channels_backward(isa, &shape, &of, dy, dx, dscale);
            }
        }
    }
}

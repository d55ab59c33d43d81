//! Steps that combine the outputs of a module and its host.

use super::operand::{Signature, StepOperands, f32s, values};
use crate::kernels::blend::{self, BlendGrads, BlendInputs, BlendMode, TanhMixGrads};
use crate::kernels::{GradOut, Isa};

/// Shape of a blend: host and module have `len` values, for `samples` samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blend {
    /// Formula of the mix.
    pub mode: BlendMode,
    /// Values.
    pub len: usize,
    /// Samples.
    pub samples: usize,
}

/// Blends' forward and backward steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BlendOp {
    /// Reads host, module, the module's input (MULTIPLY), gate (GATE), alpha; writes their blend.
    Forward(Blend),
    /// Reads the operands of [`BlendOp::Forward`], and dy; writes the gradients of host, module,
    /// the module's input and gate (each optional). With ADD, host and module are optional: a
    /// processor does not read them.
    Gradient {
        /// Shape.
        blend: Blend,
        /// Add to each of the four.
        accumulate: [bool; 4],
    },
    /// Reads x, y, s; writes `x + tanh(s)·(y − x)`.
    TanhMix {
        /// Values.
        len: usize,
    },
    /// Reads x, y, s, dout; writes dx, dy (each optional); adds to ds.
    TanhMixGradient {
        /// Values.
        len: usize,
        /// Add to dx, to dy.
        accumulate: [bool; 2],
    },
}

impl Blend {
    /// Host, module, the module's input, gate, alpha.
    fn reads(&self) -> [super::Spec; 5] {
        let Self { mode, len, samples } = *self;
        let input = if mode == BlendMode::Multiply { len } else { 0 };
        let gate = if mode == BlendMode::Gate { samples } else { 0 };
        [values(len), values(len), values(input), values(gate), f32s(1)]
    }
}

impl BlendOp {
    pub(super) fn signature(&self) -> Signature {
        match *self {
            BlendOp::Forward(of) => Signature::new(&of.reads(), &[values(of.len)]),
            BlendOp::Gradient { blend, .. } => {
                let [h, m, x, gate, alpha] = blend.reads();
                let writes = [h, m, x, gate].map(super::Spec::optional);
                let needed = |of: super::Spec| match blend.mode {
                    BlendMode::Add => of.optional(),
                    BlendMode::Multiply | BlendMode::Gate => of,
                };
                Signature::new(&[needed(h), needed(m), x, gate, alpha, h], &writes)
            }
            BlendOp::TanhMix { len } => {
                Signature::new(&[values(len), values(len), f32s(1)], &[values(len)])
            }
            BlendOp::TanhMixGradient { len, .. } => {
                let x = values(len);
                let writes = [x.optional(), x.optional(), f32s(1)];
                Signature::new(&[x, x, f32s(1), x], &writes)
            }
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: StepOperands<'_>) {
        match *self {
            BlendOp::Forward(of) => {
                let ([h, m, x, gate, alpha], [y]) = operands.floats();
                let from = BlendInputs { h, m, x, gate, alpha: alpha[0] };
                blend::forward(isa, of.mode, &from, y);
            }
            BlendOp::Gradient { blend: of, accumulate: [ah, am, ax, ag] } => {
                let ([h, m, x, gate, alpha, dy], [dh, dm, dx, dgate]) = operands.floats();
                let from = BlendInputs { h, m, x, gate, alpha: alpha[0] };
                let to = BlendGrads {
                    h: GradOut { values: dh, accumulate: ah },
                    m: GradOut { values: dm, accumulate: am },
                    x: GradOut { values: dx, accumulate: ax },
                    gate: GradOut { values: dgate, accumulate: ag },
                };
                blend::backward(isa, of.mode, &from, dy, to);
            }
            BlendOp::TanhMix { .. } => {
                let ([x, y, s], [out]) = operands.floats();
                blend::tanh_mix(isa, x, y, s[0], out);
            }
            BlendOp::TanhMixGradient { accumulate, .. } => {
                let ([x, y, s, dout], [dx, dy, ds]) = operands.floats();
                let to = TanhMixGrads {
                    x: GradOut { values: dx, accumulate: accumulate[0] },
                    y: GradOut { values: dy, accumulate: accumulate[1] },
                    s: ds,
                };
                blend::tanh_mix_backward(isa, x, y, s[0], dout, to);
            }
        }
    }
}

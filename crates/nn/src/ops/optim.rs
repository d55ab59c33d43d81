//! Steps that measure, clip and apply the gradient of one parameter group.

use std::ops::Range;

use super::operand::{Signature, StepOperands, f32s, f64s, i64s};
use crate::graph::{HYPERPARAMETERS, OptimiserKind};
use crate::kernels::Isa;
use crate::kernels::optim::{self, AdamConfig, AdamStep, SgdConfig};
use crate::kernels::parts;
use crate::metrics;

/// Least elements of a gradient that is measured in parts: the list of squares is allocated, which
/// only large networks are worth.
const MANY: usize = 750_000;

/// Steps on a group's gradient, which has the layout of the group's parameters.
#[derive(Clone, Debug, PartialEq)]
pub enum OptimOp {
    /// Reads the gradient and the numbers of the optimiser (f64); adds the gradient's norms to the
    /// group's metrics (f64); writes the clip coefficient.
    Measure {
        /// Elements of the group.
        len: usize,
        /// The parameters that have a gradient.
        tensors: Vec<Range<usize>>,
        /// Factor of the clip norm, the L2 norm of the whole gradient above which it is scaled
        /// down.
        norm_factor: f32,
    },
    /// Scales the gradient by the clip coefficient, which becomes 1.
    Clip {
        /// Elements of the group.
        len: usize,
        /// The parameters that have a gradient.
        tensors: Vec<Range<usize>>,
    },
    /// Reads gradient, clip coefficient, and the numbers of the optimiser (f64); updates the
    /// parameters, the optimiser's state, and Adam's count of steps (i64; absent for SGD).
    Update {
        /// Elements of the group.
        len: usize,
        /// The update rule.
        optimiser: OptimiserKind,
        /// Elements to update, in as few ranges as possible. Lanes between two parameters are zero
        /// and stay so.
        runs: Vec<Range<usize>>,
    },
}

impl OptimOp {
    pub(super) fn signature(&self) -> Signature {
        let (OptimOp::Measure { len, .. }
        | OptimOp::Clip { len, .. }
        | OptimOp::Update { len, .. }) = self;
        let (gradient, numbers) = (f32s(*len), f64s(HYPERPARAMETERS));
        match self {
            OptimOp::Measure { .. } => {
                Signature::new(&[gradient, numbers], &[f64s(metrics::GROUP_LEN), f32s(1)])
            }
            OptimOp::Clip { .. } => Signature::new(&[], &[gradient, f32s(1)]),
            OptimOp::Update { optimiser, .. } => {
                let moments = f32s(optimiser.moments() * len);
                let steps = i64s(usize::from(*optimiser == OptimiserKind::Adam));
                Signature::new(&[gradient, f32s(1), numbers], &[gradient, moments, steps])
            }
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: StepOperands<'_>) {
        match self {
            OptimOp::Measure { tensors, norm_factor, .. } => {
                let ([gradient, numbers], [row, clip]) = operands.split();
                let norm_max = numbers.elements::<f64>()[0] as f32 * norm_factor;
                let gradient: &[f32] = gradient.elements();
                let square = |t: &Range<usize>| optim::grad_norm_sq(isa, &gradient[t.clone()]);
                let norm = if gradient.len() < MANY {
                    metrics::add_group(row.elements(), tensors.iter().map(square))
                } else {
                    let mut squares = vec![0.0; tensors.len()];
                    parts::each_alone(tensors.iter().zip(&mut squares), |(t, to)| *to = square(t));
                    metrics::add_group(row.elements(), squares.into_iter())
                };
                clip.elements::<f32>()[0] = optim::clip_coefficient(norm, norm_max);
            }
            OptimOp::Clip { tensors, .. } => {
                let ([], [gradient, clip]) = operands.floats();
                let coefficient = std::mem::replace(&mut clip[0], 1.0);
                for tensor in tensors {
                    gradient[tensor.clone()].iter_mut().for_each(|g| *g *= coefficient);
                }
            }
            OptimOp::Update { optimiser, runs, .. } => {
                let ([gradient, clip, numbers], [values, moments, steps]) = operands.split();
                let numbers: &[f64] = numbers.elements();
                let steps = steps.elements::<i64>().first_mut().map_or(0, |steps| {
                    *steps += 1;
                    *steps
                });
                let (gradient, clip): (&[f32], f32) = (gradient.elements(), clip.elements()[0]);
                let values: &mut [f32] = values.elements();
                let (first, second) = moments.elements().split_at_mut(values.len());
                for run in runs {
                    let (p, g) = (&mut values[run.clone()], &gradient[run.clone()]);
                    let (m, part) = (&mut first[run.clone()], parts::elements(run.len()));
                    let each = p.chunks_mut(part).zip(g.chunks(part)).zip(m.chunks_mut(part));
                    match optimiser {
                        OptimiserKind::Sgd => {
                            let sgd = SgdConfig::from_hyperparameters(numbers);
                            parts::each_alone(each, |((p, g), m)| {
                                optim::sgd_step(isa, &sgd, clip, p, g, m);
                            });
                        }
                        OptimiserKind::Adam => {
                            let adam = AdamConfig::from_hyperparameters(numbers);
                            let step = AdamStep::new(&adam, clip, steps);
                            let squares = second[run.clone()].chunks_mut(part);
                            parts::each_alone(each.zip(squares), |(((p, g), m), v)| {
                                optim::adam_step(isa, &step, p, g, m, v);
                            });
                        }
                    }
                }
            }
        }
    }
}

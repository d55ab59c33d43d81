//! Steps that measure, clip and apply the gradient of one parameter group.

use std::ops::Range;

use super::operand::{Signature, SliceMut, StepOperands, f32s, f64s, i64s, scratch};
use crate::graph::{FromHyperparameters, HYPERPARAMETERS, OptimiserKind};
use crate::kernels::Isa;
use crate::kernels::muon::{self, MuonMatrix, MuonMemory};
use crate::kernels::optim::{self, AdamConfig, AdamStep, LionConfig, MuonConfig, SgdConfig};
use crate::kernels::parts;
use crate::metrics;

/// Least elements of a gradient that is measured in parts: this allocates the list of squares,
/// which pays only for large networks.
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
    /// parameters, the optimiser's state, and the count of steps of each range (i64; absent for an
    /// optimiser that does not count).
    Update {
        /// Elements of the group.
        len: usize,
        /// The update rule.
        optimiser: OptimiserKind,
        /// Elements to update: in as few ranges as possible, or, if the optimiser counts steps, one
        /// range for each parameter of the group, which is empty if the parameter has no gradient,
        /// is one of `matrices`, or belongs to another step of the group. Lanes between two
        /// parameters are zero and stay so.
        runs: Vec<Range<usize>>,
        /// Parameters that Muon updates.
        matrices: Vec<MuonMatrix>,
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
            OptimOp::Update { optimiser, runs, matrices, .. } => {
                let moments = f32s(optimiser.moments() * len);
                let steps = i64s(if optimiser.counts_steps() { runs.len() } else { 0 });
                let writes = [gradient, moments, steps];
                let room = matrices.iter().map(MuonMatrix::scratch_len).max().unwrap_or(0);
                let writes = [&writes[..], &[scratch(room)][..usize::from(room > 0)]].concat();
                Signature::new(&[gradient, f32s(1), numbers], &writes)
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
            OptimOp::Update { optimiser, runs, matrices, .. } => {
                update(isa, (*optimiser, runs, matrices), operands);
            }
        }
    }
}

/// Runs [`OptimOp::Update`] of these ranges and matrices.
fn update(
    isa: Isa,
    (optimiser, runs, matrices): (OptimiserKind, &[Range<usize>], &[MuonMatrix]),
    StepOperands { reads, writes }: StepOperands<'_>,
) {
    let mut writes = writes.into_iter();
    let mut floats = || writes.next().map_or(&mut [][..], SliceMut::elements::<f32>);
    let (values, moments) = (floats(), floats());
    let steps = writes.next().map_or(&mut [][..], SliceMut::elements::<i64>);
    let room = writes.next().map_or(&mut [][..], SliceMut::elements::<f32>);
    let (gradient, clip): (&[f32], f32) = (reads[0].elements(), reads[1].elements()[0]);
    let numbers: &[f64] = reads[2].elements();
    let (first, second) = moments.split_at_mut(values.len());
    for (at, run) in runs.iter().enumerate().filter(|(_, run)| !run.is_empty()) {
        let (p, g) = (&mut values[run.clone()], &gradient[run.clone()]);
        let (m, part) = (&mut first[run.clone()], parts::elements(run.len()));
        let each = p.chunks_mut(part).zip(g.chunks(part)).zip(m.chunks_mut(part));
        match optimiser {
            OptimiserKind::Sgd => {
                let sgd = SgdConfig::from_hyperparameters(numbers);
                parts::each_alone(each, |((p, g), m)| optim::sgd_step(isa, &sgd, clip, p, g, m));
            }
            OptimiserKind::Nesterov => {
                let sgd = SgdConfig::from_hyperparameters(numbers);
                parts::each_alone(each, |((p, g), m)| {
                    optim::nesterov_step(isa, &sgd, clip, p, g, m);
                });
            }
            OptimiserKind::Lion => {
                let lion = LionConfig::from_hyperparameters(numbers);
                parts::each_alone(each, |((p, g), m)| optim::lion_step(isa, &lion, clip, p, g, m));
            }
            OptimiserKind::Adam | OptimiserKind::AdamW | OptimiserKind::Muon => {
                steps[at] += 1;
                let step = adam_step(optimiser, numbers, (clip, steps[at]));
                let squares = second[run.clone()].chunks_mut(part);
                parts::each_alone(each.zip(squares), |(((p, g), m), v)| {
                    optim::adam_step(isa, &step, p, g, m, v);
                });
            }
        }
    }
    let muon = MuonConfig::from_hyperparameters(numbers);
    for matrix in matrices {
        let of = matrix.range();
        let memory = MuonMemory {
            param: &mut values[of.clone()],
            grad: &gradient[of.clone()],
            momentum: &mut first[of],
            scratch: room,
        };
        muon::step(isa, matrix, &muon, clip, memory);
    }
}

/// The step of Adam, of AdamW, or of the AdamW that Muon uses for parameters that are no matrices.
fn adam_step(optimiser: OptimiserKind, numbers: &[f64], (clip, steps): (f32, i64)) -> AdamStep {
    match optimiser {
        OptimiserKind::Adam => {
            AdamStep::new(&AdamConfig::from_hyperparameters(numbers), clip, steps)
        }
        OptimiserKind::Muon => {
            let MuonConfig { others, .. } = MuonConfig::from_hyperparameters(numbers);
            AdamStep::decoupled(&others, clip, steps)
        }
        _ => AdamStep::decoupled(&AdamConfig::from_hyperparameters(numbers), clip, steps),
    }
}

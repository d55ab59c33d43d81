//! Steps of softmax cross-entropy.

use super::operand::{Signature, StepOperands, f32s, f64s, u32s};
use crate::kernels::Isa;
use crate::kernels::loss;
use crate::metrics::{self, BatchResult};

/// Shape of the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logits {
    /// Samples.
    pub batch: usize,
    /// Classes.
    pub classes: usize,
}

/// Loss steps; they add to metrics, see [`Metrics`](crate::Metrics).
#[derive(Clone, Debug, PartialEq)]
pub enum LossOp {
    /// Reads logits, labels (u32); writes the gradient of the batch's mean loss; adds to the
    /// training counts (f64), and puts the mean into the ring of the last batches (f64, may be
    /// empty).
    Train {
        /// Shape.
        logits: Logits,
        /// Capacity of the ring.
        log: usize,
    },
    /// Reads logits, labels (u32); adds loss, hits and samples to rows of the scores (f64). If row
    /// 0 is among them, it writes the losses of the samples; otherwise it reads the losses of row
    /// 0, and adds squares of differences to its rows. Its own losses go to the last operand, which
    /// no step reads.
    Evaluate {
        /// Shape.
        logits: Logits,
        /// The rows, counted from the first that the plan is run with.
        rows: Vec<usize>,
    },
}

impl LossOp {
    pub(super) fn signature(&self) -> Signature {
        let (LossOp::Train { logits, .. } | LossOp::Evaluate { logits, .. }) = self;
        let values = f32s(logits.batch * logits.classes);
        let reads = [values, u32s(logits.batch)];
        match self {
            LossOp::Train { log, .. } => {
                Signature::new(&reads, &[values, f64s(metrics::TRAIN_LEN), f64s(*log)])
            }
            LossOp::Evaluate { rows, .. } => {
                let losses = f32s(logits.batch);
                Signature::new(&reads, &[f64s(metrics::scores_len(rows)), losses, losses])
            }
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: StepOperands<'_>) {
        match self {
            LossOp::Train { logits, .. } => {
                let ([values, targets], [gradient, counts, log]) = operands.split();
                let (values, gradient) = (values.elements(), gradient.elements());
                let given = (values, targets.elements());
                let batch = result(isa, *logits, given, gradient, &mut []);
                metrics::add_train(batch, counts.elements(), log.elements());
            }
            LossOp::Evaluate { logits, rows } => {
                let ([values, targets], [scores, first, own]) = operands.split();
                let given = (values.elements(), targets.elements());
                let (first, own): (&mut [f32], &mut [f32]) = (first.elements(), own.elements());
                let mut batch = result(isa, *logits, given, &mut [], own);
                if rows.contains(&0) {
                    first.copy_from_slice(own)
                } else {
                    batch.squares = squares(first, own)
                }
                let scores = scores.elements();
                rows.iter().for_each(|row| metrics::add_score(batch, *row, scores));
            }
        }
    }
}

fn result(
    isa: Isa,
    logits: Logits,
    (values, targets): (&[f32], &[u32]),
    gradient: &mut [f32],
    losses: &mut [f32],
) -> BatchResult {
    let sums = loss::softmax_cross_entropy(isa, logits.classes, values, targets, gradient, losses);
    let samples = targets.len();
    BatchResult { loss_sum: sums.loss, correct: sums.correct, samples, squares: 0.0 }
}

/// Sum of the squared differences of two lists.
fn squares(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
}

//! Steps of losses.

use super::operand::{Signature, Slice, Spec, StepOperands, f32s, f64s, u32s};
use crate::kernels::Isa;
use crate::kernels::loss::{self, ClassTargets, ElementLoss, Elements};
use crate::metrics::{self, BatchResult};
use crate::score::ScoreSums;

/// Formula of a loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossFormula {
    /// Softmax cross-entropy. Targets: labels, u32.
    CrossEntropy,
    /// Softmax cross-entropy with label smoothing. Targets: labels, u32. A further operand, which
    /// may be absent, has the class weights, f32.
    SmoothedCrossEntropy {
        /// Share of the target that is spread evenly over the classes.
        label_smoothing: f32,
    },
    /// Mean loss of the outputs. Targets: an f32 for each output.
    Elements(ElementLoss),
}

/// Loss of a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchLoss {
    /// Formula.
    pub formula: LossFormula,
    /// Samples.
    pub batch: usize,
    /// Outputs of a sample: classes, labels or numbers.
    pub outputs: usize,
}

impl BatchLoss {
    /// Whether the metrics have [`ScoreSums`].
    pub(crate) fn has_score_sums(&self) -> bool {
        matches!(self.formula, LossFormula::Elements(_))
    }

    /// Operands that are read.
    fn reads(&self) -> Vec<Spec> {
        let (values, labels) = (f32s(self.batch * self.outputs), u32s(self.batch));
        match self.formula {
            LossFormula::CrossEntropy => vec![values, labels],
            LossFormula::SmoothedCrossEntropy { .. } => {
                vec![values, labels, f32s(self.outputs).optional()]
            }
            LossFormula::Elements(_) => vec![values, values],
        }
    }

    /// Whether class weights are an operand.
    pub(crate) fn reads_weights(&self) -> bool {
        matches!(self.formula, LossFormula::SmoothedCrossEntropy { .. })
    }
}

/// Loss steps; they add to metrics, see [`Metrics`](crate::Metrics).
#[derive(Clone, Debug, PartialEq)]
pub enum LossOp {
    /// Reads the network's output, the targets, and class weights if the formula has them; writes
    /// the gradient of the batch's mean loss; adds to the training counts (f64), and puts the mean
    /// into the ring of the last batches (f64, may be empty). A loss with [`ScoreSums`] also adds
    /// to those of training (f64).
    Train {
        /// Loss.
        of: BatchLoss,
        /// Capacity of the ring.
        log: usize,
    },
    /// Reads as [`LossOp::Train`]; adds the sum of the losses and the numbers of correct and of all
    /// samples to rows of the scores (f64), and [`ScoreSums`] if the loss has them. The second
    /// written operand has the samples' losses of row 0: written if row 0 is among `rows`, else
    /// read, and the squared differences from it are added to the rows. The last operand is memory
    /// for this step's losses, which no other step reads.
    Evaluate {
        /// Loss.
        of: BatchLoss,
        /// The rows, counted from the first that the plan is run with.
        rows: Vec<usize>,
    },
}

impl LossOp {
    pub(super) fn signature(&self) -> Signature {
        let (LossOp::Train { of, .. } | LossOp::Evaluate { of, .. }) = self;
        let (reads, score_sums) = (of.reads(), of.has_score_sums());
        match self {
            LossOp::Train { log, .. } => {
                let writes = [reads[0], f64s(metrics::TRAIN_LEN), f64s(*log), f64s(ScoreSums::LEN)];
                Signature::new(&reads, if score_sums { &writes } else { &writes[..3] })
            }
            LossOp::Evaluate { rows, .. } => {
                let losses = f32s(of.batch);
                let scores = f64s(metrics::scores_len(rows, score_sums));
                Signature::new(&reads, &[scores, losses, losses])
            }
        }
    }

    pub(super) fn run(&self, isa: Isa, mut operands: StepOperands<'_>) {
        match self {
            LossOp::Train { of, .. } => {
                let score = of.has_score_sums().then(|| operands.writes.pop()).flatten();
                let reads = LossReads::new(of, &mut operands);
                let ([], [gradient, counts, log]) = operands.split();
                let batch = of.result(isa, reads, gradient.elements(), &mut []);
                metrics::add_train(batch, counts.elements(), log.elements());
                if let Some(score) = score {
                    batch.score.add_to(score.elements());
                }
            }
            LossOp::Evaluate { of, rows } => {
                let reads = LossReads::new(of, &mut operands);
                let ([], [scores, first, own]) = operands.split();
                let (first, own): (&mut [f32], &mut [f32]) = (first.elements(), own.elements());
                let mut batch = of.result(isa, reads, &mut [], own);
                if rows.contains(&0) {
                    first.copy_from_slice(own)
                } else {
                    batch.squares = squares(first, own)
                }
                let (scores, score_sums) = (scores.elements(), of.has_score_sums());
                rows.iter().for_each(|row| metrics::add_score(batch, *row, score_sums, scores));
            }
        }
    }
}

/// Operands that are read.
struct LossReads<'a> {
    values: &'a [f32],
    targets: Slice<'a>,
    /// Class weights, or none.
    weights: &'a [f32],
}

impl<'a> LossReads<'a> {
    /// Takes the read operands from the operands of a step.
    fn new(of: &BatchLoss, operands: &mut StepOperands<'a>) -> Self {
        let mut reads = std::mem::take(&mut operands.reads).into_iter();
        let mut next = || reads.next().expect("an operand of the signature");
        let (values, targets) = (next().elements(), next());
        let weights = if of.reads_weights() { next().elements() } else { &[] };
        Self { values, targets, weights }
    }
}

impl BatchLoss {
    /// Computes the result of the batch. Writes the gradient and the losses of the samples, unless
    /// the slice for them is empty.
    fn result(
        &self,
        isa: Isa,
        LossReads { values, targets, weights }: LossReads<'_>,
        gradient: &mut [f32],
        losses: &mut [f32],
    ) -> BatchResult {
        let (outputs, samples) = (self.outputs, self.batch);
        match self.formula {
            LossFormula::CrossEntropy => {
                let targets = targets.elements();
                let sums =
                    loss::softmax_cross_entropy(isa, outputs, values, targets, gradient, losses);
                let (loss_sum, correct) = (sums.loss, sums.correct);
                BatchResult { loss_sum, correct, samples, ..BatchResult::default() }
            }
            LossFormula::SmoothedCrossEntropy { label_smoothing } => {
                let of = ClassTargets { classes: outputs, label_smoothing, weights };
                let targets = targets.elements();
                let sums = loss::smoothed_cross_entropy(isa, of, values, targets, gradient, losses);
                let (loss_sum, correct) = (sums.loss, sums.correct);
                BatchResult { loss_sum, correct, samples, ..BatchResult::default() }
            }
            LossFormula::Elements(loss) => {
                let (targets, of) = (targets.elements(), Elements { loss, outputs });
                let sums = loss::element_loss(isa, of, values, targets, gradient, losses);
                let score = ScoreSums {
                    true_positives: sums.true_positives,
                    false_positives: sums.false_positives,
                    false_negatives: sums.false_negatives,
                    residual_squares: sums.residual_squares,
                };
                BatchResult { loss_sum: sums.loss, samples, score, ..BatchResult::default() }
            }
        }
    }
}

/// Sum of the squared differences of two lists.
fn squares(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
}

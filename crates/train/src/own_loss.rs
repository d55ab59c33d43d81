//! Loss that the program computes: calls of its function, and the sums and gradients of its
//! results.
//!
//! Outputs and targets are read from the device once. The program's arrays share that memory. All
//! sums are on the host, in f64 and in the order of the samples, so that the results do not depend
//! on the number of workers.

use std::sync::Arc;
use std::time::Instant;

use meristem_data::Dataset;
use meristem_device::{Owner, Tensor};
use meristem_nn::{EvalMetrics, Metrics, Network, ScoreSums};

use crate::config::types::TaskKind;
use crate::error::Result;
use crate::external::{LossBatch, LossTargets, OwnLoss};
use crate::record::summary::OwnLossTotals;

/// The program's loss, with the cost of its calls.
pub(crate) struct ProgramLoss {
    function: Box<dyn OwnLoss>,
    /// Task of the run, which determines the kind of the targets.
    task: TaskKind,
    /// Cost of the calls since the cost was last taken for the totals of a step.
    pub(crate) cost: OwnLossTotals,
}

/// Losses of a batch.
pub(crate) struct BatchLosses {
    /// Loss of each sample.
    pub(crate) losses: Vec<f32>,
    /// Derivative of the mean loss with respect to the outputs, `[samples][width]`; empty in an
    /// evaluation.
    pub(crate) gradient: Vec<f32>,
    /// Sums over the samples.
    pub(crate) sums: EvalMetrics,
}

impl ProgramLoss {
    /// The program's loss in a run with this task, which is not [`TaskKind::Auto`].
    pub(crate) fn new(function: Box<dyn OwnLoss>, task: TaskKind) -> Self {
        Self { function, task, cost: OwnLossTotals::default() }
    }

    /// Reads targets u32 `[samples]` or f32 `[samples, width]`. Waits for them.
    ///
    /// # Errors
    /// A device failure.
    pub(crate) fn targets(&self, targets: &Tensor) -> Result<LossTargets> {
        Ok(match self.task {
            TaskKind::Multilabel | TaskKind::Regress => {
                LossTargets::Numbers(Arc::new(targets.to_vec()?))
            }
            TaskKind::Auto | TaskKind::Classify => {
                LossTargets::Classes(Arc::new(targets.to_vec()?))
            }
        })
    }

    /// Losses of outputs f32 `[samples, width]`, in training with their gradient. Waits for the
    /// outputs.
    ///
    /// # Errors
    /// A device failure, a failure of the function.
    pub(crate) fn compute(
        &mut self,
        outputs: &Tensor,
        targets: &LossTargets,
        in_training: bool,
    ) -> Result<BatchLosses> {
        let (samples, width) = (outputs.dims()[0], outputs.dims()[1]);
        let outputs = Arc::new(outputs.to_vec()?);
        self.call(&LossBatch { samples, width, outputs, targets: targets.clone() }, in_training)
    }

    fn call(&mut self, batch: &LossBatch, in_training: bool) -> Result<BatchLosses> {
        // Before the call, because an array of the program shares the memory of the outputs.
        let (correct, sums) = score(self.task, batch);
        let started = Instant::now();
        let mut losses = vec![0.0; batch.samples];
        let mut gradient = vec![0.0; if in_training { batch.outputs.len() } else { 0 }];
        let wanted = in_training.then_some(&mut gradient[..]);
        self.function.compute(batch, &mut losses, wanted)?;
        self.cost.calls += 1;
        self.cost.samples += batch.samples as u64;
        self.cost.seconds += started.elapsed().as_secs_f64();
        let mean = 1.0 / batch.samples as f32;
        gradient.iter_mut().for_each(|slope| *slope *= mean);
        let loss_sum = losses.iter().map(|loss| f64::from(*loss)).sum();
        let samples = batch.samples as u64;
        let sums = EvalMetrics { loss_sum, correct, samples, squares: 0.0, sums };
        Ok(BatchLosses { losses, gradient, sums })
    }

    /// The loss of guessing: the mean loss over the training split of outputs that are all 0, in
    /// batches of `batch` samples. Waits for the targets.
    ///
    /// # Errors
    /// A device failure, a failure of the function.
    pub(crate) fn guessing(&mut self, train: &Dataset, batch: usize) -> Result<f64> {
        let width = train.info().classes.len();
        let targets = self.targets(train.targets())?;
        let all = match &targets {
            LossTargets::Classes(all) => all.len(),
            LossTargets::Numbers(all) => all.len() / width.max(1),
        };
        let mut sum = 0.0;
        for start in (0..all).step_by(batch) {
            let samples = batch.min(all - start);
            let part = match &targets {
                LossTargets::Classes(all) => {
                    LossTargets::Classes(Arc::new(all[start..start + samples].to_vec()))
                }
                LossTargets::Numbers(all) => {
                    let part = &all[start * width..(start + samples) * width];
                    LossTargets::Numbers(Arc::new(part.to_vec()))
                }
            };
            let outputs = Arc::new(vec![0.0; samples * width]);
            let batch = LossBatch { samples, width, outputs, targets: part };
            sum += self.call(&batch, false)?.sums.loss_sum;
        }
        // The reported cost covers steps only, so that it does not depend on how often a run was
        // resumed.
        self.cost = OwnLossTotals::default();
        Ok(sum / all.max(1) as f64)
    }
}

/// The backward pass after the forward pass with these outputs. The gradient is of the batch's mean
/// loss times `weight`. Returns the sums over the samples. Waits for outputs and targets.
///
/// # Errors
/// A device failure, a failure of the function.
pub(crate) fn backward(
    loss: &mut ProgramLoss,
    network: &mut Network,
    outputs: &Tensor,
    targets: &Tensor,
    weight: f32,
) -> Result<EvalMetrics> {
    let targets = loss.targets(targets)?;
    let BatchLosses { mut gradient, sums, .. } = loss.compute(outputs, &targets, true)?;
    if weight != 1.0 {
        gradient.iter_mut().for_each(|slope| *slope *= weight);
    }
    let shape = outputs.shape();
    let gradient = Tensor::from_slice(network.stream(), &gradient, shape, Owner::Batches)?;
    network.backward(&gradient)?;
    Ok(sums)
}

/// Hits and sums of the score of a batch, as the kernels of the built-in losses count them.
fn score(task: TaskKind, batch: &LossBatch) -> (u64, ScoreSums) {
    let mut sums = ScoreSums::default();
    match &batch.targets {
        LossTargets::Classes(classes) => {
            let rows = batch.outputs.chunks_exact(batch.width).zip(classes.iter());
            let hits = rows.filter(|(row, class)| largest(row) == **class as usize).count();
            (hits as u64, sums)
        }
        LossTargets::Numbers(targets) => {
            for (&output, &target) in batch.outputs.iter().zip(targets.iter()) {
                if task == TaskKind::Multilabel {
                    let (present, predicted) = (target > 0.5, output > 0.0);
                    sums.true_positives += u64::from(present && predicted);
                    sums.false_positives += u64::from(!present && predicted);
                    sums.false_negatives += u64::from(present && !predicted);
                } else {
                    let difference = f64::from(output) - f64::from(target);
                    sums.residual_squares += difference * difference;
                }
            }
            (0, sums)
        }
    }
}

/// Index of the first largest element; a NaN counts as largest.
fn largest(values: &[f32]) -> usize {
    let mut best = 0;
    for (i, value) in values.iter().enumerate() {
        if *value > values[best] || (value.is_nan() && !values[best].is_nan()) {
            best = i;
        }
    }
    best
}

/// Results of a network's batches since its metrics were reset. They are in host memory only.
#[derive(Default)]
pub(crate) struct OwnResults {
    /// Sums over the training samples.
    train: EvalMetrics,
    /// Training steps.
    steps: u64,
    /// Mean losses of the last batches, oldest first.
    batch_losses: Vec<f64>,
    /// Sums of each row of the alphas that was evaluated.
    rows: Vec<EvalMetrics>,
}

impl OwnResults {
    /// Adds a batch of training; keeps the mean losses of the last `log` batches.
    pub(crate) fn add_training(&mut self, batch: &EvalMetrics, log: usize) {
        add(&mut self.train, batch);
        self.steps += 1;
        self.batch_losses.push(batch.loss_sum / batch.samples as f64);
        let over = self.batch_losses.len().saturating_sub(log);
        self.batch_losses.drain(..over);
    }

    /// Adds a batch that was evaluated with a row of the alphas.
    pub(crate) fn add_evaluation(&mut self, row: usize, batch: &EvalMetrics) {
        if self.rows.len() <= row {
            self.rows.resize(row + 1, EvalMetrics::default());
        }
        add(&mut self.rows[row], batch);
    }

    /// Adds the results to the metrics of the network, which has none of its own for such batches.
    pub(crate) fn add_to(&self, metrics: &mut Metrics) {
        metrics.loss_sum += self.train.loss_sum;
        metrics.correct += self.train.correct;
        metrics.samples += self.train.samples;
        metrics.sums += self.train.sums;
        metrics.steps += self.steps;
        metrics.batch_losses.extend(&self.batch_losses);
        for (to, row) in metrics.eval.iter_mut().zip(&self.rows) {
            add(to, row);
        }
    }
}

fn add(to: &mut EvalMetrics, batch: &EvalMetrics) {
    to.loss_sum += batch.loss_sum;
    to.correct += batch.correct;
    to.samples += batch.samples;
    to.squares += batch.squares;
    to.sums += batch.sums;
}

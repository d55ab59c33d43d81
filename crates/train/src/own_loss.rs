//! Loss that the program computes: calls of its function, and the sums and gradients of its
//! results.
//!
//! Outputs and targets are read from the device once. The program's arrays share that memory, or,
//! for a function that asks for it, the memory of the device. All sums are on the host, in f64 and
//! in the order of the samples, so that the results do not depend on the number of workers.

use std::sync::Arc;
use std::time::Instant;

use meristem_data::Dataset;
use meristem_device::{DType, Owner, Tensor};
use meristem_nn::{EvalMetrics, Metrics, Network, ScoreSums};

use crate::config::types::TaskKind;
use crate::error::Result;
use crate::external::{DeviceLossBatch, LossBatch, LossTargets, OwnLoss};
use crate::record::summary::OwnLossTotals;

/// The program's loss, with the cost of its calls.
pub(crate) struct ProgramLoss {
    function: Box<dyn OwnLoss>,
    /// Task of the run, which determines the kind of the targets.
    task: TaskKind,
    /// Cost of the calls since the cost was last taken for the totals of a step.
    pub(crate) cost: OwnLossTotals,
}

/// Targets of a batch, on the host and on the device.
pub(crate) struct BatchTargets {
    read: LossTargets,
    tensor: Tensor,
}

/// Losses of a batch.
pub(crate) struct BatchLosses {
    /// Loss of each sample.
    pub(crate) losses: Vec<f32>,
    /// Derivative of the mean loss with respect to the outputs, times the weight of the batch, f32
    /// `[samples, width]`; `None` in an evaluation.
    gradient: Option<Tensor>,
    /// Sums over the samples.
    pub(crate) sums: EvalMetrics,
}

impl ProgramLoss {
    /// The program's loss in a run with this task, which is not [`TaskKind::Auto`].
    pub(crate) fn new(function: Box<dyn OwnLoss>, task: TaskKind) -> Self {
        Self { function, task, cost: OwnLossTotals::default() }
    }

    /// Whether the function gets arrays on the device.
    pub(crate) fn is_on_device(&self) -> bool {
        self.function.is_on_device()
    }

    /// Reads targets u32 `[samples]` or f32 `[samples, width]`. Waits for them.
    ///
    /// # Errors
    /// A device failure.
    pub(crate) fn targets(&self, targets: &Tensor) -> Result<BatchTargets> {
        let read = match self.task {
            TaskKind::Multilabel | TaskKind::Regress => {
                LossTargets::Numbers(Arc::new(targets.to_vec()?))
            }
            TaskKind::Auto | TaskKind::Classify => {
                LossTargets::Classes(Arc::new(targets.to_vec()?))
            }
        };
        Ok(BatchTargets { read, tensor: targets.clone() })
    }

    /// Losses of outputs f32 `[samples, width]`, in training with the gradient of their mean times
    /// `weight`. Waits for the outputs.
    ///
    /// # Errors
    /// A device failure, a failure of the function.
    pub(crate) fn compute(
        &mut self,
        outputs: &Tensor,
        targets: &BatchTargets,
        weight: Option<f32>,
    ) -> Result<BatchLosses> {
        let (samples, width) = (outputs.dims()[0], outputs.dims()[1]);
        let read = Arc::new(outputs.to_vec()?);
        let batch = LossBatch { samples, width, outputs: read, targets: targets.read.clone() };
        // Before the call, because an array of the program shares the memory of the outputs.
        let (correct, sums) = score(self.task, &batch);
        let started = Instant::now();
        let mut losses = vec![0.0; samples];
        let gradient = if self.function.is_on_device() {
            self.call_on_device(outputs, targets, &mut losses, weight)?
        } else {
            let shape = outputs.shape();
            let gradient = self.call(&batch, &mut losses, weight)?;
            let upload = |gradient: Vec<f32>| {
                Tensor::from_slice(outputs.stream(), &gradient, shape, Owner::Batches)
            };
            gradient.map(upload).transpose()?
        };
        self.cost.calls += 1;
        self.cost.samples += samples as u64;
        self.cost.seconds += started.elapsed().as_secs_f64();
        let loss_sum = losses.iter().map(|loss| f64::from(*loss)).sum();
        let samples = samples as u64;
        let sums = EvalMetrics { loss_sum, correct, samples, squares: 0.0, sums };
        Ok(BatchLosses { losses, gradient, sums })
    }

    /// Calls a function of arrays in host memory.
    fn call(
        &mut self,
        batch: &LossBatch,
        losses: &mut [f32],
        weight: Option<f32>,
    ) -> Result<Option<Vec<f32>>> {
        let Some(weight) = weight else {
            self.function.compute(batch, losses, None)?;
            return Ok(None);
        };
        let mut gradient = vec![0.0; batch.outputs.len()];
        self.function.compute(batch, losses, Some(&mut gradient))?;
        let mean = 1.0 / batch.samples as f32;
        gradient.iter_mut().for_each(|slope| *slope *= mean);
        if weight != 1.0 {
            gradient.iter_mut().for_each(|slope| *slope *= weight);
        }
        Ok(Some(gradient))
    }

    /// Calls a function of arrays on the device.
    fn call_on_device(
        &mut self,
        outputs: &Tensor,
        targets: &BatchTargets,
        losses: &mut [f32],
        weight: Option<f32>,
    ) -> Result<Option<Tensor>> {
        let samples = outputs.dims()[0];
        let factor = weight.unwrap_or(1.0) / samples as f32;
        let batch = DeviceLossBatch { outputs, targets: &targets.tensor, factor };
        let empty =
            |_| Tensor::empty(outputs.stream(), outputs.shape(), DType::F32, Owner::Batches);
        let gradient = weight.map(empty).transpose()?;
        self.function.compute_on_device(&batch, losses, gradient.as_ref())?;
        Ok(gradient)
    }

    /// The loss of guessing: the mean loss over the training split of outputs that are all 0, in
    /// batches of `batch` samples. Waits for the targets.
    ///
    /// # Errors
    /// A device failure, a failure of the function.
    pub(crate) fn guessing(&mut self, train: &Dataset, batch: usize) -> Result<f64> {
        let width = train.info().classes.len();
        let targets = self.targets(train.targets())?;
        let all = train.targets().dims()[0];
        let mut sum = 0.0;
        for start in (0..all).step_by(batch) {
            let samples = batch.min(all - start);
            let mut losses = vec![0.0; samples];
            if self.function.is_on_device() {
                let (shape, tensor) = ([samples, width], train.targets());
                let outputs = Tensor::zeros(tensor.stream(), shape, DType::F32, Owner::Batches)?;
                let part = match targets.read {
                    LossTargets::Classes(_) => tensor.view(start, [samples])?,
                    LossTargets::Numbers(_) => tensor.view(start * width, shape)?,
                };
                let part = BatchTargets { read: targets.read.clone(), tensor: part };
                self.call_on_device(&outputs, &part, &mut losses, None)?;
            } else {
                let part = match &targets.read {
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
                self.call(&batch, &mut losses, None)?;
            }
            sum += losses.iter().map(|loss| f64::from(*loss)).sum::<f64>();
        }
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
    let BatchLosses { gradient, sums, .. } = loss.compute(outputs, &targets, Some(weight))?;
    if let Some(gradient) = gradient {
        network.backward(&gradient)?;
    }
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
    /// Number of training batches.
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

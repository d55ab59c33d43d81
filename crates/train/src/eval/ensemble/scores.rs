//! Scores of each network of an ensemble and of the mean of their predictions, summed sample by
//! sample.

use std::collections::BTreeSet;

use meristem_data::{DatasetInfo, TargetKind};
use meristem_device::Tensor;
use meristem_nn::Score;

use super::choice::selection_score;
use super::{EnsembleConfig, EnsembleEnv, EnsembleReport};
use crate::error::Result;
use crate::eval::calibration::{ClassPrediction, Quality, Tally};
use crate::record::summary::{EnvSummary, Summary};

/// Scores of each network of an ensemble and of the mean of their predictions, summed sample by
/// sample.
pub(super) struct EnsembleScores {
    targets: TargetKind,
    /// Outputs of a network.
    outputs: usize,
    score: Score,
    singles: Vec<Tally>,
    mean: Tally,
}

impl EnsembleScores {
    pub(super) fn new(info: &DatasetInfo, score: Score, networks: usize) -> Self {
        let singles = vec![Tally::default(); networks];
        let (targets, outputs) = (info.targets, info.classes.len());
        Self { targets, outputs, score, singles, mean: Tally::default() }
    }

    /// Adds a batch: outputs f32 `[samples, outputs]` of each network, and targets u32 `[samples]`
    /// or f32 `[samples, outputs]`. Waits for the targets.
    pub(super) fn add(&mut self, outputs: &[Vec<f32>], targets: &Tensor) -> Result<()> {
        let width = self.outputs;
        let row = |sample: usize| sample * width..(sample + 1) * width;
        if self.targets == TargetKind::Classes {
            for (sample, target) in targets.to_vec::<u32>()?.into_iter().enumerate() {
                let rows: Vec<&[f32]> = outputs.iter().map(|own| &own[row(sample)]).collect();
                self.add_classes(&rows, target as usize);
            }
            return Ok(());
        }
        let values = targets.to_vec::<f32>()?;
        for (sample, targets) in values.chunks_exact(width).enumerate() {
            self.singles.iter_mut().chain([&mut self.mean]).for_each(Tally::begin_sample);
            for (output, target) in targets.iter().enumerate() {
                let place = sample * width + output;
                let own: Vec<f64> = outputs.iter().map(|own| f64::from(own[place])).collect();
                match self.targets {
                    TargetKind::Labels => self.add_label(&own, *target > 0.5),
                    _ => self.add_number(&own, f64::from(*target)),
                }
            }
        }
        Ok(())
    }

    /// Adds the logits of a sample.
    fn add_classes(&mut self, rows: &[&[f32]], target: usize) {
        let mut mean = vec![0.0; self.outputs];
        let mut of_target = vec![];
        for (logits, tally) in rows.iter().zip(&mut self.singles) {
            let logits: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
            let predicted = argmax(&logits);
            let max = logits[predicted];
            let ln_sum = logits.iter().map(|logit| (logit - max).exp()).sum::<f64>().ln();
            let ln_probability = |logit: f64| logit - max - ln_sum;
            mean.iter_mut().zip(&logits).for_each(|(sum, own)| *sum += ln_probability(*own).exp());
            let ln_target = ln_probability(logits[target]);
            of_target.push(ln_target);
            let confidence = ln_probability(max).exp();
            tally.begin_sample();
            tally.add_class(ClassPrediction {
                confidence,
                correct: predicted == target,
                ln_target,
            });
        }
        mean.iter_mut().for_each(|sum| *sum /= rows.len() as f64);
        let predicted = argmax(&mean);
        let confidence = mean[predicted];
        let ln_target = ln_mean_exp(&of_target);
        self.mean.begin_sample();
        self.mean.add_class(ClassPrediction {
            confidence,
            correct: predicted == target,
            ln_target,
        });
    }

    /// Adds the logits of a label.
    fn add_label(&mut self, logits: &[f64], present: bool) {
        // ln sigmoid(z), without overflow.
        let ln_sigmoid = |z: f64| z.min(0.0) - (-z.abs()).exp().ln_1p();
        let mut of_target = vec![];
        let mut sum = 0.0;
        for (&logit, tally) in logits.iter().zip(&mut self.singles) {
            let ln_target = ln_sigmoid(if present { logit } else { -logit });
            of_target.push(ln_target);
            sum += ln_sigmoid(logit).exp();
            let confidence = ln_sigmoid(logit.abs()).exp();
            let correct = (logit > 0.0) == present;
            tally.add_label(ClassPrediction { confidence, correct, ln_target }, present);
        }
        let probability = sum / logits.len() as f64;
        let confidence = if probability > 0.5 { probability } else { 1.0 - probability };
        let correct = (probability > 0.5) == present;
        let ln_target = ln_mean_exp(&of_target);
        self.mean.add_label(ClassPrediction { confidence, correct, ln_target }, present);
    }

    /// Adds the predictions of a number.
    fn add_number(&mut self, predicted: &[f64], target: f64) {
        for (own, tally) in predicted.iter().zip(&mut self.singles) {
            tally.add_number(*own, target);
        }
        let mean = predicted.iter().sum::<f64>() / predicted.len() as f64;
        self.mean.add_number(mean, target);
    }

    pub(super) fn report(
        &self,
        config: &EnsembleConfig,
        envs: &[&EnvSummary],
        summary: &Summary,
        samples: u64,
    ) -> EnsembleReport {
        let single = |(env, tally): (&&EnvSummary, &Tally)| EnsembleEnv {
            env: env.env,
            member_number: env.member_number,
            member: env.member.clone(),
            control_score: env.control_score,
            quality: tally.quality(self.score),
        };
        let found: Vec<EnsembleEnv> = envs.iter().zip(&self.singles).map(single).collect();
        let ranks: Vec<f64> = envs.iter().map(|env| selection_score(env)).collect();
        let qualities: Vec<Quality> = found.iter().map(|env| env.quality).collect();
        let numbers: BTreeSet<usize> = envs.iter().map(|env| env.env).collect();
        let all = summary.envs.iter().map(|env| env.env);
        EnsembleReport {
            split: config.split,
            samples,
            score_kind: self.score.kind(),
            ensemble: self.mean.quality(self.score),
            best: found[argmax(&ranks)].clone(),
            mean_of_singles: Quality::mean(&qualities),
            envs: found,
            left_out: all.filter(|env| !numbers.contains(env)).collect(),
        }
    }
}

/// Index of the first largest element; a NaN counts as largest, as in `torch.argmax`.
fn argmax(values: &[f64]) -> usize {
    let mut best = 0;
    for (i, value) in values.iter().enumerate() {
        if *value > values[best] || (value.is_nan() && !values[best].is_nan()) {
            best = i;
        }
    }
    best
}

/// `ln(Σ exp(x)/n)`, without underflow.
fn ln_mean_exp(values: &[f64]) -> f64 {
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return max;
    }
    let sum: f64 = values.iter().map(|value| (value - max).exp()).sum();
    max + (sum / values.len() as f64).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(targets: TargetKind, outputs: usize, score: Score) -> EnsembleScores {
        let singles = vec![Tally::default(); 2];
        EnsembleScores { targets, outputs, score, singles, mean: Tally::default() }
    }

    fn close(found: f64, expected: f64) {
        // Logits are rounded to f32: 6e-8 of values below 3.
        assert!((found - expected).abs() < 3e-7, "{found}, by hand {expected}");
    }

    /// By hand: two networks with the probabilities of three classes as given; the target is
    /// class 1 in both samples.
    #[test]
    fn the_mean_of_probabilities_is_judged() {
        let mut scores = scores(TargetKind::Classes, 3, Score::Accuracy);
        let logits = |p: [f32; 3]| p.map(f32::ln);
        scores.add_classes(&[&logits([0.6, 0.3, 0.1]), &logits([0.1, 0.8, 0.1])], 1);
        scores.add_classes(&[&logits([0.5, 0.4, 0.1]), &logits([0.6, 0.2, 0.2])], 1);
        let [first, second] = [0, 1].map(|n| scores.singles[n].quality(scores.score));
        let mean = scores.mean.quality(scores.score);
        assert_eq!([first.score, second.score, mean.score], [0.0, 0.5, 0.5]);
        // Means: 0.35, 0.55, 0.1 and 0.55, 0.3, 0.15.
        close(first.loss, -(0.3f64 * 0.4).ln() / 2.0);
        close(second.loss, -(0.8f64 * 0.2).ln() / 2.0);
        close(mean.loss, -(0.55f64 * 0.3).ln() / 2.0);
        // Both 0.55, in one bin, one of two correct: |1 − 1.1|/2.
        close(mean.calibration_error.unwrap(), 0.05);
        // 0.6 and 0.5 are both wrong.
        close(first.calibration_error.unwrap(), 0.55);
    }

    /// By hand: probabilities 0.9 and 0.3 of a label that is present.
    #[test]
    fn the_mean_of_sigmoids_is_judged() {
        let mut scores = scores(TargetKind::Labels, 1, Score::F1);
        scores.singles.iter_mut().chain([&mut scores.mean]).for_each(Tally::begin_sample);
        scores.add_label(&[9f64.ln(), (3.0f64 / 7.0).ln()], true);
        let mean = scores.mean.quality(scores.score);
        close(mean.loss, -(0.6f64).ln());
        close(mean.calibration_error.unwrap(), 0.4);
        close(scores.singles[1].quality(scores.score).loss, -(0.3f64).ln());
        assert_eq!(scores.singles[1].quality(scores.score).score, 0.0);
        assert_eq!(mean.score, 1.0);
    }

    /// Probabilities far below the smallest f64 still have a logarithm.
    #[test]
    fn a_certain_mistake_has_a_finite_loss() {
        let mut scores = scores(TargetKind::Classes, 2, Score::Accuracy);
        scores.add_classes(&[&[2000.0, 0.0], &[3000.0, 0.0]], 1);
        assert_eq!(scores.singles[1].quality(scores.score).loss, 3000.0);
        let mean = scores.mean.quality(scores.score).loss;
        close(mean, 2000.0 + 2f64.ln());
        assert_eq!(ln_mean_exp(&[f64::NEG_INFINITY; 2]), f64::NEG_INFINITY);
    }
}

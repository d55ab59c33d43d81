//! Metrics that accumulate in device memory, in f64, and are read when the caller decides.
//!
//! `layout` has the form of their tensor.

mod add;
mod layout;

use serde::{Deserialize, Serialize};

pub(crate) use self::add::{BatchResult, add_group, add_score, add_train};
pub use self::layout::MetricsLayout;
pub(crate) use self::layout::{
    FINGERPRINT, GROUP_LEN, NON_FINITE, TRAIN, TRAIN_LEN, group_span, log_span, scores_len,
    train_score_span,
};
use self::layout::{SCORE_LEN, log_start};
use crate::score::{Score, ScoreSums};

/// Metrics of training and evaluation, on the host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Sum over the training samples of their loss, before each update.
    pub loss_sum: f64,
    /// Training samples classified right, before each update; 0 without classes.
    pub correct: u64,
    /// Training samples.
    pub samples: u64,
    /// Sums of the score over the training samples, before each update.
    #[serde(default, skip_serializing_if = "ScoreSums::is_empty")]
    pub sums: ScoreSums,
    /// Training steps.
    pub steps: u64,
    /// Parameters, running statistics and momenta that were NaN or infinite when
    /// [`Network::count_non_finite`](crate::Network::count_non_finite) last ran; 0 if it did not
    /// run.
    pub non_finite: u64,
    /// Result of [`Network::fingerprint`](crate::Network::fingerprint); 0 if it did not run.
    #[serde(default)]
    pub fingerprint: u64,
    /// Mean loss of the last batches, oldest first; at most the capacity of the log.
    pub batch_losses: Vec<f64>,
    /// Per parameter group, in the graph's order.
    pub groups: Vec<GroupMetrics>,
    /// Per configuration of alphas.
    pub eval: Vec<EvalMetrics>,
}

/// Gradients of one parameter group, before clipping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupMetrics {
    /// L2 norm in the last step.
    pub last_norm: f64,
    /// Sum over the steps of the L2 norm.
    pub norm_sum: f64,
    /// Tensors, over all steps, with a norm below 1e-7.
    pub vanishing: u64,
    /// Tensors, over all steps, with a norm above 10 or not finite.
    pub exploding: u64,
    /// Tensors measured, over all steps.
    pub tensors: u64,
    /// Steps in which the group had a gradient.
    pub steps: u64,
}

impl GroupMetrics {
    /// Gradient health (`docs/growth.md`, Gates): `1 − .5·vanishing − .8·exploding` as fractions,
    /// clamped to 0..1; `None` when nothing was measured.
    pub fn health(&self) -> Option<f64> {
        let fraction = |n: u64| n as f64 / self.tensors as f64;
        (self.tensors > 0).then(|| {
            (1.0 - 0.5 * fraction(self.vanishing) - 0.8 * fraction(self.exploding)).clamp(0.0, 1.0)
        })
    }

    /// Mean over the steps of the L2 norm; `None` without a step.
    pub fn mean_norm(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.norm_sum / self.steps as f64)
    }
}

/// Evaluation of one configuration of alphas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalMetrics {
    /// Sum over the samples of their loss.
    pub loss_sum: f64,
    /// Samples classified right; 0 without classes.
    pub correct: u64,
    /// Samples.
    pub samples: u64,
    /// Sum over the samples of the squared difference of their loss from that in the first
    /// configuration of the pass.
    #[serde(default)]
    pub squares: f64,
    /// Sums of the score.
    #[serde(default, skip_serializing_if = "ScoreSums::is_empty")]
    pub sums: ScoreSums,
}

/// Difference of the mean loss of two configurations on the same samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PairedLoss {
    /// Difference of the means.
    pub difference: f64,
    /// Standard error of the difference, from the differences of the samples.
    pub standard_error: f64,
}

impl EvalMetrics {
    /// Mean loss of this configuration minus the mean loss of `first`, the first configuration of
    /// the same pass, with its standard error `√((Σd²/n − (Σd/n)²)/(n − 1))`; `None` with fewer
    /// than two samples, different samples, or a difference that is not finite.
    pub fn loss_over(&self, first: &Self) -> Option<PairedLoss> {
        if self.samples < 2 || self.samples != first.samples {
            return None;
        }
        let n = self.samples as f64;
        let difference = (self.loss_sum - first.loss_sum) / n;
        let variance = (self.squares / n - difference * difference).max(0.0);
        let paired = PairedLoss { difference, standard_error: (variance / (n - 1.0)).sqrt() };
        (difference + paired.standard_error).is_finite().then_some(paired)
    }

    /// Share of samples classified right, 0..1; `None` without samples.
    pub fn accuracy(&self) -> Option<f64> {
        self.score(Score::Accuracy)
    }

    /// Score of a task, see [`Score::of`].
    pub fn score(&self, score: Score) -> Option<f64> {
        score.of(self.correct, self.samples, &self.sums)
    }

    /// Score in percentage points for decisions, 0..100: an R² below 0 counts as 0, because it has
    /// no lower limit.
    pub fn points(&self, score: Score) -> Option<f64> {
        self.score(score).map(|score| 100.0 * score.clamp(0.0, 1.0))
    }

    /// Mean loss; `None` without samples.
    pub fn loss(&self) -> Option<f64> {
        (self.samples > 0).then(|| self.loss_sum / self.samples as f64)
    }
}

impl Metrics {
    /// Parses the contents of [`Network::metrics`](crate::Network::metrics). A slice of another
    /// form gives metrics without groups, configurations and log.
    pub fn parse(raw: &[f64]) -> Self {
        let Some(layout) = MetricsLayout::parse(raw) else { return Self::default() };
        let count = |x: f64| x as u64;
        let group = |g: usize| {
            let row = &raw[layout.group(g)];
            GroupMetrics {
                last_norm: row[0],
                norm_sum: row[1],
                vanishing: count(row[2]),
                exploding: count(row[3]),
                tensors: count(row[4]),
                steps: count(row[5]),
            }
        };
        let eval = |k: usize| {
            let row = &raw[layout.score(k)];
            EvalMetrics {
                loss_sum: row[0],
                correct: count(row[1]),
                samples: count(row[2]),
                squares: row[3],
                sums: if layout.score_sums {
                    ScoreSums::parse(&row[SCORE_LEN..])
                } else {
                    ScoreSums::default()
                },
            }
        };
        let steps = count(raw[6]);
        let log = &raw[log_start(layout.groups)..][..layout.log];
        let batch_losses = if steps as usize <= log.len() {
            log[..steps as usize].to_vec()
        } else {
            let oldest = steps as usize % log.len().max(1);
            [&log[oldest..], &log[..oldest]].concat()
        };
        Self {
            loss_sum: raw[3],
            correct: count(raw[4]),
            samples: count(raw[5]),
            sums: layout.train_score().map(|at| ScoreSums::parse(&raw[at])).unwrap_or_default(),
            steps,
            non_finite: count(raw[7]),
            fingerprint: count(raw[8]) << 32 | count(raw[9]),
            batch_losses,
            groups: (0..layout.groups).map(group).collect(),
            eval: (0..layout.configs).map(eval).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: MetricsLayout =
        MetricsLayout { groups: 2, configs: 3, log: 4, score_sums: false };

    fn filled(batches: usize) -> Vec<f64> {
        let mut raw = vec![f64::NAN; LAYOUT.len()];
        LAYOUT.reset(&mut raw);
        let (counts, ring) = (TRAIN.range(), log_span(LAYOUT.groups, LAYOUT.log).range());
        for i in 0..batches {
            let loss_sum = 10.0 * i as f64;
            let batch = BatchResult { loss_sum, correct: 3, samples: 10, ..Default::default() };
            let (head, tail) = raw.split_at_mut(ring.start);
            add_train(batch, &mut head[counts.clone()], &mut tail[..LAYOUT.log]);
        }
        raw
    }

    #[test]
    fn the_log_keeps_the_last_batches_in_order() {
        assert_eq!(Metrics::parse(&filled(0)).batch_losses, [0.0; 0]);
        assert_eq!(Metrics::parse(&filled(3)).batch_losses, [0.0, 1.0, 2.0]);
        assert_eq!(Metrics::parse(&filled(6)).batch_losses, [2.0, 3.0, 4.0, 5.0]);
        let metrics = Metrics::parse(&filled(6));
        assert_eq!((metrics.correct, metrics.samples, metrics.steps), (18, 60, 6));
        assert_eq!(metrics.loss_sum, 150.0);
    }

    #[test]
    fn points_are_limited() {
        let of = |residual_squares: f64| {
            let sums = ScoreSums { residual_squares, ..ScoreSums::default() };
            EvalMetrics { samples: 4, correct: 3, sums, ..EvalMetrics::default() }
        };
        let r2 = Score::R2 { variance: 1.0 };
        assert_eq!((of(1.0).points(r2), of(1.0).points(Score::Accuracy)), (Some(75.0), Some(75.0)));
        assert_eq!((of(40.0).score(r2), of(40.0).points(r2)), (Some(-9.0), Some(0.0)));
        assert_eq!(of(f64::NAN).points(r2), None);
    }

    #[test]
    fn rows_do_not_touch_each_other() {
        let mut raw = filled(1);
        // An evaluation that begins with the second configuration.
        let scores = &mut raw[LAYOUT.scores_of(1)..];
        let batch = BatchResult {
            loss_sum: 2.5,
            correct: 4,
            samples: 5,
            squares: 1.5,
            ..BatchResult::default()
        };
        add_score(batch, 1, false, scores);
        let row = group_span(1).range();
        let squares = [9.0, 16.0, 1e-16, f64::NAN].into_iter().take(3);
        assert_eq!(add_group(&mut raw[row.clone()], squares), 5.0);
        add_group(&mut raw[row], [f64::INFINITY, 121.0].into_iter());
        let metrics = Metrics::parse(&raw);
        assert_eq!(
            metrics.eval[2],
            EvalMetrics {
                loss_sum: 2.5,
                correct: 4,
                samples: 5,
                squares: 1.5,
                ..EvalMetrics::default()
            }
        );
        assert_eq!(metrics.eval[2].accuracy(), Some(0.8));
        assert_eq!(metrics.eval[..2], [EvalMetrics::default(); 2]);
        assert_eq!(metrics.groups[0], GroupMetrics::default());
        let group = metrics.groups[1];
        assert_eq!((group.vanishing, group.exploding, group.tensors, group.steps), (1, 2, 5, 2));
        let health = 1.0 - 0.5 * 0.2 - 0.8 * 0.4;
        assert!((group.health().unwrap() - health).abs() < 1e-12);
        assert_eq!(metrics.groups[0].health(), None);
    }

    #[test]
    fn sums_of_the_score_have_their_own_elements() {
        let layout = MetricsLayout { score_sums: true, ..LAYOUT };
        let mut raw = vec![f64::NAN; layout.len()];
        layout.reset(&mut raw);
        let score = |n: u64| ScoreSums {
            true_positives: n,
            false_positives: n + 1,
            false_negatives: n + 2,
            residual_squares: n as f64 / 2.0,
        };
        score(7).add_to(&mut raw[train_score_span(2, 4).range()]);
        let batch = BatchResult { samples: 5, score: score(1), ..BatchResult::default() };
        add_score(batch, 1, true, &mut raw[layout.scores_of(1)..]);
        let metrics = Metrics::parse(&raw);
        assert_eq!((metrics.sums, metrics.samples), (score(7), 0));
        assert_eq!(metrics.batch_losses, [0.0; 0]);
        let rows: Vec<_> = metrics.eval.iter().map(|row| (row.samples, row.sums)).collect();
        assert_eq!(rows, [(0, ScoreSums::default()), (0, ScoreSums::default()), (5, score(1))]);
        assert_eq!(scores_len(&[0, 2], true), layout.len() - layout.scores_of(0));
        // Files of runs that classify are as they were.
        assert!(!serde_json::to_string(&EvalMetrics::default()).unwrap().contains("sums"));
    }

    #[test]
    fn another_form_is_not_read() {
        assert_eq!(Metrics::parse(&[]), Metrics::default());
        assert_eq!(Metrics::parse(&[1.0, 1.0, 1e9, 0.0]), Metrics::default());
    }
}

//! Metrics that accumulate in device memory, in f64, and are read when the caller decides (H1).
//!
//! One tensor of f64 per network, which describes itself:
//!
//! | elements | what |
//! |---|---|
//! | `[0..3]` | groups, configurations, capacity of the batch log |
//! | `[3..7]` | training: loss sum over samples, correct, samples, steps |
//! | `[7]` | weights that were not finite when they were last counted |
//! | `[8..10]` | the upper and the lower half of the last fingerprint |
//! | `groups × 6` | last norm, sum of norms, vanishing, exploding, measured tensors, steps |
//! | `capacity` | ring of the mean losses of the last batches |
//! | `configurations × 4` | scores of an evaluation: loss sum, correct, samples, squares |
//!
//! A loss with [`ScoreSums`] has 4 more elements after the ring, for training, and rows of 8 for
//! configurations; the length of the tensor tells.
//!
//! Squares are the sum over samples of the squared difference of the loss from that in the first
//! configuration of the pass.
//!
//! Training and checks write to all but the scores ([`Space::Metrics`]), an evaluation to its rows
//! of the scores ([`Space::Scores`]).

use meristem_device::DType;
use serde::{Deserialize, Serialize};

use crate::score::{Score, ScoreSums};
use crate::space::{Space, SpaceSpan};

const HEADER: usize = 10;
/// Elements of the counts of training.
pub(crate) const TRAIN_LEN: usize = 4;
/// Elements of a group's row.
pub(crate) const GROUP_LEN: usize = 6;
/// Elements of a configuration's row.
const SCORE_LEN: usize = 4;
/// Below this L2 norm a tensor's gradient vanishes (`docs/growth.md`, Gates).
const VANISHING: f64 = 1e-7;
/// Above this L2 norm, or if it is not finite, a tensor's gradient explodes.
const EXPLODING: f64 = 10.0;

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

/// The form of a metrics tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricsLayout {
    /// Parameter groups.
    pub groups: usize,
    /// Configurations of alphas.
    pub configs: usize,
    /// Capacity of the batch log.
    pub log: usize,
    /// Whether there are [`ScoreSums`].
    pub score_sums: bool,
}

impl MetricsLayout {
    fn parse(raw: &[f64]) -> Option<Self> {
        let &[groups, configs, log] = raw.first_chunk()?;
        let [groups, configs, log] = [groups, configs, log].map(|n| n as usize);
        let forms = [false, true].map(|score_sums| Self { groups, configs, log, score_sums });
        forms.into_iter().find(|layout| raw.len() == layout.len())
    }

    /// Elements of the tensor.
    pub(crate) fn len(self) -> usize {
        self.scores_start() + self.configs * row_len(self.score_sums)
    }

    fn group(self, g: usize) -> std::ops::Range<usize> {
        group_span(g).range()
    }

    fn score(self, k: usize) -> std::ops::Range<usize> {
        let len = row_len(self.score_sums);
        let start = self.scores_start() + k * len;
        start..start + len
    }

    /// Sums of the score in training.
    fn train_score(self) -> Option<std::ops::Range<usize>> {
        self.score_sums.then(|| train_score_span(self.groups, self.log).range())
    }

    /// First element of a configuration's row.
    pub(crate) fn scores_of(self, config: usize) -> usize {
        self.score(config).start
    }

    fn scores_start(self) -> usize {
        let sums = if self.score_sums { ScoreSums::LEN } else { 0 };
        log_start(self.groups) + self.log + sums
    }

    /// All of the tensor.
    pub(crate) fn span(self) -> SpaceSpan {
        metrics(0, self.len())
    }

    /// Adds the counts of training of `own`, whose last batch losses are those of its last steps.
    pub(crate) fn add_training(self, raw: &mut [f64], own: &Metrics) {
        raw[3] += own.loss_sum;
        raw[4] += own.correct as f64;
        raw[5] += own.samples as f64;
        raw[6] += own.steps as f64;
        if let Some(at) = self.train_score() {
            own.sums.add_to(&mut raw[at]);
        }
        let ring = &mut raw[log_start(self.groups)..][..self.log];
        let first = own.steps as usize - own.batch_losses.len();
        for (step, loss) in (first..).zip(&own.batch_losses) {
            let place = step % ring.len().max(1);
            ring.iter_mut().skip(place).take(1).for_each(|to| *to = *loss);
        }
    }

    /// Empty metrics.
    pub(crate) fn reset(self, raw: &mut [f64]) {
        raw.fill(0.0);
        raw[..3].copy_from_slice(&[self.groups, self.configs, self.log].map(|n| n as f64));
    }
}

/// Loss, number of correct samples, and sums of the score, of one batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct BatchResult {
    /// Sum over the samples.
    pub(crate) loss_sum: f64,
    /// Samples classified right.
    pub(crate) correct: u64,
    /// Samples.
    pub(crate) samples: usize,
    /// Sum over the samples of the squared difference of loss from the first configuration.
    pub(crate) squares: f64,
    /// Sums of the score.
    pub(crate) score: ScoreSums,
}

/// Counts of training, for [`add_train`].
pub(crate) const TRAIN: SpaceSpan = metrics(3, TRAIN_LEN);
/// Weights that were not finite.
pub(crate) const NON_FINITE: SpaceSpan = metrics(7, 1);
/// Halves of the fingerprint.
pub(crate) const FINGERPRINT: SpaceSpan = metrics(8, 2);

const fn metrics(start: usize, len: usize) -> SpaceSpan {
    SpaceSpan::new(Space::Metrics, DType::F64, start, len)
}

fn log_start(groups: usize) -> usize {
    HEADER + groups * GROUP_LEN
}

/// Ring of the mean losses of the last `log` batches, for [`add_train`].
pub(crate) fn log_span(groups: usize, log: usize) -> SpaceSpan {
    metrics(log_start(groups), log)
}

/// Row of a group, for [`add_group`].
pub(crate) fn group_span(group: usize) -> SpaceSpan {
    metrics(HEADER + group * GROUP_LEN, GROUP_LEN)
}

/// Sums of the score in training, after the ring.
pub(crate) fn train_score_span(groups: usize, log: usize) -> SpaceSpan {
    metrics(log_start(groups) + log, ScoreSums::LEN)
}

/// Elements of a configuration's row.
const fn row_len(score_sums: bool) -> usize {
    if score_sums { SCORE_LEN + ScoreSums::LEN } else { SCORE_LEN }
}

/// Elements of the scores up to the last of these rows.
pub(crate) fn scores_len(rows: &[usize], score_sums: bool) -> usize {
    rows.iter().map(|row| (row + 1) * row_len(score_sums)).max().unwrap_or(0)
}

/// Adds a training batch to the counts, and its mean loss to the ring.
pub(crate) fn add_train(batch: BatchResult, counts: &mut [f64], log: &mut [f64]) {
    let step = counts[3] as usize;
    counts[0] += batch.loss_sum;
    counts[1] += batch.correct as f64;
    counts[2] += batch.samples as f64;
    counts[3] += 1.0;
    if !log.is_empty() {
        log[step % log.len()] = batch.loss_sum / batch.samples as f64;
    }
}

/// Adds an evaluation batch to a row of the scores, with the sums of its score if rows have them.
pub(crate) fn add_score(batch: BatchResult, row: usize, score_sums: bool, scores: &mut [f64]) {
    let len = row_len(score_sums);
    let row = &mut scores[row * len..][..len];
    row[0] += batch.loss_sum;
    row[1] += batch.correct as f64;
    row[2] += batch.samples as f64;
    row[3] += batch.squares;
    if score_sums {
        batch.score.add_to(&mut row[SCORE_LEN..]);
    }
}

/// Adds one step's gradients of a group to its row, from the squared L2 norm of each tensor;
/// returns the group's norm.
pub(crate) fn add_group(row: &mut [f64], squares: impl Iterator<Item = f64>) -> f64 {
    let mut sum = 0.0;
    for square in squares {
        let norm = square.sqrt();
        sum += square;
        row[2] += f64::from(u8::from(norm < VANISHING));
        row[3] += f64::from(u8::from(norm > EXPLODING || !norm.is_finite()));
        row[4] += 1.0;
    }
    row[0] = sum.sqrt();
    row[1] += row[0];
    row[5] += 1.0;
    row[0]
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

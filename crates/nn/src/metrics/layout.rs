//! The form of a metrics tensor.
//!
//! One tensor of f64 per network, which describes itself:
//!
//! | elements | what |
//! |---|---|
//! | `[0..3]` | groups, configurations, capacity of the batch log |
//! | `[3..7]` | training: loss sum over samples, correct, samples, steps |
//! | `[7]` | elements of parameters, statistics and momenta that were not finite, last counted |
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

use super::Metrics;
use crate::score::ScoreSums;
use crate::space::{Space, SpaceSpan};

const HEADER: usize = 10;

/// Elements of the counts of training.
pub(crate) const TRAIN_LEN: usize = 4;

/// Elements of a group's row.
pub(crate) const GROUP_LEN: usize = 6;

/// Elements of a configuration's row.
pub(super) const SCORE_LEN: usize = 4;

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
    pub(super) fn parse(raw: &[f64]) -> Option<Self> {
        let &[groups, configs, log] = raw.first_chunk()?;
        let [groups, configs, log] = [groups, configs, log].map(|n| n as usize);
        let forms = [false, true].map(|score_sums| Self { groups, configs, log, score_sums });
        forms.into_iter().find(|layout| raw.len() == layout.len())
    }

    /// Elements of the tensor.
    pub(crate) fn len(self) -> usize {
        self.scores_start() + self.configs * row_len(self.score_sums)
    }

    pub(super) fn group(self, g: usize) -> std::ops::Range<usize> {
        group_span(g).range()
    }

    pub(super) fn score(self, k: usize) -> std::ops::Range<usize> {
        let len = row_len(self.score_sums);
        let start = self.scores_start() + k * len;
        start..start + len
    }

    /// Sums of the score in training.
    pub(super) fn train_score(self) -> Option<std::ops::Range<usize>> {
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

/// Counts of training, for [`add_train`].
pub(crate) const TRAIN: SpaceSpan = metrics(3, TRAIN_LEN);

/// Elements that were not finite.
pub(crate) const NON_FINITE: SpaceSpan = metrics(7, 1);

/// Halves of the fingerprint.
pub(crate) const FINGERPRINT: SpaceSpan = metrics(8, 2);

const fn metrics(start: usize, len: usize) -> SpaceSpan {
    SpaceSpan::new(Space::Metrics, DType::F64, start, len)
}

pub(super) fn log_start(groups: usize) -> usize {
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
pub(super) const fn row_len(score_sums: bool) -> usize {
    if score_sums { SCORE_LEN + ScoreSums::LEN } else { SCORE_LEN }
}

/// Elements of the scores up to the last of these rows.
pub(crate) fn scores_len(rows: &[usize], score_sums: bool) -> usize {
    rows.iter().map(|row| (row + 1) * row_len(score_sums)).max().unwrap_or(0)
}

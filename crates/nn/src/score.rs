//! Score of a task: accuracy of classes, micro-F1 of several labels, R² of numbers; and the sums
//! from which the last two are computed.

use std::fmt;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

/// Kind of a score, as files name it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ScoreKind {
    /// Share of samples that are classified right, 0..1.
    #[default]
    Accuracy,
    /// Micro-F1 of all labels together, 0..1.
    F1,
    /// R², the coefficient of determination, at most 1; 0 for a prediction as good as the mean.
    R2,
}

impl ScoreKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Accuracy, Self::F1, Self::R2];

    /// Name in files, in events and as a key: `accuracy`, `f1` or `r2`.
    pub fn key(self) -> &'static str {
        match self {
            Self::Accuracy => "accuracy",
            Self::F1 => "f1",
            Self::R2 => "r2",
        }
    }
}

/// Name for people: `accuracy`, `F1` or `R²`.
impl fmt::Display for ScoreKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Accuracy => "accuracy",
            Self::F1 => "F1",
            Self::R2 => "R²",
        })
    }
}

/// Score of a task, computed from sums over samples; higher is better.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Score {
    /// [`ScoreKind::Accuracy`].
    #[default]
    Accuracy,
    /// [`ScoreKind::F1`].
    F1,
    /// [`ScoreKind::R2`].
    R2 {
        /// [`target_squares`] divided by the number of samples: the sum of the variances of all
        /// outputs' targets.
        variance: f64,
    },
}

impl Score {
    /// Its kind.
    pub fn kind(self) -> ScoreKind {
        match self {
            Self::Accuracy => ScoreKind::Accuracy,
            Self::F1 => ScoreKind::F1,
            Self::R2 { .. } => ScoreKind::R2,
        }
    }

    /// The score of `samples` samples, of which `correct` are classified right; `None` without
    /// samples, and where [`ScoreSums::f1`] or [`ScoreSums::r2`] is.
    pub fn of(self, correct: u64, samples: u64, sums: &ScoreSums) -> Option<f64> {
        match self {
            _ if samples == 0 => None,
            Self::Accuracy => Some(correct as f64 / samples as f64),
            Self::F1 => sums.f1(),
            Self::R2 { variance } => sums.r2(variance * samples as f64),
        }
    }
}

/// Sums over samples, next to the sum of their losses and the number of samples. Only those of the
/// network's task are not zero: the first three with [`Loss::BinaryCrossEntropy`], the last one
/// with a loss of numbers, none with cross-entropy, whose score is the share of correct samples.
///
/// [`Loss::BinaryCrossEntropy`]: crate::Loss::BinaryCrossEntropy
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScoreSums {
    /// Labels that are present (target above ½) and predicted (logit above 0).
    pub true_positives: u64,
    /// Labels that are absent and predicted.
    pub false_positives: u64,
    /// Labels that are present and not predicted. A logit of NaN predicts nothing.
    pub false_negatives: u64,
    /// Sum over samples and outputs of the squared difference of output and target.
    pub residual_squares: f64,
}

impl ScoreSums {
    /// Number of sums.
    pub(crate) const LEN: usize = 4;

    /// Whether all sums are zero.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Micro-F1: `2·tp/(2·tp + fp + fn)` with the counts of all labels together, 0..1; `None` where
    /// no label is present and none is predicted.
    pub fn f1(&self) -> Option<f64> {
        let Self { true_positives, false_positives, false_negatives, .. } = *self;
        let all = 2 * true_positives + false_positives + false_negatives;
        (all > 0).then(|| 2.0 * true_positives as f64 / all as f64)
    }

    /// `R² = 1 − Σ(y−ŷ)²/Σ(y−ȳ)²` over all outputs together, where `target_squares` is the second
    /// sum over the same samples, see [`target_squares`]; at most 1. `None` for targets that are
    /// all equal, or sums that are not finite.
    ///
    /// Outputs of a larger variance have more weight. With targets that are standardised for each
    /// output, the result is the mean over the outputs of the R² of each.
    pub fn r2(&self, target_squares: f64) -> Option<f64> {
        let r2 = 1.0 - self.residual_squares / target_squares;
        (target_squares > 0.0 && r2.is_finite()).then_some(r2)
    }

    /// Sums in the elements of a row of metrics.
    pub(crate) fn parse(row: &[f64]) -> Self {
        Self {
            true_positives: row[0] as u64,
            false_positives: row[1] as u64,
            false_negatives: row[2] as u64,
            residual_squares: row[3],
        }
    }

    /// Adds these sums to the elements of a row of metrics.
    pub(crate) fn add_to(&self, row: &mut [f64]) {
        row[0] += self.true_positives as f64;
        row[1] += self.false_positives as f64;
        row[2] += self.false_negatives as f64;
        row[3] += self.residual_squares;
    }
}

impl AddAssign for ScoreSums {
    fn add_assign(&mut self, other: Self) {
        self.true_positives += other.true_positives;
        self.false_positives += other.false_positives;
        self.false_negatives += other.false_negatives;
        self.residual_squares += other.residual_squares;
    }
}

/// Sum over samples and outputs of the squared difference of a target from the mean of its output's
/// targets, `targets` being `[n][outputs]`. Two passes in f64, so that nothing cancels. (From the
/// sums of y and y² it would: their difference has an error of `n·2⁻⁵³` times `1 + (ȳ/σ)²`.)
pub fn target_squares(targets: &[f32], outputs: usize) -> f64 {
    let samples = targets.len() / outputs.max(1);
    let of_output = |output: usize| {
        let column = || targets.iter().skip(output).step_by(outputs).map(|y| f64::from(*y));
        let mean = column().sum::<f64>() / samples as f64;
        column().map(|y| (y - mean) * (y - mean)).sum::<f64>()
    };
    (0..outputs).map(of_output).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f1_is_the_harmonic_mean_of_precision_and_recall() {
        let sums = ScoreSums {
            true_positives: 6,
            false_positives: 2,
            false_negatives: 6,
            ..ScoreSums::default()
        };
        let (precision, recall) = (6.0 / 8.0, 6.0 / 12.0);
        let mean: f64 = 2.0 * precision * recall / (precision + recall);
        assert!((sums.f1().unwrap() - mean).abs() < 1e-15);
        assert_eq!(ScoreSums::default().f1(), None);
        let wrong = ScoreSums { false_positives: 1, ..ScoreSums::default() };
        assert_eq!(wrong.f1(), Some(0.0));
        let mut twice = sums;
        twice += sums;
        assert_eq!((twice.true_positives, twice.f1()), (12, sums.f1()));
    }

    #[test]
    fn a_score_is_that_of_its_samples() {
        let sums = ScoreSums {
            true_positives: 1,
            false_negatives: 1,
            false_positives: 0,
            residual_squares: 2.0,
        };
        let variance = 4.0;
        assert_eq!(Score::Accuracy.of(3, 4, &sums), Some(0.75));
        assert_eq!(Score::F1.of(0, 4, &sums), sums.f1());
        // Half a square of residual for each sample, of a variance of 4.
        assert_eq!(Score::R2 { variance }.of(0, 4, &sums), Some(0.875));
        for score in [Score::Accuracy, Score::F1, Score::R2 { variance }] {
            assert_eq!(score.of(0, 0, &ScoreSums::default()), None);
        }
        let names = ScoreKind::ALL.map(|kind| serde_json::to_string(&kind).unwrap());
        assert_eq!(names, ScoreKind::ALL.map(|kind| format!("\"{}\"", kind.key())));
    }

    #[test]
    fn r2_compares_with_the_mean_of_each_output() {
        // Means of 2 and 1e6; squares of 2 and 8.
        let targets = [1.0, 999_998.0, 3.0, 1_000_002.0];
        assert_eq!(target_squares(&targets, 2), 10.0);
        let sums = ScoreSums { residual_squares: 2.5, ..ScoreSums::default() };
        assert_eq!(sums.r2(target_squares(&targets, 2)), Some(0.75));
        assert_eq!(sums.r2(target_squares(&[5.0, 5.0], 1)), None);
        assert_eq!((target_squares(&[], 2), target_squares(&[], 0)), (0.0, 0.0));
        let lost = ScoreSums { residual_squares: f64::NAN, ..ScoreSums::default() };
        assert_eq!(lost.r2(1.0), None);
    }
}

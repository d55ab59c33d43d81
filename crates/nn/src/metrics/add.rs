//! Sums of batches, steps and evaluations, as the kernels add them.

use super::layout::{SCORE_LEN, row_len};
use crate::score::ScoreSums;

/// Below this L2 norm a tensor's gradient vanishes (`docs/growth.md`, Gates).
const VANISHING: f64 = 1e-7;

/// Above this L2 norm, or if it is not finite, a tensor's gradient explodes.
const EXPLODING: f64 = 10.0;

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

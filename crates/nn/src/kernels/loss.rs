//! Softmax cross-entropy over class logits.

use super::macros::isa_kernels;
use super::{Isa, math};

/// Sums over a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSums {
    /// Sum over samples of `−ln softmax(logits)[target]`, natural logarithm.
    pub loss: f64,
    /// Samples whose largest logit is the target's (ties: lowest class; a NaN counts as largest).
    pub correct: u64,
}

isa_kernels! {
    /// Cross-entropy of `logits` `[N][classes]` with `targets` `[N]`, shifted by the largest logit
    /// so that nothing overflows. `dlogits`, if wanted, is overwritten with the gradient of the
    /// batch *mean*: `(softmax − onehot)/N`; `losses`, if wanted, with each sample's loss. A target
    /// out of range panics: labels are checked when a dataset is loaded (D9).
    pub fn softmax_cross_entropy(isa: Isa, classes: usize, logits: &[f32], targets: &[u32],
                                 dlogits: &mut [f32], losses: &mut [f32]) -> LossSums {
        let mut sums = LossSums::default();
        if targets.is_empty() {
            return sums;
        }
        let mut losses = losses.iter_mut();
        for (logits, &target) in logits.chunks_exact(classes).zip(targets) {
            let (best, max) = argmax(logits);
            sums.correct += u64::from(best == target as usize);
            let sum: f64 = logits.iter().map(|&z| f64::from(math::exp(z - max))).sum();
            let loss = sum.ln() - (f64::from(logits[target as usize]) - f64::from(max));
            sums.loss += loss;
            if let Some(to) = losses.next() {
                *to = loss as f32;
            }
        }
        let mean = 1.0 / targets.len() as f32;
        let samples = logits.chunks_exact(classes).zip(dlogits.chunks_exact_mut(classes));
        for ((logits, d), &target) in samples.zip(targets) {
            let (_, max) = argmax(logits);
            let mut sum = 0f64;
            for (d, &z) in d.iter_mut().zip(logits) {
                *d = math::exp(z - max);
                sum += f64::from(*d);
            }
            let scale = (1.0 / sum) as f32 * mean;
            d.iter_mut().for_each(|d| *d *= scale);
            d[target as usize] -= mean;
        }
        sums
    }
}

/// Index and value of the first largest element; a NaN counts as largest, as in `torch.argmax`.
#[inline(always)]
fn argmax(values: &[f32]) -> (usize, f32) {
    let mut best = (0, values[0]);
    for (i, &v) in values.iter().enumerate() {
        if v > best.1 || (v.is_nan() && !best.1.is_nan()) {
            best = (i, v);
        }
    }
    best
}

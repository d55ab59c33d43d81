//! Softmax cross-entropy over class logits; losses of numbers, output by output.

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
    /// out of range panics: labels are checked when a dataset is loaded.
    pub fn softmax_cross_entropy(isa: Isa, classes: usize, logits: &[f32], targets: &[u32],
                                 dlogits: &mut [f32], losses: &mut [f32]) -> LossSums {
        let mut sums = LossSums::default();
        if targets.is_empty() {
            return sums;
        }
        let (mut losses, mut dlogits) = (losses.iter_mut(), dlogits.chunks_exact_mut(classes));
        let mean = 1.0 / targets.len() as f32;
        for (logits, &target) in logits.chunks_exact(classes).zip(targets) {
            let (best, max) = argmax(logits);
            sums.correct += u64::from(best == target as usize);
            let d = dlogits.next().unwrap_or_default();
            let sum = exponentials(logits, max, d);
            let loss = sum.ln() - (f64::from(logits[target as usize]) - f64::from(max));
            sums.loss += loss;
            if let Some(to) = losses.next() {
                *to = loss as f32;
            }
            if !d.is_empty() {
                let scale = (1.0 / sum) as f32 * mean;
                d.iter_mut().for_each(|d| *d *= scale);
                d[target as usize] -= mean;
            }
        }
        sums
    }
}

/// Targets of labels: `(1 − s)·onehot + s/classes`, each class times its weight.
#[derive(Clone, Copy, Debug)]
pub struct ClassTargets<'a> {
    /// Classes.
    pub classes: usize,
    /// s, 0..=1.
    pub label_smoothing: f32,
    /// Weight of each class; empty for weights of 1.
    pub weights: &'a [f32],
}

impl ClassTargets<'_> {
    #[inline(always)]
    fn weight(&self, class: usize) -> f64 {
        self.weights.get(class).map_or(1.0, |weight| f64::from(*weight))
    }

    /// Share of the label itself.
    #[inline(always)]
    fn own(&self) -> f64 {
        1.0 - f64::from(self.label_smoothing)
    }

    /// Share of every class.
    #[inline(always)]
    fn even(&self) -> f64 {
        f64::from(self.label_smoothing) / self.classes as f64
    }
}

isa_kernels! {
    /// As [`softmax_cross_entropy`], with smoothed labels and weights of classes: a sample's loss
    /// is `−Σ a[c]·ln softmax(logits)[c]` with targets a, and its gradient `softmax·Σ a − a`. The
    /// gradient is of the mean over the samples, whatever their weights.
    pub fn smoothed_cross_entropy(isa: Isa, of: ClassTargets<'_>, logits: &[f32], targets: &[u32],
                                  dlogits: &mut [f32], losses: &mut [f32]) -> LossSums {
        let mut sums = LossSums::default();
        if targets.is_empty() {
            return sums;
        }
        let (classes, own, even) = (of.classes, of.own(), of.even());
        let (mut losses, mut dlogits) = (losses.iter_mut(), dlogits.chunks_exact_mut(classes));
        let mut weights = 0f64;
        for class in 0..classes {
            weights += of.weight(class);
        }
        let mean = 1.0 / targets.len() as f64;
        for (logits, &target) in logits.chunks_exact(classes).zip(targets) {
            let (best, max) = argmax(logits);
            sums.correct += u64::from(best == target as usize);
            let d = dlogits.next().unwrap_or_default();
            let sum = exponentials(logits, max, d);
            let ln_sum = sum.ln();
            let z = logits[target as usize];
            let mut loss =
                own * of.weight(target as usize) * (ln_sum - (f64::from(z) - f64::from(max)));
            if even > 0.0 {
                let mut all = 0f64;
                for (class, &z) in logits.iter().enumerate() {
                    all += of.weight(class) * (ln_sum - (f64::from(z) - f64::from(max)));
                }
                loss += even * all;
            }
            sums.loss += loss;
            if let Some(to) = losses.next() {
                *to = loss as f32;
            }
            if !d.is_empty() {
                let of_target = own * of.weight(target as usize);
                let scale = (1.0 / sum * (of_target + even * weights) * mean) as f32;
                for (class, d) in d.iter_mut().enumerate() {
                    *d = *d * scale - (even * of.weight(class) * mean) as f32;
                }
                d[target as usize] -= (of_target * mean) as f32;
            }
        }
        sums
    }
}

/// Logits whose exponentials are computed together: one AVX-512 vector.
const TOGETHER: usize = 16;

/// Sum of `e^(z − max)` over the logits z of a sample, added in order in f64. The exponentials are
/// written to `out`, unless it is empty.
#[inline(always)]
fn exponentials(logits: &[f32], max: f32, out: &mut [f32]) -> f64 {
    let (mut sum, mut out) = (0f64, out.chunks_mut(TOGETHER));
    for logits in logits.chunks(TOGETHER) {
        // The compiler knows the length of this array, so it vectorises the loop; it does not know
        // the number of classes.
        let mut e = [0f32; TOGETHER];
        for (e, &z) in e.iter_mut().zip(logits) {
            *e = z - max;
        }
        for e in &mut e {
            *e = math::exp(*e);
        }
        let e = &e[..logits.len()];
        for &e in e {
            sum += f64::from(e);
        }
        if let Some(out) = out.next() {
            out.copy_from_slice(e);
        }
    }
    sum
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

/// Loss of one output, of the number that a network computed and the number that it should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ElementLoss {
    /// Binary cross-entropy of a logit z with a target t: `(1 − t)·z + ln(1 + e⁻ᶻ)`.
    BinaryCrossEntropy,
    /// Square of the difference.
    Square,
    /// Half the square up to a difference of `delta`, then linear.
    Huber {
        /// Largest difference whose square counts.
        delta: f32,
    },
    /// Absolute difference.
    Absolute,
}

impl ElementLoss {
    /// Loss of a value with its target; a NaN gives NaN.
    #[inline(always)]
    fn loss(self, value: f32, target: f32) -> f64 {
        let [y, t] = [value, target].map(f64::from);
        let apart = (y - t).abs();
        match self {
            ElementLoss::BinaryCrossEntropy => {
                // ln(1 + e⁻ᶻ) = max(−z, 0) + ln(1 + e^(−|z|)), which does not overflow.
                let above = if y < 0.0 { -y } else { 0.0 };
                (1.0 - t) * y + above + f64::from(math::ln_1p(math::exp(-value.abs())))
            }
            ElementLoss::Square => apart * apart,
            ElementLoss::Huber { delta } => {
                let delta = f64::from(delta);
                if apart > delta { delta * (apart - 0.5 * delta) } else { 0.5 * apart * apart }
            }
            ElementLoss::Absolute => apart,
        }
    }

    /// Derivative of the loss by the value; a NaN gives NaN. At a difference of 0 the absolute
    /// value has slope 0, as in PyTorch.
    #[inline(always)]
    fn slope(self, value: f32, target: f32) -> f32 {
        let d = value - target;
        match self {
            ElementLoss::BinaryCrossEntropy => math::sigmoid_with_slope(value).value - target,
            ElementLoss::Square => 2.0 * d,
            ElementLoss::Huber { delta } => {
                let d = if d > delta { delta } else { d };
                if d < -delta { -delta } else { d }
            }
            ElementLoss::Absolute => {
                let d = if d > 0.0 { 1.0 } else { d };
                if d < 0.0 { -1.0 } else { d }
            }
        }
    }

    /// Adds an output to the counts, or to the squares.
    #[inline(always)]
    fn count(self, value: f32, target: f32, sums: &mut ElementSums) {
        if self == ElementLoss::BinaryCrossEntropy {
            let (predicted, present) = (value > 0.0, target > 0.5);
            sums.true_positives += u64::from(predicted & present);
            sums.false_positives += u64::from(predicted & !present);
            sums.false_negatives += u64::from(!predicted & present);
        } else {
            let d = f64::from(value) - f64::from(target);
            sums.residual_squares += d * d;
        }
    }
}

/// A loss of each of several outputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Elements {
    /// Loss of an output.
    pub loss: ElementLoss,
    /// Outputs of a sample.
    pub outputs: usize,
}

/// Sums over a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ElementSums {
    /// Sum over samples of the mean loss of their outputs.
    pub loss: f64,
    /// Labels that are present (target above ½) and predicted (logit above 0), with
    /// [`ElementLoss::BinaryCrossEntropy`]; otherwise 0, like the other counts.
    pub true_positives: u64,
    /// Labels that are absent and predicted.
    pub false_positives: u64,
    /// Labels that are present and not predicted. A logit of NaN predicts nothing.
    pub false_negatives: u64,
    /// Sum over samples and outputs of the squared difference of output and target, with the losses
    /// of numbers; otherwise 0.
    pub residual_squares: f64,
}

isa_kernels! {
    /// Losses of `values` with `targets`, both `[N][outputs]`. `gradient`, if wanted, is
    /// overwritten with the gradient of the mean over outputs and batch; `losses`, if wanted, with
    /// each sample's mean over its outputs.
    pub fn element_loss(isa: Isa, of: Elements, values: &[f32], targets: &[f32],
                        gradient: &mut [f32], losses: &mut [f32]) -> ElementSums {
        let Elements { loss: function, outputs } = of;
        let mut sums = ElementSums::default();
        if values.is_empty() {
            return sums;
        }
        let mut losses = losses.iter_mut();
        for (values, targets) in values.chunks_exact(outputs).zip(targets.chunks_exact(outputs)) {
            let mut sum = 0f64;
            for (&value, &target) in values.iter().zip(targets) {
                sum += function.loss(value, target);
                function.count(value, target, &mut sums);
            }
            let loss = sum / outputs as f64;
            sums.loss += loss;
            if let Some(to) = losses.next() {
                *to = loss as f32;
            }
        }
        let mean = 1.0 / values.len() as f32;
        for ((d, &value), &target) in gradient.iter_mut().zip(values).zip(targets) {
            *d = function.slope(value, target) * mean;
        }
        sums
    }
}

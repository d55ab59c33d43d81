//! The loss of proximal policy optimisation over several action heads, with its gradient (Schulman
//! et al., "Proximal policy optimization algorithms", 2017).
//!
//! # From logits to probabilities
//! A row has n legal choices of a head. With `p` the softmax over the legal logits alone (a
//! masked logit counts as −10⁹: its probability is exactly 0) and `f = min(floor, .99/n)`, a legal
//! choice has
//! ```text
//! p'ᵢ = f + (1 − n·f)·pᵢ,   ∂p'ᵢ/∂zⱼ = (1 − n·f)·pᵢ·(δᵢⱼ − pⱼ)
//! ```
//! and the others have 0. The `p'` sum to 1, and none of them is below f. With one legal choice
//! log-probability and entropy are exactly 0.
//!
//! # The loss
//! Letters: `N` rows, `K` heads, `L` logits of all heads. A row counts if an op (head 0) is legal
//! in it. It is a *decision* if more than one is; head k is *used* in a decision if its op uses it.
//! With `A` the advantage, `r = p'(choice)/p'_reference(choice)`, and means over the decisions in
//! which the head is used (a head that is never used adds nothing):
//! ```text
//! loss = Σₖ −mean min(r·A, clip(r, 1 ± ε)·A)  +  c_V·mean (V − R)²
//!        − Σₖ cₖ·Hₖ  +  Σₖ c_F·max(0, Fₖ − Hₖ)²,     Hₖ = mean (−Σᵢ p'ᵢ ln p'ᵢ)/ln n
//! ```
//! `V − R` is over all rows that count; the entropy of a row with one legal choice of a head is 0.
//! Divergence from the reference is the mean over decisions of `eˣ − 1 − x`, where x is the sum
//! over used heads of `ln r` for the choices that were drawn (Schulman, "Approximating KL
//! divergence", 2020, estimator k3).
//!
//! Probabilities are f32 and the same for every instruction set; sums over rows are f64, in order.

mod report;

pub use report::{HeadReport, PpoReport, report_len};

use self::report::ReportSums;
use super::math;

/// One action head.
#[derive(Clone, Debug, PartialEq)]
pub struct PpoHead {
    /// Its choices.
    pub choices: usize,
    /// Bit i: op i (choice i of head 0) uses it.
    pub used_by: u32,
    /// Probability floor of a legal choice.
    pub floor: f32,
    /// Weight cₖ of its entropy.
    pub entropy_coefficient: f32,
    /// Entropy Fₖ, of at most 1, below which it is pushed up.
    pub entropy_floor: f32,
}

/// The loss.
#[derive(Clone, Debug, PartialEq)]
pub struct PpoLoss {
    /// Heads in the order of their logits; head 0 is the op.
    pub heads: Vec<PpoHead>,
    /// ε.
    pub clip: f32,
    /// c_V.
    pub value_coefficient: f32,
    /// c_F.
    pub entropy_floor_coefficient: f32,
}

/// A row of a batch.
#[derive(Clone, Copy)]
struct BatchRow<'a> {
    batch: &'a PpoBatch<'a>,
    row: usize,
}

/// Choices, masks, advantages and returns of each row.
#[derive(Clone, Copy, Debug)]
pub struct PpoBatch<'a> {
    /// The choice of each head, `[N][K]`; of a head that is not used any legal one.
    pub choices: &'a [u32],
    /// 1 where a choice is legal, `[N][L]`.
    pub legal: &'a [u8],
    /// A, `[N]`.
    pub advantages: &'a [f32],
    /// R, `[N]`.
    pub returns: &'a [f32],
}

/// Source of the reference log-probabilities `[N][K]`.
#[derive(Debug)]
pub enum Reference<'a> {
    /// The pass writes its own values here: every ratio is exactly 1.
    Record(&'a mut [f32]),
    /// An earlier pass wrote them.
    Given(&'a [f32]),
}

/// Turns `probabilities` (of `logits.len()` choices) into p', see the module. All illegal: zeros.
pub fn floored_probabilities(logits: &[f32], legal: &[u8], floor: f32, probabilities: &mut [f32]) {
    let n = softmax(logits, legal, probabilities);
    for (p, legal) in probabilities.iter_mut().zip(legal) {
        *p = if *legal == 0 { 0.0 } else { Floored::new(n, floor).apply(*p) };
    }
}

/// Softmax over the legal logits, 0 for the others; returns the number of legal choices.
fn softmax(logits: &[f32], legal: &[u8], p: &mut [f32]) -> usize {
    let legal_logits = || logits.iter().zip(legal).filter(|(_, l)| **l != 0).map(|(z, _)| *z);
    let largest =
        legal_logits().fold(f32::NEG_INFINITY, |m, z| if z > m || z.is_nan() { z } else { m });
    let mut sum = 0.0;
    for ((p, z), legal) in p.iter_mut().zip(logits).zip(legal) {
        *p = if *legal == 0 { 0.0 } else { math::exp(z - largest) };
        sum += *p;
    }
    p.iter_mut().for_each(|p| *p /= sum.max(f32::MIN_POSITIVE));
    legal_logits().count()
}

/// The floor among n legal choices.
#[derive(Clone, Copy)]
pub(super) struct Floored {
    /// n.
    pub(super) n: usize,
    /// f.
    floor: f32,
    /// 1 − n·f.
    free: f32,
}

impl Floored {
    pub(super) fn new(n: usize, floor: f32) -> Self {
        let floor = floor.min(0.99 / n.max(1) as f32);
        match n {
            0 | 1 => Self { n, floor: 0.0, free: 1.0 },
            _ => Self { n, floor, free: 1.0 - n as f32 * floor },
        }
    }

    /// p' of p. Without a floor a choice may be so improbable that p is 0; it then has the
    /// smallest normal probability, so that logarithms and ratios stay finite. NaN stays NaN.
    pub(super) fn apply(self, p: f32) -> f32 {
        let p = self.floor + self.free * p;
        if p < f32::MIN_POSITIVE { f32::MIN_POSITIVE } else { p }
    }
}

/// A head of one row: its part of the logits, and its softmax.
struct HeadRow<'a> {
    /// Softmax over the legal choices.
    p: &'a mut [f32],
    legal: &'a [u8],
    choice: usize,
    floored: Floored,
}

impl HeadRow<'_> {
    fn log_prob(&self) -> f32 {
        if self.floored.n < 2 { 0.0 } else { self.floored.apply(self.p[self.choice]).ln() }
    }

    fn each_legal(&self) -> impl Iterator<Item = f32> {
        self.p.iter().zip(self.legal).filter(|(_, legal)| **legal != 0).map(|(p, _)| *p)
    }

    /// Entropy divided by ln n, for n legal choices; 0 for fewer than two.
    fn entropy(&self) -> f32 {
        if self.floored.n < 2 {
            return 0.0;
        }
        let term = |p: f32| self.floored.apply(p) * self.floored.apply(p).ln();
        -self.each_legal().map(term).sum::<f32>() / (self.floored.n as f32).ln()
    }

    /// Turns p into `by_choice·∂ ln p'(choice)/∂z + by_entropy·∂ entropy/∂z`, in place.
    fn differentiate(self, by_choice: f32, by_entropy: f32) {
        if self.floored.n < 2 {
            return self.p.fill(0.0);
        }
        let Floored { n, free, .. } = self.floored;
        let chosen =
            by_choice * free * self.p[self.choice] / self.floored.apply(self.p[self.choice]);
        let mean: f32 = self.each_legal().map(|p| p * self.floored.apply(p).ln()).sum();
        let by_entropy = by_entropy * free / (n as f32).ln();
        for (i, (p, legal)) in self.p.iter_mut().zip(self.legal).enumerate() {
            if *legal == 0 {
                *p = 0.0;
                continue;
            }
            let here = if i == self.choice { chosen } else { 0.0 };
            let log = self.floored.apply(*p).ln();
            *p = here - *p * (chosen + by_entropy * (log - mean));
        }
    }
}

impl PpoLoss {
    /// L.
    pub fn logits(&self) -> usize {
        self.heads.iter().map(|head| head.choices).sum()
    }

    /// The loss of `outputs` `[N][L + 1]` (logits, then V) as a report ([`PpoReport::parse`]), and
    /// its gradient, which overwrites `gradient`.
    pub fn gradient(
        &self,
        batch: &PpoBatch<'_>,
        mut reference: Reference<'_>,
        outputs: &[f32],
        gradient: &mut [f32],
        report: &mut [f64],
    ) {
        let rows = batch.advantages.len();
        let l = self.logits();
        let mut sums = ReportSums::new(report);
        for row in 0..rows {
            self.forward(BatchRow { batch, row }, &mut reference, outputs, gradient, &mut sums);
        }
        self.losses(&mut sums);
        let reference: &[f32] = match &reference {
            Reference::Record(to) => to,
            Reference::Given(from) => from,
        };
        for row in 0..rows {
            let gradient = &mut gradient[row * (l + 1)..][..l + 1];
            self.backward(BatchRow { batch, row }, reference, outputs, gradient, &sums);
        }
    }

    /// All heads of a row: number, columns of the logits, and whether the head is used in a
    /// decision, which is false for every head if the row is no decision.
    fn heads<'a>(
        &'a self,
        batch: &'a PpoBatch<'a>,
        row: usize,
    ) -> impl Iterator<Item = (usize, std::ops::Range<usize>, bool)> + 'a {
        let ops = legal_ops(self, batch, row);
        let op = batch.choices[row * self.heads.len()];
        let mut first = 0;
        self.heads.iter().enumerate().map(move |(k, head)| {
            let columns = first..first + head.choices;
            first = columns.end;
            (k, columns, ops > 1 && head.used_by >> op & 1 == 1)
        })
    }

    fn row<'a>(
        &self,
        batch: &PpoBatch<'a>,
        (row, k): (usize, usize),
        columns: std::ops::Range<usize>,
        p: &'a mut [f32],
    ) -> HeadRow<'a> {
        let legal = &batch.legal[row * self.logits()..][columns];
        let n = legal.iter().filter(|legal| **legal != 0).count();
        let choice = batch.choices[row * self.heads.len() + k] as usize;
        HeadRow { p, legal, choice, floored: Floored::new(n, self.heads[k].floor) }
    }

    /// Leaves the softmax of the used heads in `gradient`, writes the reference if it is to be
    /// recorded, and adds to the sums.
    fn forward(
        &self,
        BatchRow { batch, row }: BatchRow<'_>,
        reference: &mut Reference<'_>,
        outputs: &[f32],
        gradient: &mut [f32],
        sums: &mut ReportSums<'_>,
    ) {
        let (kk, l) = (self.heads.len(), self.logits());
        let (outputs, p) =
            (&outputs[row * (l + 1)..][..l + 1], &mut gradient[row * (l + 1)..][..l + 1]);
        let ops = legal_ops(self, batch, row);
        let advantage = batch.advantages[row];
        let mut log_ratio = 0.0;
        for (k, columns, used) in self.heads(batch, row) {
            let p = &mut p[columns.clone()];
            let legal = &batch.legal[row * l..][columns.clone()];
            if used {
                softmax(&outputs[columns.clone()], legal, p);
            } else {
                p.fill(0.0);
            }
            let head = self.row(batch, (row, k), columns, p);
            let log_prob = if used { head.log_prob() } else { 0.0 };
            let x = match reference {
                Reference::Record(to) => {
                    to[row * kk + k] = log_prob;
                    0.0
                }
                Reference::Given(from) => log_prob - from[row * kk + k],
            };
            if used {
                log_ratio += f64::from(x);
                let entropy = head.entropy();
                let step = self.surrogate(x, advantage);
                sums.add_head(k, &step, f64::from(x), f64::from(entropy));
            }
        }
        if ops > 0 {
            sums.add_value(outputs[l], batch.returns[row]);
        }
        if ops > 1 {
            sums.add_decision(log_ratio);
        }
    }

    /// The clipped objective of one head in one row.
    fn surrogate(&self, log_ratio: f32, advantage: f32) -> Surrogate {
        let ratio = math::exp(log_ratio);
        let clipped = ratio.clamp(1.0 - self.clip, 1.0 + self.clip);
        let (free, bound) = (ratio * advantage, clipped * advantage);
        // A NaN is passed on: the caller skips such an update.
        let is_bound = bound < free;
        Surrogate { ratio, value: if is_bound { bound } else { free }, is_bound }
    }

    /// Converts sums over rows to the terms of the loss.
    fn losses(&self, sums: &mut ReportSums<'_>) {
        let (mut policy, mut entropy) = (0.0, 0.0);
        for (k, spec) in self.heads.iter().enumerate() {
            let [count, loss, mean] = sums.finish_head(k);
            policy += loss;
            let below = (f64::from(spec.entropy_floor) - mean).max(0.0);
            if count > 0.0 {
                entropy += f64::from(self.entropy_floor_coefficient) * below * below
                    - f64::from(spec.entropy_coefficient) * mean;
            }
        }
        sums.finish(policy, entropy, f64::from(self.value_coefficient));
    }

    /// The gradient of one row; overwrites the softmax of the row.
    fn backward(
        &self,
        BatchRow { batch, row }: BatchRow<'_>,
        reference: &[f32],
        outputs: &[f32],
        gradient: &mut [f32],
        sums: &ReportSums<'_>,
    ) {
        let (kk, l) = (self.heads.len(), self.logits());
        let advantage = batch.advantages[row];
        for (k, columns, used) in self.heads(batch, row) {
            if !used {
                continue;
            }
            let (count, mean_entropy) = sums.entropy(k);
            let head = self.row(batch, (row, k), columns.clone(), &mut gradient[columns]);
            let step = self.surrogate(head.log_prob() - reference[row * kk + k], advantage);
            let by_choice = if step.is_bound { 0.0 } else { -advantage * step.ratio };
            let spec = &self.heads[k];
            let below = (f64::from(spec.entropy_floor) - mean_entropy).max(0.0) as f32;
            let by_entropy =
                -spec.entropy_coefficient - 2.0 * self.entropy_floor_coefficient * below;
            head.differentiate(by_choice / count, by_entropy / count);
        }
        gradient[l] = 0.0;
        if legal_ops(self, batch, row) > 0 {
            let error = outputs[row * (l + 1) + l] - batch.returns[row];
            gradient[l] = 2.0 * self.value_coefficient * error / sums.rows();
        }
    }
}

/// The clipped objective of one head in one row.
struct Surrogate {
    ratio: f32,
    /// min(r·A, clip(r)·A).
    value: f32,
    /// Whether the clipped term is the smaller one: no gradient.
    is_bound: bool,
}

/// Legal choices of head 0.
fn legal_ops(loss: &PpoLoss, batch: &PpoBatch<'_>, row: usize) -> usize {
    let ops = loss.heads.first().map_or(0, |head| head.choices);
    let legal = &batch.legal[row * loss.logits()..][..ops];
    legal.iter().filter(|legal| **legal != 0).count()
}

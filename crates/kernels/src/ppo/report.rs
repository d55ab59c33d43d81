//! Statistics of a pass of the loss: sums while it runs, means when it is done.

use super::Surrogate;

/// Numbers in front of the heads'.
const FRONT: usize = 9;
/// Numbers of a head.
const HEAD: usize = 6;

/// f64 elements of the report of `heads` heads.
pub const fn report_len(heads: usize) -> usize {
    FRONT + HEAD * heads
}

/// A pass of the loss, as read back.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PpoReport {
    /// Rows that count.
    pub rows: u64,
    /// Rows in which more than one op was legal.
    pub decisions: u64,
    /// The minimised loss: policy and entropy loss plus the weighted value loss.
    pub loss: f64,
    /// Minus the sum over heads of the clipped objective.
    pub policy_loss: f64,
    /// Mean (V − R)², not weighted.
    pub value_loss: f64,
    /// Minus the entropy bonus, plus the penalty of entropies below their floor.
    pub entropy_loss: f64,
    /// Divergence from the reference policy.
    pub kl: f64,
    /// Mean of V.
    pub value_mean: f64,
    /// 1 − Var(R − V)/Var(R). Where all returns are the same it means nothing, and may be
    /// −∞ or NaN.
    pub explained_variance: f64,
    /// Per head.
    pub heads: Vec<HeadReport>,
}

/// One head, over the decisions in which it is used; zeros if there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeadReport {
    /// Number of decisions.
    pub count: u64,
    /// −mean of the clipped objective.
    pub loss: f64,
    /// Mean entropy over its largest possible value.
    pub entropy: f64,
    /// Its divergence from the reference.
    pub kl: f64,
    /// Share of decisions with a gradient that was clipped to zero.
    pub clipped: f64,
    /// Mean ratio.
    pub ratio: f64,
}

impl PpoReport {
    /// Reads a report of [`report_len`] elements; the empty one for any other length.
    pub fn parse(raw: &[f64]) -> Self {
        if raw.len() < FRONT || !(raw.len() - FRONT).is_multiple_of(HEAD) {
            return Self::default();
        }
        let (front, heads) = raw.split_at(FRONT);
        let head = |h: &[f64]| HeadReport {
            count: h[0] as u64,
            loss: h[1],
            entropy: h[2],
            kl: h[3],
            clipped: h[4],
            ratio: h[5],
        };
        Self {
            rows: front[0] as u64,
            decisions: front[1] as u64,
            loss: front[2],
            policy_loss: front[3],
            value_loss: front[4],
            entropy_loss: front[5],
            kl: front[6],
            value_mean: front[7],
            explained_variance: front[8],
            heads: heads.chunks_exact(HEAD).map(head).collect(),
        }
    }

    /// Whether the loss and all its parts are finite.
    pub fn is_finite(&self) -> bool {
        [self.loss, self.policy_loss, self.value_loss, self.entropy_loss, self.kl]
            .iter()
            .all(|v| v.is_finite())
    }
}

/// The report while rows are added: means are sums until [`ReportSums::finish`].
pub(super) struct ReportSums<'a> {
    raw: &'a mut [f64],
    /// Σ R, Σ R², Σ (R − V).
    returns: [f64; 3],
}

impl<'a> ReportSums<'a> {
    pub(super) fn new(raw: &'a mut [f64]) -> Self {
        raw.fill(0.0);
        Self { raw, returns: [0.0; 3] }
    }

    fn head(&mut self, k: usize) -> &mut [f64] {
        &mut self.raw[FRONT + k * HEAD..][..HEAD]
    }

    /// Adds the values of head `k` for one row in which the head is used.
    pub(super) fn add_head(&mut self, k: usize, step: &Surrogate, log_ratio: f64, entropy: f64) {
        let (kl, clipped) = (divergence(log_ratio), f64::from(u8::from(step.is_bound)));
        let row = [1.0, -f64::from(step.value), entropy, kl, clipped, f64::from(step.ratio)];
        self.head(k).iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
    }

    /// Turns the sums of a head into means; returns its count, loss and entropy.
    pub(super) fn finish_head(&mut self, k: usize) -> [f64; 3] {
        let head = self.head(k);
        let count = head[0];
        head[1..].iter_mut().for_each(|sum| *sum /= count.max(1.0));
        [count, head[1], head[2]]
    }

    /// Count and mean entropy of a head, when it is finished.
    pub(super) fn entropy(&self, k: usize) -> (f32, f64) {
        let head = &self.raw[FRONT + k * HEAD..][..HEAD];
        (head[0] as f32, head[2])
    }

    /// Rows that count.
    pub(super) fn rows(&self) -> f32 {
        self.raw[0] as f32
    }

    pub(super) fn add_value(&mut self, value: f32, target: f32) {
        let (value, target) = (f64::from(value), f64::from(target));
        self.raw[0] += 1.0;
        self.raw[4] += (value - target) * (value - target);
        self.raw[7] += value;
        for (sum, v) in self.returns.iter_mut().zip([target, target * target, target - value]) {
            *sum += v;
        }
    }

    pub(super) fn add_decision(&mut self, log_ratio: f64) {
        self.raw[1] += 1.0;
        self.raw[6] += divergence(log_ratio);
    }

    pub(super) fn finish(&mut self, policy: f64, entropy: f64, value_coefficient: f64) {
        let (rows, decisions) = (self.raw[0].max(1.0), self.raw[1].max(1.0));
        let squares = self.raw[4];
        self.raw[4] /= rows;
        self.raw[6] /= decisions;
        self.raw[7] /= rows;
        let [sum, sum_squares, rest] = self.returns;
        // Σ (x − mean)² = Σ x² − (Σ x)²/N, in f64.
        let spread = |squares: f64, sum: f64| squares - sum * sum / rows;
        self.raw[8] = 1.0 - spread(squares, rest) / spread(sum_squares, sum);
        (self.raw[3], self.raw[5]) = (policy, entropy);
        self.raw[2] = policy + entropy + value_coefficient * self.raw[4];
    }
}

/// `eˣ − 1 − x`, never negative.
fn divergence(x: f64) -> f64 {
    x.exp_m1() - x
}

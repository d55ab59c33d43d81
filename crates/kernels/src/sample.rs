//! Drawing actions of several heads, with the probabilities of the loss that they are learned with
//! ([`ppo`](super::ppo)): masks, floors, log-probabilities, entropies.
//!
//! Heads are drawn in order. Head 0 is the op. The legal choices of head 1, the place, depend on
//! the op. An op without a place is always legal; an op with a place is legal if it is legal in
//! some place. The legal choices of head 2, the kind, depend on the place, if the op uses one. A
//! head that the op does not use is pinned to choice 0: log-probability and entropy are exactly 0.
//! All other choices are legal.
//!
//! Numbers are keyed by (seed, [`Purpose::Actions`], env, step); head k takes the k-th number. So a
//! row's draw depends neither on the other rows nor on the rank. All instruction sets give the same
//! bits; one thread for each row is enough.

use meristem_device::random::{Purpose, Rng};

use super::math;
use super::ppo::{Floored, PpoHead};

/// Rules for drawing actions. Letters: `N` rows, `K` heads, `L` logits of all heads, `S` choices of
/// head 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampler {
    /// Heads in the order of their logits, at least two, with at most 32 ops.
    pub heads: Vec<PpoHead>,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Takes the most probable choice, among equals the first, instead of drawing one.
    pub greedy: bool,
}

/// Values of one step that all rows share.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SampleStep {
    /// Step of the key, counted over all rounds.
    pub step: u64,
    /// Env of the first row; the next rows belong to the next envs.
    pub first_env: u32,
    /// Factor of V.
    pub value_scale: f32,
}

impl SampleStep {
    /// Most choices of head 0: legality is a word with a bit for each.
    pub const OPS_MAX: usize = 32;

    /// Words of [`SampleStep::to_words`].
    pub const WORDS: usize = 4;

    /// Words on the device: the step's lower and upper half, the env, the factor's bits.
    pub fn to_words(self) -> [u32; Self::WORDS] {
        let Self { step, first_env, value_scale } = self;
        [step as u32, (step >> 32) as u32, first_env, value_scale.to_bits()]
    }

    fn from_words(words: &[u32]) -> Self {
        Self {
            step: u64::from(words[0]) | u64::from(words[1]) << 32,
            first_env: words[2],
            value_scale: f32::from_bits(words[3]),
        }
    }
}

/// Inputs of the rows.
#[derive(Clone, Copy, Debug)]
pub struct SampleFrom<'a> {
    /// Logits of all heads, then V, `[N][L + 1]`. A logit that is not finite counts as 0.
    pub outputs: &'a [f32],
    /// `[N][S][words]`, for each place: bit i of the first word is set if op i is legal; the
    /// remaining words have a bit for each choice of head 2, set if the choice is legal.
    pub legality: &'a [u32],
    /// [`SampleStep::to_words`].
    pub step: &'a [u32],
}

/// Results of a draw; all of them are overwritten.
#[derive(Debug)]
pub struct Sampled<'a> {
    /// `[N][K]`.
    pub choices: &'a mut [u32],
    /// The masks of the draws, `[N][L]`: 1 where a choice was legal.
    pub legal: &'a mut [u8],
    /// Log-probabilities of the choices, `[N][K]`.
    pub log_probs: &'a mut [f32],
    /// Entropies divided by ln n, for n legal choices, `[N][K]`: in [0, 1], and 0 for one choice.
    pub entropies: &'a mut [f32],
    /// V times the factor, `[N]`.
    pub values: &'a mut [f32],
}

impl Sampler {
    /// L.
    pub fn logits(&self) -> usize {
        self.heads.iter().map(|head| head.choices).sum()
    }

    /// S.
    pub fn places(&self) -> usize {
        self.heads.get(1).map_or(0, |head| head.choices)
    }

    /// Words of a place: one for the ops, then a bit for each choice of head 2.
    pub fn words(&self) -> usize {
        1 + self.heads.get(2).map_or(0, |head| head.choices.div_ceil(32))
    }

    /// Draws all rows.
    pub fn draw(&self, from: &SampleFrom<'_>, to: &mut Sampled<'_>) {
        let (rows, k, l) = (to.values.len(), self.heads.len(), self.logits());
        let s = self.places() * self.words();
        let step = SampleStep::from_words(from.step);
        for row in 0..rows {
            let (logits, value) = from.outputs[row * (l + 1)..][..l + 1].split_at(l);
            to.values[row] = step.value_scale * value[0];
            let env = u64::from(step.first_env) + row as u64;
            let mut rng = Rng::new(self.seed, Purpose::Actions, env, step.step);
            let places = &from.legality[row * s..][..s];
            let legal = &mut to.legal[row * l..][..l];
            let (mut chosen, mut first) = ([0; 2], 0);
            for (head, spec) in self.heads.iter().enumerate() {
                let columns = first..first + spec.choices;
                first = columns.end;
                let legal = &mut legal[columns.clone()];
                let [op, place] = chosen;
                self.mask(head, op, place, places, legal);
                let of = Distribution::new(&logits[columns], legal, spec.floor);
                let choice = if self.greedy { of.likeliest() } else { of.draw(rng.uniform()) };
                if let Some(chosen) = chosen.get_mut(head) {
                    *chosen = choice;
                }
                let at = row * k + head;
                to.choices[at] = choice as u32;
                to.log_probs[at] = of.log_prob(choice);
                to.entropies[at] = of.entropy();
            }
        }
    }

    /// The choices of a head that are legal, with the op and the place that were chosen before it.
    fn mask(&self, head: usize, op: usize, place: usize, places: &[u32], legal: &mut [u8]) {
        let is = |bit: usize, bits: u32| bits >> bit & 1 == 1;
        let placed = |op| self.heads.get(1).is_some_and(|place| is(op, place.used_by));
        let words = self.words();
        let mut ops = places.iter().step_by(words);
        match head {
            0 => legal.iter_mut().enumerate().for_each(|(op, legal)| {
                *legal = u8::from(!placed(op) || ops.clone().any(|place| is(op, *place)));
            }),
            _ if !is(op, self.heads[head].used_by) => {
                legal.fill(0);
                legal.iter_mut().take(1).for_each(|legal| *legal = 1);
            }
            1 => legal.iter_mut().zip(&mut ops).for_each(|(to, ops)| *to = is(op, *ops).into()),
            2 if placed(op) => {
                let kinds = places.get(place * words + 1..).unwrap_or_default();
                let kind = |i: usize| kinds.get(i / 32).is_some_and(|bits| is(i % 32, *bits));
                legal.iter_mut().enumerate().for_each(|(i, to)| *to = kind(i).into());
            }
            _ => legal.fill(1),
        }
    }
}

/// The probabilities of one head of one row. They are recomputed at each use, because heads are
/// small and this needs no memory.
struct Distribution<'a> {
    logits: &'a [f32],
    legal: &'a [u8],
    largest: f32,
    sum: f32,
    floored: Floored,
}

impl<'a> Distribution<'a> {
    fn new(logits: &'a [f32], legal: &'a [u8], floor: f32) -> Self {
        let n = legal.iter().filter(|legal| **legal != 0).count();
        let (largest, sum) = (f32::NEG_INFINITY, 0.0);
        let mut it = Self { logits, legal, largest, sum, floored: Floored::new(n, floor) };
        it.largest = it.choices().map(|i| it.logit(i)).fold(largest, f32::max);
        let sum: f32 = it.choices().map(|i| math::exp(it.logit(i) - it.largest)).sum();
        it.sum = sum.max(f32::MIN_POSITIVE);
        it
    }

    /// The legal choices.
    fn choices(&self) -> impl DoubleEndedIterator<Item = usize> {
        (0..self.legal.len()).filter(|i| self.legal[*i] != 0)
    }

    fn logit(&self, choice: usize) -> f32 {
        let logit = self.logits[choice];
        if logit.is_finite() { logit } else { 0.0 }
    }

    /// p' of a legal choice.
    fn probability(&self, choice: usize) -> f32 {
        self.floored.apply(math::exp(self.logit(choice) - self.largest) / self.sum)
    }

    /// The choice at a place in [0, 1) among the probabilities laid end to end; always a choice
    /// with a probability above 0, even if their sum is rounded. 0 if none is legal.
    fn draw(&self, uniform: f32) -> usize {
        let mut left = uniform;
        let drawn = self.choices().find(|choice| {
            left -= self.probability(*choice);
            left < 0.0
        });
        drawn.or_else(|| self.choices().rfind(|i| self.probability(*i) > 0.0)).unwrap_or(0)
    }

    fn likeliest(&self) -> usize {
        let mut best = (0, f32::NEG_INFINITY);
        for choice in self.choices() {
            let p = self.probability(choice);
            if p > best.1 {
                best = (choice, p);
            }
        }
        best.0
    }

    fn log_prob(&self, choice: usize) -> f32 {
        if self.floored.n < 2 { 0.0 } else { self.probability(choice).ln() }
    }

    /// Entropy divided by ln n, for n legal choices; 0 for fewer than two.
    fn entropy(&self) -> f32 {
        if self.floored.n < 2 {
            return 0.0;
        }
        let term = |p: f32| if p > 0.0 { p * p.ln() } else { 0.0 };
        let sum: f32 = self.choices().map(|choice| term(self.probability(choice))).sum();
        -sum / (self.floored.n as f32).ln()
    }
}

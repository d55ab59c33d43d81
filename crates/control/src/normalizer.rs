//! Running mean and variance of observations.

use serde::{Deserialize, Serialize};

/// Normalised values are clipped to ±`CLIP`.
pub const CLIP: f32 = 10.0;

/// Added to every variance; the smallest divisor is .01.
const EPSILON: f64 = 1e-4;

/// Count, mean and sum of squared deviations per feature, in f64 (Welford 1962). [`Moments::merge`]
/// uses the formula of Chan, Golub and LeVeque (1979).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moments {
    count: f64,
    mean: Vec<f64>,
    m2: Vec<f64>,
}

impl Moments {
    /// Empty moments, for rows of `len` features.
    pub fn new(len: usize) -> Self {
        Self { count: 0.0, mean: vec![0.0; len], m2: vec![0.0; len] }
    }

    /// Number of features of a row.
    pub fn len(&self) -> usize {
        self.mean.len()
    }

    /// Whether a row has no features.
    pub fn is_empty(&self) -> bool {
        self.mean.is_empty()
    }

    /// Number of rows added.
    pub fn count(&self) -> f64 {
        self.count
    }

    /// Mean per feature.
    pub fn mean(&self) -> &[f64] {
        &self.mean
    }

    /// Population variance of a feature; 1 for fewer than two rows.
    pub fn variance(&self, feature: usize) -> f64 {
        if self.count < 2.0 { 1.0 } else { self.m2[feature] / self.count }
    }

    /// Serialises count, means and sums of squared deviations, for other ranks.
    pub(crate) fn to_vec(&self) -> Vec<f64> {
        [&[self.count], &self.mean[..], &self.m2[..]].concat()
    }

    /// Decodes the numbers of [`Moments::to_vec`].
    pub(crate) fn from_slice(numbers: &[f64]) -> Self {
        let (count, rest) = numbers.split_first().map_or((0.0, numbers), |(c, rest)| (*c, rest));
        let (mean, m2) = rest.split_at(rest.len() / 2);
        Self { count, mean: mean.to_vec(), m2: m2.to_vec() }
    }

    /// Adds a row of features.
    pub fn push(&mut self, row: &[f32]) {
        self.count += 1.0;
        for ((mean, m2), x) in self.mean.iter_mut().zip(&mut self.m2).zip(row) {
            let delta = f64::from(*x) - *mean;
            *mean += delta / self.count;
            *m2 += delta * (f64::from(*x) - *mean);
        }
    }

    /// Adds the rows of `other`.
    pub fn merge(&mut self, other: &Self) {
        let count = self.count + other.count;
        if count == 0.0 {
            return;
        }
        let both = self.mean.iter_mut().zip(&mut self.m2).zip(other.mean.iter().zip(&other.m2));
        for ((mean, m2), (other_mean, other_m2)) in both {
            let delta = other_mean - *mean;
            *m2 += other_m2 + delta * delta * (self.count * other.count / count);
            *mean += delta * (other.count / count);
        }
        self.count = count;
    }
}

/// Normalises observations with moments that stay fixed during a rollout. The rows of the rollout
/// are collected separately; [`Normalizer::commit`] merges them between rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Normalizer {
    frozen: Moments,
    gathered: Moments,
}

impl Normalizer {
    /// A normaliser for rows of `len` features. Before the first commit rows are only clipped.
    pub fn new(len: usize) -> Self {
        Self { frozen: Moments::new(len), gathered: Moments::new(len) }
    }

    /// Number of features of a row.
    pub fn len(&self) -> usize {
        self.frozen.len()
    }

    /// Whether a row has no features.
    pub fn is_empty(&self) -> bool {
        self.frozen.is_empty()
    }

    /// Adds a row to the next commit, then normalises it in place: (x − mean)/std, clipped to ±10.
    pub fn gather(&mut self, row: &mut [f32]) {
        self.gathered.push(row);
        self.normalize(row);
    }

    /// Normalises a row in place, without adding it to the next commit.
    pub fn normalize(&self, row: &mut [f32]) {
        for (feature, (x, mean)) in row.iter_mut().zip(self.frozen.mean()).enumerate() {
            let std = match self.frozen.count() {
                0.0 => 1.0,
                _ => (self.frozen.variance(feature) + EPSILON).sqrt(),
            };
            *x = ((f64::from(*x) - mean) / std).clamp(-f64::from(CLIP), f64::from(CLIP)) as f32;
        }
    }

    /// Merges the rows collected since the last commit.
    pub fn commit(&mut self) {
        let nothing = Moments::new(self.len());
        let gathered = std::mem::replace(&mut self.gathered, nothing);
        self.frozen.merge(&gathered);
    }

    /// Merges the rows that each rank collected since its last commit, in rank order.
    pub(crate) fn commit_all<'a>(&mut self, all: impl Iterator<Item = &'a Moments>) {
        self.gathered = Moments::new(self.len());
        all.for_each(|moments| self.frozen.merge(moments));
    }

    /// Moments of the rows collected since the last commit.
    pub(crate) fn gathered(&self) -> &Moments {
        &self.gathered
    }

    /// The moments used for normalisation.
    pub fn moments(&self) -> &Moments {
        &self.frozen
    }

    /// Whether a normaliser from a file is valid for rows of `len` features.
    pub(crate) fn fits(&self, len: usize) -> bool {
        let fine = |moments: &Moments| {
            moments.mean.len() == len
                && moments.m2.len() == len
                && moments.count.is_finite()
                && moments.count >= 0.0
                && moments.mean.iter().all(|x| x.is_finite())
                && moments.m2.iter().all(|x| x.is_finite() && *x >= 0.0)
        };
        fine(&self.frozen) && fine(&self.gathered)
    }
}

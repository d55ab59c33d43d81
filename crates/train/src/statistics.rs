//! Mean, standard deviation and confidence interval of a few measurements, and of their paired
//! differences; the share of a variance that groups explain.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Mean, standard deviation and confidence interval of some measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Number of measurements.
    pub count: usize,
    /// Mean of the measurements.
    pub mean: f64,
    /// Sample standard deviation, `sqrt(Σ(x − mean)²/(n − 1))`; null for a single measurement.
    pub std: Option<f64>,
    /// Half the width of the 95 % confidence interval of the mean, by Student's t; null for a
    /// single measurement.
    #[serde(default)]
    pub ci95: Option<f64>,
}

/// The 97.5 % quantile of Student's t with this many degrees of freedom, with an error below .001.
fn t_quantile(freedom: usize) -> f64 {
    /// For 1, 2, … degrees of freedom.
    const FIRST: [f64; 10] =
        [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228];
    // The expansion around the normal quantile in powers of 1/n (Abramowitz and Stegun, 26.7.5).
    let n = freedom as f64;
    let expansion = || 1.960 + 2.372 / n + 2.823 / n.powi(2) + 2.556 / n.powi(3);
    FIRST.get(freedom.wrapping_sub(1)).copied().unwrap_or_else(expansion)
}

impl Spread {
    /// The spread of `values`; `None` if there are none.
    pub fn from_values(values: &[f64]) -> Option<Self> {
        let (count, n) = (values.len(), values.len() as f64);
        if count == 0 {
            return None;
        }
        let mean = values.iter().sum::<f64>() / n;
        let squares: f64 = values.iter().map(|x| (x - mean) * (x - mean)).sum();
        let std = (count > 1).then(|| (squares / (n - 1.0)).sqrt());
        let ci95 = std.map(|std| t_quantile(count - 1) * std / n.sqrt());
        Some(Self { count, mean, std, ci95 })
    }
}

/// Paired differences of one contender from another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PairedDifference {
    /// Spread of the differences, this contender's value minus the other's.
    #[serde(flatten)]
    pub spread: Spread,
    /// Number of pairs in which this contender's value is larger.
    pub ahead: usize,
}

impl PairedDifference {
    /// The differences of pairs (this contender's value, the other's); `None` without pairs.
    pub fn from_pairs(pairs: &[(f64, f64)]) -> Option<Self> {
        let differences: Vec<f64> = pairs.iter().map(|(own, other)| own - other).collect();
        let ahead = differences.iter().filter(|difference| **difference > 0.0).count();
        Spread::from_values(&differences).map(|spread| Self { spread, ahead })
    }
}

/// Share of the variance of `values` that their groups explain: ε² (Kelley 1935), the correlation
/// ratio η² corrected for its bias, `1 − (1 − η²)·(n − 1)/(n − k)` for n values in k groups. η² is
/// the variance between the groups divided by the total variance. The result is at least 0.
/// `group_of` has the group of each value. `None` with fewer than two groups, fewer than two values
/// for each group on average, or without variance.
pub fn explained_share(values: &[f64], group_of: &[usize]) -> Option<f64> {
    let mut groups: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
    for (value, group) in values.iter().zip(group_of) {
        let (sum, count) = groups.entry(*group).or_default();
        (*sum, *count) = (*sum + value, *count + 1.0);
    }
    let (n, k) = (values.len() as f64, groups.len() as f64);
    if k < 2.0 || n < 2.0 * k {
        return None;
    }
    let mean = values.iter().sum::<f64>() / n;
    let all: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
    let between: f64 =
        groups.values().map(|(sum, count)| count * (sum / count - mean).powi(2)).sum();
    // Equal values have a variance of rounding errors.
    let scale = n * (mean * f64::EPSILON).powi(2) * n;
    (all.is_finite() && all > scale).then(|| {
        let unexplained = (1.0 - between / all) * (n - 1.0) / (n - k);
        (1.0 - unexplained).max(0.0)
    })
}

/// The group of each of `values`, for [`explained_share`]. If all values are finite numbers, the
/// groups are at most `bins` bins with about equal numbers of values, and equal values are in one
/// bin. Otherwise every distinct text is a group.
pub fn groups(values: &[&str], bins: usize) -> Vec<usize> {
    let numbers: Option<Vec<f64>> =
        values.iter().map(|value| value.parse().ok().filter(|x: &f64| x.is_finite())).collect();
    let Some(numbers) = numbers else {
        let mut texts = values.to_vec();
        texts.sort_unstable();
        texts.dedup();
        let group = |value: &&str| texts.binary_search(value).unwrap_or_default();
        return values.iter().map(group).collect();
    };
    let mut sorted = numbers.clone();
    sorted.sort_by(f64::total_cmp);
    let group = |number: &f64| {
        let before = sorted.partition_point(|other| other < number);
        before * bins / sorted.len()
    };
    numbers.iter().map(group).collect()
}

#[cfg(test)]
mod tests {
    use meristem_device::random::{Purpose, Rng};

    use super::*;

    /// The sum over all pairs of (xᵢ − xⱼ)² is 2n² times the variance with divisor n, so that no
    /// mean is needed.
    fn slow_std(values: &[f64]) -> f64 {
        let n = values.len() as f64;
        let pairs = values.iter().flat_map(|a| values.iter().map(move |b| (a - b).powi(2)));
        (pairs.sum::<f64>() / (2.0 * n * (n - 1.0))).sqrt()
    }

    #[test]
    fn spreads_are_those_of_a_slow_direct_sum() {
        for case in 0..200 {
            let mut rng = Rng::new(case, Purpose::Test, 0, 0);
            let count = 2 + case as usize % 9;
            let mut draw = || 100.0 * f64::from(rng.uniform());
            let values: Vec<f64> = (0..count).map(|_| draw()).collect();
            let spread = Spread::from_values(&values).unwrap();
            let mean = values.iter().fold(0.0, |sum, x| sum + x / count as f64);
            // A few roundings of numbers up to 100, of 1.1e-16 each; the sum of their squares is
            // divided by at least 1.
            assert!((spread.mean - mean).abs() < 1e-12, "{values:?}");
            assert!((spread.std.unwrap() - slow_std(&values)).abs() < 1e-9, "{values:?}");
            assert_eq!(spread.count, count);
            // The same numbers in another order.
            let other: Vec<f64> = values.iter().rev().copied().collect();
            let pairs: Vec<_> = values.iter().copied().zip(other.iter().copied()).collect();
            let paired = PairedDifference::from_pairs(&pairs).unwrap();
            assert!(paired.spread.mean.abs() < 1e-12);
            assert_eq!(paired.ahead, count / 2, "each pair is there both ways round");
        }
    }

    #[test]
    fn one_measurement_has_no_spread_and_none_no_mean() {
        assert_eq!(
            Spread::from_values(&[3.0]),
            Some(Spread { count: 1, mean: 3.0, std: None, ci95: None })
        );
        assert_eq!(Spread::from_values(&[]), None);
        assert_eq!(PairedDifference::from_pairs(&[]), None);
    }

    /// Against tables of Student's t, and an interval worked out by hand: 4.303 · 1/√3.
    #[test]
    fn intervals_follow_students_t() {
        for (freedom, quantile) in
            [(1, 12.706), (11, 2.201), (20, 2.086), (60, 2.000), (999, 1.962)]
        {
            assert!((t_quantile(freedom) - quantile).abs() < 1e-3, "{freedom}");
        }
        let spread = Spread::from_values(&[1.0, 2.0, 3.0]).unwrap();
        assert!((spread.ci95.unwrap() - 2.4843).abs() < 1e-3, "{spread:?}");
    }

    /// Pairing matters because hosts differ far more between seeds than between contenders.
    #[test]
    fn a_constant_lead_has_no_spread() {
        let pairs = [(51.0, 50.0), (81.0, 80.0), (21.0, 20.0)];
        let paired = PairedDifference::from_pairs(&pairs).unwrap();
        let lead = Spread { count: 3, mean: 1.0, std: Some(0.0), ci95: Some(0.0) };
        assert_eq!(paired, PairedDifference { spread: lead, ahead: 3 });
    }

    /// By hand: groups 1, 3 and 5, 7 have means 2 and 6 about 4; 16 of 20 squares are between them.
    #[test]
    fn the_explained_share_is_without_its_bias() {
        let share = explained_share(&[1.0, 3.0, 5.0, 7.0], &[0, 0, 1, 1]).unwrap();
        assert!((share - (1.0 - 0.2 * 3.0 / 2.0)).abs() < 1e-15, "{share}");
        // The groups explain less than chance would.
        assert_eq!(explained_share(&[1.0, 3.0, 3.0, 1.0], &[0, 0, 1, 1]), Some(0.0));
        assert_eq!(explained_share(&[0.1; 9], &[0, 0, 0, 1, 1, 1, 2, 2, 2]), None);
        assert_eq!(explained_share(&[1.0, 2.0, 3.0], &[0, 1, 1]), None);
        assert_eq!(explained_share(&[1.0, 2.0, 3.0, 4.0], &[0; 4]), None);
        assert_eq!(explained_share(&[1.0, 2.0, f64::NAN, 4.0], &[0, 0, 1, 1]), None);
    }

    #[test]
    fn numbers_are_in_bins_of_equal_count_and_texts_by_text() {
        assert_eq!(groups(&["0.1", "1e-3", "10", "1", "0.01", "2"], 3), [1, 0, 2, 1, 0, 2]);
        // Equal numbers stay together, in any form.
        assert_eq!(groups(&["1", "1.0", "1", "2", "3", "3"], 3), [0, 0, 0, 1, 2, 2]);
        assert_eq!(groups(&["b", "a", "inf", "a"], 5), [1, 0, 2, 0]);
        assert_eq!(groups(&[], 5), [0; 0]);
    }
}

//! Training targets of the policy and of V: advantages and returns.

use serde::{Deserialize, Serialize};

use crate::gae::{Discounts, Trajectories, advantages};

/// Smallest divisor of the returns.
const RETURN_STD_MIN: f64 = 1e-3;

/// Running mean and variance: of all returns, which are divided by their standard deviation before
/// V is trained on them; and of the advantages, with several ranks or minibatches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ScalarMoments {
    pub(super) count: f64,
    pub(super) mean: f64,
    pub(super) m2: f64,
}

impl ScalarMoments {
    /// The standard deviation, at least [`RETURN_STD_MIN`]; 1 for fewer than two returns.
    pub(super) fn std(&self) -> f64 {
        if self.count < 2.0 { 1.0 } else { (self.m2 / self.count).sqrt().max(RETURN_STD_MIN) }
    }

    /// Mean and standard deviation, without a lower bound.
    pub(super) fn mean_and_std(&self) -> (f64, f64) {
        (self.mean, (self.m2 / self.count.max(1.0)).sqrt())
    }

    /// Whether a scale from a file is valid.
    pub(super) fn is_usable(&self) -> bool {
        let finite = [self.count, self.mean, self.m2].iter().all(|x| x.is_finite());
        finite && self.count >= 0.0 && self.m2 >= 0.0
    }

    /// Adds the returns of `other` (Chan, Golub and LeVeque 1979).
    pub(super) fn merge(&mut self, other: &Self) {
        let count = self.count + other.count;
        if count > 0.0 {
            let delta = other.mean - self.mean;
            self.m2 += other.m2 + delta * delta * (self.count * other.count / count);
            self.mean += delta * (other.count / count);
            self.count = count;
        }
    }

    /// Serialises to count, mean and sum of squared deviations, for other ranks.
    pub(super) fn to_array(self) -> [f64; 3] {
        [self.count, self.mean, self.m2]
    }

    /// Decodes the numbers of [`ScalarMoments::to_array`].
    pub(super) fn from_array([count, mean, m2]: [f64; 3]) -> Self {
        Self { count, mean, m2 }
    }

    pub(super) fn push(&mut self, x: f64) {
        self.count += 1.0;
        let delta = x - self.mean;
        self.mean += delta / self.count;
        self.m2 += delta * (x - self.mean);
    }
}

/// Parameters of the computation of targets from rewards.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Targets {
    pub(super) discounts: Discounts,
    /// Smallest divisor in the normalisation of advantages.
    pub(super) advantage_std_floor: f64,
    /// Whether each minibatch normalises its own advantages, so that those of the round stay as
    /// they are.
    pub(super) by_minibatch: bool,
}

impl Targets {
    /// Writes the advantages, normalised over the round, and the returns, divided by the new
    /// scale's standard deviation. The new scale, which is returned, includes these returns.
    pub(super) fn write(
        &self,
        trajectories: &Trajectories<'_>,
        mut scale: ScalarMoments,
        a: &mut [f32],
        returns: &mut [f32],
    ) -> ScalarMoments {
        self.write_raw(trajectories, &mut scale, a, returns);
        let n = a.len().max(1) as f64;
        let mean = a.iter().copied().map(f64::from).sum::<f64>() / n;
        let variance = a.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n;
        self.normalise(scale.std(), (mean, variance.sqrt()), a, returns);
        scale
    }

    /// Writes advantages and returns unnormalised, and adds the returns to `scale`.
    fn write_raw(
        &self,
        trajectories: &Trajectories<'_>,
        scale: &mut ScalarMoments,
        a: &mut [f32],
        returns: &mut [f32],
    ) {
        advantages(trajectories, self.discounts, a);
        for ((to, a), value) in returns.iter_mut().zip(&*a).zip(trajectories.values) {
            *to = a + value;
            scale.push(f64::from(*to));
        }
    }

    /// Writes advantages and returns unnormalised. Returns the moments of the returns and of the
    /// advantages, for merging over the ranks.
    pub(super) fn write_part(
        &self,
        trajectories: &Trajectories<'_>,
        a: &mut [f32],
        returns: &mut [f32],
    ) -> [ScalarMoments; 2] {
        let [mut scale, mut of_advantages] = [ScalarMoments::default(); 2];
        self.write_raw(trajectories, &mut scale, a, returns);
        a.iter().for_each(|x| of_advantages.push(f64::from(*x)));
        [scale, of_advantages]
    }

    /// Subtracts from each advantage of `[steps][envs]` the mean advantage at the same step of the
    /// other envs with the same index modulo `members`. An env without such others keeps its own.
    pub(super) fn compare_members(advantages: &mut [f32], envs: usize, members: usize) {
        let members = members.clamp(1, envs.max(1));
        for row in advantages.chunks_exact_mut(envs.max(1)) {
            for member in 0..members {
                let of_member = || row.iter().skip(member).step_by(members);
                let (count, sum) = (of_member().count(), of_member().copied().map(f64::from).sum());
                if count > 1 {
                    let (others, sum): (f64, f64) = ((count - 1) as f64, sum);
                    let own = row.iter_mut().skip(member).step_by(members);
                    own.for_each(|a| {
                        let a_own = f64::from(*a);
                        *a = (a_own - (sum - a_own) / others) as f32;
                    });
                }
            }
        }
    }

    /// Divides the returns by `returns_std`, and normalises the advantages with `mean` and `std`.
    pub(super) fn normalise(
        &self,
        returns_std: f64,
        (mean, std): (f64, f64),
        a: &mut [f32],
        returns: &mut [f32],
    ) {
        returns.iter_mut().for_each(|x| *x = (f64::from(*x) / returns_std) as f32);
        let std = std.max(self.advantage_std_floor);
        a.iter_mut().for_each(|x| *x = ((f64::from(*x) - mean) / std) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envs_of_a_member_are_compared_with_the_others() {
        // Two steps of five envs, of two members: 0, 2, 4 and 1, 3.
        let mut a = [1.0, 10.0, 2.0, 20.0, 6.0, 0.0, 1.0, 0.0, 1.0, 3.0];
        Targets::compare_members(&mut a, 5, 2);
        assert_eq!(a, [-3.0, -10.0, -1.5, 10.0, 4.5, -1.5, 0.0, -1.5, 0.0, 3.0]);
        let mut alone = [1.0, 2.0, 3.0];
        Targets::compare_members(&mut alone, 3, 3);
        assert_eq!(alone, [1.0, 2.0, 3.0]);
    }

    #[test]
    fn advantages_are_normalised_and_returns_only_scaled() {
        let discounts = Discounts { gamma: 1.0, lambda: 1.0 };
        let targets = Targets { discounts, advantage_std_floor: 0.1, by_minibatch: false };
        let trajectories = Trajectories {
            envs: 1,
            rewards: &[2.0, 0.0, 4.0],
            values: &[0.0, 3.0, 1.0],
            bootstraps: &[0.0; 3],
            truncated: &[0; 3],
            terminated: &[1; 3],
        };
        let (mut a, mut returns) = ([0.0; 3], [0.0; 3]);
        let scale = targets.write(&trajectories, ScalarMoments::default(), &mut a, &mut returns);
        // Returns 2, 0, 4: mean 2, variance 8/3. Advantages 2, −3, 3: mean 2/3, variance 62/9.
        let std = (8.0f64 / 3.0).sqrt();
        for (got, expected) in returns.iter().zip([2.0, 0.0, 4.0]) {
            assert!((f64::from(*got) - expected / std).abs() < 1e-6);
        }
        for (got, x) in a.iter().zip([2.0, -3.0, 3.0]) {
            let expected = (x - 2.0 / 3.0) / (62.0f64 / 9.0).sqrt();
            assert!((f64::from(*got) - expected).abs() < 1e-6);
        }
        assert!((scale.std() - std).abs() < 1e-12);
        // Equal advantages are not amplified.
        let trajectories = Trajectories { rewards: &[0.001, 3.0, 1.0], ..trajectories };
        targets.write(&trajectories, scale, &mut a, &mut returns);
        assert!(a.iter().all(|a| a.abs() < 0.01), "{a:?}");
    }
}

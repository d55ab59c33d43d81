//! Members of a run in the order of their scores (P6).

use serde::Serialize;

use super::{EnvSummary, Summary};

/// Results of the envs of one member.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Place {
    /// The member's settings, such as `lr=0.1; host=baseline`.
    pub member: String,
    /// Numbers of its envs.
    pub envs: Vec<usize>,
    /// Control score; `None` without a control split.
    pub control: Option<Spread>,
    /// Training score in the last step.
    pub train: Option<Spread>,
    /// Test score; `None` without a test split. It has no influence on the order.
    pub test: Option<Spread>,
    /// Mean number of trained parameters.
    pub parameters: f64,
}

/// Mean and spread of a score over the envs of a member, as shares.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Standard deviation of a sample, with n − 1 in its denominator; `None` for one env.
    pub deviation: Option<f64>,
}

impl Spread {
    /// `None` without scores, or if a score is missing or not finite.
    fn new(scores: &[Option<f64>]) -> Option<Self> {
        let scores: Vec<f64> = scores.iter().copied().collect::<Option<_>>()?;
        let count = scores.len() as f64;
        let mean = scores.iter().sum::<f64>() / count;
        if scores.is_empty() || !mean.is_finite() {
            return None;
        }
        let squares: f64 = scores.iter().map(|score| (score - mean).powi(2)).sum();
        let deviation = (scores.len() > 1).then(|| (squares / (count - 1.0)).sqrt());
        Some(Self { mean, deviation })
    }
}

impl Place {
    fn new(member: &str, envs: &[&EnvSummary]) -> Self {
        let spread = |score: fn(&EnvSummary) -> Option<f64>| {
            Spread::new(&envs.iter().map(|env| score(env)).collect::<Vec<_>>())
        };
        let parameters = envs.iter().map(|env| env.parameters as f64).sum::<f64>();
        Self {
            member: member.into(),
            envs: envs.iter().map(|env| env.env).collect(),
            control: spread(|env| env.control_score),
            train: spread(|env| Some(env.train_score)),
            test: spread(|env| env.test_score),
            parameters: parameters / envs.len() as f64,
        }
    }

    /// The score that determines the place: control, or training without a control split.
    pub fn score(&self) -> Option<f64> {
        self.control.or(self.train).map(|spread| spread.mean)
    }
}

impl Summary {
    /// The members from the best to the worst score, see [`Place::score`]; members without a score
    /// are last. Empty for a run without members.
    pub fn leaderboard(&self) -> Vec<Place> {
        let mut members: Vec<(&str, Vec<&EnvSummary>)> = vec![];
        for env in &self.envs {
            let Some(member) = env.member.as_deref() else { continue };
            match members.iter_mut().find(|(known, _)| *known == member) {
                Some((_, envs)) => envs.push(env),
                None => members.push((member, vec![env])),
            }
        }
        let mut places: Vec<Place> =
            members.iter().map(|(member, envs)| Place::new(member, envs)).collect();
        let key = |place: &Place| place.score().unwrap_or(f64::NEG_INFINITY);
        // Stable: equal scores keep the order of the members.
        places.sort_by(|a, b| key(b).total_cmp(&key(a)));
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_the_deviation_of_a_sample() {
        let spread = Spread::new(&[Some(1.0), Some(2.0), Some(6.0)]).unwrap();
        assert_eq!((spread.mean, spread.deviation), (3.0, Some(7f64.sqrt())));
        assert_eq!(Spread::new(&[Some(2.0)]).unwrap().deviation, None);
        for missing in [&[][..], &[Some(1.0), None], &[Some(f64::NAN)]] {
            assert_eq!(Spread::new(missing), None);
        }
    }
}

//! Members of a run in the order of their scores.

use serde::Serialize;

use super::{EnvSummary, Summary};
use crate::config::types::SEPARATOR;
use crate::record::recorded::Recorded;
use crate::statistics::Spread;
use crate::sweep::EndReason;

/// Row of the leaderboard: the results of the envs of one member.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Place {
    /// Number of the member; `None` for a run of an older version.
    pub number: Option<usize>,
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
    /// Steps that it was trained; `None` for a run of an older version.
    pub steps: Option<usize>,
    /// The reason for which it ended before the last step, if it did.
    pub ended: Option<Recorded<EndReason>>,
}

/// The spread of the scores; `None` without scores, or if one is missing or not finite.
fn spread(scores: &[Option<f64>]) -> Option<Spread> {
    let scores: Vec<f64> = scores.iter().copied().collect::<Option<_>>()?;
    Spread::from_values(&scores).filter(|spread| spread.mean.is_finite())
}

impl Place {
    fn new(member: &str, envs: &[&EnvSummary]) -> Self {
        let of = |score: fn(&EnvSummary) -> Option<f64>| {
            spread(&envs.iter().map(|env| score(env)).collect::<Vec<_>>())
        };
        let parameters = envs.iter().map(|env| env.parameters as f64).sum::<f64>();
        let first = envs.first();
        Self {
            number: first.and_then(|env| env.member_number),
            steps: first.and_then(|env| env.steps),
            ended: first.and_then(|env| env.ended.clone()),
            member: member.into(),
            envs: envs.iter().map(|env| env.env).collect(),
            control: of(|env| env.control_score),
            train: of(|env| Some(env.train_score)),
            test: of(|env| env.test_score),
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
    /// and members that diverged are last. Empty for a run without members.
    pub fn leaderboard(&self) -> Vec<Place> {
        // Runs of older versions have no numbers; there settings with equal texts are one member.
        let same = |a: &EnvSummary, b: &EnvSummary| {
            (a.member_number, &a.member) == (b.member_number, &b.member)
        };
        let mut members: Vec<(&str, Vec<&EnvSummary>)> = vec![];
        for env in &self.envs {
            let Some(member) = env.member.as_deref() else { continue };
            match members.iter_mut().find(|(_, envs)| same(envs[0], env)) {
                Some((_, envs)) => envs.push(env),
                None => members.push((member, vec![env])),
            }
        }
        ordered(members.iter().map(|(member, envs)| Place::new(member, envs)).collect())
    }

    /// Members that differ only by their seed as one place with the envs of all seeds, in the order
    /// of [`Self::leaderboard`]. A place of several members has no number, and no steps if theirs
    /// differ. Empty if no two members differ only by their seed.
    pub fn over_seeds(&self) -> Vec<Place> {
        let mut groups: Vec<(String, Vec<&EnvSummary>)> = vec![];
        for env in &self.envs {
            let Some(member) = env.member.as_deref() else { continue };
            let settings = member.split(SEPARATOR).filter(|own| !own.starts_with("seed="));
            let settings = settings.collect::<Vec<_>>().join(SEPARATOR);
            match groups.iter_mut().find(|(known, _)| *known == settings) {
                Some((_, envs)) => envs.push(env),
                None => groups.push((settings, vec![env])),
            }
        }
        let has_seeds = |envs: &[&EnvSummary]| envs.iter().any(|env| env.member != envs[0].member);
        if !groups.iter().any(|(_, envs)| has_seeds(envs)) {
            return vec![];
        }
        let place = |(settings, envs): &(String, Vec<&EnvSummary>)| {
            let same = |of: fn(&EnvSummary) -> Option<usize>| {
                of(envs[0]).filter(|own| envs.iter().all(|env| of(env) == Some(*own)))
            };
            let ended = envs[0].ended.clone();
            let ended = ended.filter(|_| envs.iter().all(|env| env.ended == envs[0].ended));
            let number = same(|env| env.member_number);
            Place { number, steps: same(|env| env.steps), ended, ..Place::new(settings, envs) }
        };
        ordered(groups.iter().map(place).collect())
    }
}

/// Sorts places from the best to the worst score. Places without a score, and places of members
/// that diverged, are last.
fn ordered(mut places: Vec<Place>) -> Vec<Place> {
    let diverged =
        |place: &Place| place.ended.as_ref().is_some_and(|reason| *reason == EndReason::Diverged);
    let score = |place: &Place| place.score().unwrap_or(f64::NEG_INFINITY);
    let key = |place: &Place| if diverged(place) { f64::NEG_INFINITY } else { score(place) };
    // Stable: equal scores keep the order of the members.
    places.sort_by(|a, b| key(b).total_cmp(&key(a)));
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_score_leaves_no_spread() {
        let three = spread(&[Some(1.0), Some(2.0), Some(6.0)]).unwrap();
        assert_eq!((three.mean, three.std), (3.0, Some(7f64.sqrt())));
        for missing in [&[][..], &[Some(1.0), None], &[Some(f64::NAN)]] {
            assert_eq!(spread(missing), None);
        }
    }
}

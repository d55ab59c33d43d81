//! Decisions of the schedulers: which members end, and which copy others.

use std::ops::Range;

use meristem_device::random::{Purpose, Rng};

use super::Sweep;
use crate::config::TrainConfig;

/// Share of the members that copy, and that are copied, in population-based training (truncation
/// selection in Jaderberg et al., "Population Based Training of Neural Networks", 2017).
const EXPLOITED: f64 = 0.2;

/// Successive halving (Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and
/// Hyperparameter Optimization", AISTATS 2016).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bracket {
    /// Steps of a member that goes on to the end.
    steps: usize,
    /// One of this many members goes on after each rung.
    reduction: usize,
    /// Number of rungs before the last step.
    rungs: u32,
}

impl Bracket {
    /// A bracket for `members` members with as many rungs as members and steps allow: at least one
    /// member is left after the last rung, and the first rung is after at least one step.
    pub(super) fn new(members: usize, steps: usize, reduction: usize) -> Self {
        Self { steps, reduction, rungs: log(members, reduction).min(log(steps, reduction)) }
    }

    /// The members that end at a rung, which they have reached with their last step. Equal scores
    /// are ranked by number.
    pub(super) fn losers(
        self,
        sweep: &Sweep,
        members: Range<usize>,
        config: &TrainConfig,
    ) -> Vec<usize> {
        let mut losers = vec![];
        for rung in (1..=self.rungs).rev() {
            let steps = self.steps_of(rung);
            let own = sweep.trained().filter(|(number, _)| members.contains(number));
            let own: Vec<usize> = own
                .filter_map(|(number, member)| (member.scores.len() == steps).then_some(number))
                .collect();
            let best = match config.places {
                // Members that have diverged count among those that do not go on.
                None => {
                    let kept = members.len() / self.reduction.pow(self.rungs + 1 - rung);
                    ranked(sweep, own.clone(), steps, kept.max(1))
                }
                // Asynchronous successive halving (Li et al., "A System for Massively Parallel
                // Hyperparameter Tuning", MLSys 2020), where a member is stopped at a rung or goes
                // on at once, and none is resumed.
                Some(_) => {
                    let reached =
                        members.clone().filter(|n| sweep.members[*n].scores.len() >= steps);
                    let reached: Vec<usize> = reached.collect();
                    let kept = reached.len() / self.reduction;
                    ranked(sweep, reached, steps, kept.max(1))
                }
            };
            losers.extend(own.into_iter().filter(|number| !best.contains(number)));
        }
        losers.sort_unstable();
        losers
    }

    /// Number of steps that a member has made when it reaches a rung; `rung` counts from the last
    /// rung, which is 1.
    fn steps_of(self, rung: u32) -> usize {
        self.steps.div_ceil(self.reduction.pow(rung))
    }
}

/// The best `count` of some members by their scores after `steps` steps.
fn ranked(sweep: &Sweep, mut members: Vec<usize>, steps: usize, count: usize) -> Vec<usize> {
    let score = |number: usize| sweep.members[number].scores[steps - 1];
    members.sort_by(|a, b| score(*b).total_cmp(&score(*a)).then(a.cmp(b)));
    members.truncate(count);
    members
}

/// The largest k with `base`^k at most `n`; 0 if n is 0.
fn log(n: usize, base: usize) -> u32 {
    n.checked_ilog(base).unwrap_or(0)
}

/// The brackets of Hyperband (Li et al., "Hyperband: A Novel Bandit-Based Approach to
/// Hyperparameter Optimization", JMLR 2018) with the members of each, in order. Bracket s has s
/// rungs, or fewer if it has too few members, and a share of the members in proportion to the
/// paper's ⌈(s_max + 1) / (s + 1)⌉ R^s.
pub(super) fn brackets(
    members: usize,
    steps: usize,
    reduction: usize,
) -> Vec<(Bracket, Range<usize>)> {
    let most = log(members, reduction).min(log(steps, reduction));
    let weight = |s: u32| (most as usize + 1).div_ceil(s as usize + 1) * reduction.pow(s);
    let total: usize = (0..=most).map(weight).sum();
    let (mut brackets, mut sum, mut first) = (vec![], 0, 0);
    for s in (0..=most).rev() {
        sum += weight(s);
        let end = members * sum / total;
        let bracket = Bracket::new(end - first, steps, reduction);
        brackets.push((Bracket { rungs: bracket.rungs.min(s), ..bracket }, first..end));
        first = end;
    }
    brackets
}

/// The median stopping rule (Golovin et al., "Google Vizier", KDD 2017, 3.2.2): from step `grace`
/// on, members whose best score is below the median of the means of all other members that have
/// made as many steps.
pub(super) fn below_median(sweep: &Sweep, grace: usize) -> Vec<usize> {
    let mut losers = vec![];
    for (number, member) in sweep.trained() {
        let steps = member.scores.len();
        let others = sweep.members.iter().enumerate();
        let others = others.filter(|(n, other)| *n != number && other.scores.len() >= steps);
        let mut means: Vec<f64> = others.map(|(_, other)| other.mean(steps)).collect();
        if steps < grace || means.is_empty() {
            continue;
        }
        means.sort_by(f64::total_cmp);
        let middle = means.len() / 2;
        let median = match means.len() % 2 {
            1 => means[middle],
            _ => 0.5 * (means[middle - 1] + means[middle]),
        };
        if member.best() < median {
            losers.push(number);
        }
    }
    losers
}

/// Members without a better score than before in their last `patience` steps.
pub(super) fn without_progress(sweep: &Sweep, patience: usize) -> Vec<usize> {
    let stalled = sweep.trained().filter(|(_, member)| {
        let scores = &member.scores;
        let (earlier, recent) = scores.split_at(scores.len().saturating_sub(patience));
        let best = |scores: &[f64]| scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        !earlier.is_empty() && best(recent) <= best(earlier)
    });
    stalled.map(|(number, _)| number).collect()
}

/// Members that copy another, and the member that each copies. For each of the worst fifth one of
/// the best fifth is drawn at random, and copied if its score is better.
pub(super) fn exploited(sweep: &Sweep, seed: u64, steps: usize) -> Vec<(usize, usize)> {
    let mut ranked: Vec<(usize, f64)> =
        sweep.trained().map(|(number, member)| (number, member.score())).collect();
    ranked.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
    let count = ((ranked.len() as f64 * EXPLOITED).ceil() as usize).min(ranked.len() / 2);
    let (best, worst) = (&ranked[..count], &ranked[ranked.len() - count..]);
    let pick = |&(member, score): &(usize, f64)| {
        let mut random = Rng::new(seed, Purpose::Exploration, member as u64, 2 * steps as u64);
        let (from, best) = best[random.below(count as u32) as usize];
        (best > score).then_some((member, from))
    };
    worst.iter().filter_map(pick).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{Change, EndReason, MemberState};
    use super::*;
    use crate::config::ConfigLayer;

    fn config(settings: &[(&str, &str)]) -> TrainConfig {
        let mut flags = ConfigLayer::default();
        settings.iter().for_each(|(key, text)| flags.set(key, text).unwrap());
        TrainConfig::resolve(ConfigLayer::default(), flags).unwrap()
    }

    /// Members with these scores after each step.
    fn sweep(scores: &[&[f64]]) -> Sweep {
        let member =
            |scores: &&[f64]| MemberState { scores: scores.to_vec(), ..MemberState::begun(0) };
        Sweep { members: scores.iter().map(member).collect() }
    }

    /// Numbers of the members left after each step, where member n has the score n.
    fn left(bracket: Bracket, members: usize, steps: usize) -> Vec<usize> {
        let mut all = sweep(&vec![&[][..]; members]);
        let mut left = vec![];
        for _ in 1..=steps {
            for (number, member) in all.members.iter_mut().enumerate() {
                if member.trains() {
                    member.scores.push(number as f64);
                }
            }
            for member in bracket.losers(&all, 0..members, &config(&[])) {
                all.record(&Change::End { member, reason: EndReason::Rung });
            }
            left.push(all.trained().count());
        }
        assert_eq!(all.trained().last().unwrap().0, members - 1, "the best is left");
        left
    }

    #[test]
    fn halving_keeps_one_of_r_after_each_rung() {
        let of = |members, steps, reduction| {
            left(Bracket::new(members, steps, reduction), members, steps)
        };
        assert_eq!(of(27, 9, 3), [9, 9, 3, 3, 3, 3, 3, 3, 3]);
        let large = of(512, 81, 3);
        let rungs = [1, 3, 9, 27].map(|step| (step, large[step - 1]));
        assert_eq!(rungs, [(1, 170), (3, 56), (9, 18), (27, 6)]);
        assert_eq!(large[80], 6);
        assert_eq!(of(4, 5, 2), [4, 2, 1, 1, 1]);
        // Fewer members than a rung needs, and fewer steps.
        assert_eq!(of(2, 9, 3), [2; 9]);
        assert_eq!(of(9, 2, 3), [9; 2]);
        assert_eq!(of(1, 9, 3), [1; 9]);
    }

    #[test]
    fn ties_are_ranked_by_number_and_diverged_members_are_not_kept() {
        let mut all = sweep(&[&[0.5][..]; 9]);
        all.members[0].ended = Some(EndReason::Diverged);
        all.members[4].scores[0] = f64::NEG_INFINITY;
        let bracket = Bracket::new(9, 9, 3);
        assert_eq!(bracket.losers(&all, 0..9, &config(&[])), [4, 5, 6, 7, 8]);
        all.members.iter_mut().for_each(|member| member.scores.push(0.5));
        assert!(bracket.losers(&all, 0..9, &config(&[])).is_empty(), "no rung");
    }

    /// With places a member is compared with all that have reached the rung so far, whether they
    /// have ended or not.
    #[test]
    fn with_places_a_rung_compares_with_those_that_have_reached_it() {
        let members = [("members", "lr=0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9"), ("places", "3")];
        let config = config(&members);
        let bracket = Bracket::new(9, 9, 3);
        let rung = |all: &Sweep| bracket.losers(all, 0..9, &config);
        // The first three reach the first rung: the best goes on.
        let mut all = sweep(&[&[0.5], &[0.6], &[0.4], &[], &[], &[], &[], &[], &[]]);
        all.members[3..].iter_mut().for_each(|member| member.begun = None);
        assert_eq!(rung(&all), [0, 2]);
        for member in [0, 2] {
            all.record(&Change::End { member, reason: EndReason::Rung });
        }
        // Two more reach it, the second with the best score so far: one of five goes on.
        for (member, score) in [(1, 0.1), (3, 0.55), (4, 0.7)] {
            all.members[member].begun = Some(1);
            all.members[member].scores.push(score);
        }
        assert_eq!(rung(&all), [3]);
        // The first member alone at the second rung goes on whatever its score.
        all.record(&Change::End { member: 3, reason: EndReason::Rung });
        all.members[1].scores.push(0.0);
        assert!(rung(&all).is_empty());
    }

    /// With R = 3 and 9 steps the paper's brackets have 9, 5 and 3 members.
    #[test]
    fn hyperband_has_a_bracket_for_each_number_of_rungs() {
        let shares = |members| {
            let all = brackets(members, 9, 3);
            all.into_iter().map(|(bracket, own)| (bracket.rungs, own)).collect::<Vec<_>>()
        };
        assert_eq!(shares(17 + 1), [(2, 0..9), (1, 9..15), (0, 15..18)]);
        let one = shares(1);
        assert_eq!(one.last().unwrap().1.end, 1, "every member is in a bracket");
        for members in 1..60 {
            let mut next = 0;
            for (_, own) in brackets(members, 27, 3) {
                assert_eq!(own.start, next);
                next = own.end;
            }
            assert_eq!(next, members);
        }
    }

    #[test]
    fn the_median_rule_compares_the_best_score_with_the_means_of_the_others() {
        let all = sweep(&[&[0.1, 0.2], &[0.5, 0.3], &[0.6, 0.6], &[0.9, 0.1]]);
        // Means 0.15, 0.4, 0.6, 0.5. Member 0: best 0.2 < 0.5. Member 1: best 0.5, others' median
        // 0.5. Member 2: 0.6 against 0.4. Member 3: 0.9 against 0.4.
        assert_eq!(below_median(&all, 1), [0]);
        assert!(below_median(&all, 3).is_empty(), "too early");
        assert!(below_median(&sweep(&[&[0.1]]), 1).is_empty(), "nobody to compare with");
        let mut ended = all.clone();
        ended.members[0].ended = Some(EndReason::Median);
        ended.members[0].scores.pop();
        // Of those with two steps, member 1 has the best score 0.5 against the others' median 0.55.
        assert_eq!(below_median(&ended, 1), [1]);
    }

    #[test]
    fn patience_counts_steps_since_the_best_score() {
        let all = sweep(&[&[0.5, 0.4, 0.5], &[0.5, 0.4, 0.6], &[0.1, 0.2, 0.2]]);
        assert_eq!(without_progress(&all, 2), [0]);
        assert_eq!(without_progress(&all, 1), [0, 2]);
        assert!(without_progress(&all, 3).is_empty());
    }

    #[test]
    fn the_worst_fifth_copies_the_best_fifth() {
        let scores: Vec<[f64; 1]> = (0..10).map(|n| [f64::from(n)]).collect();
        let all = sweep(&scores.iter().map(|score| &score[..]).collect::<Vec<_>>());
        let pairs = exploited(&all, 1, 4);
        assert_eq!(pairs.iter().map(|pair| pair.0).collect::<Vec<_>>(), [1, 0]);
        assert!(pairs.iter().all(|(_, from)| [8, 9].contains(from)), "{pairs:?}");
        assert_eq!(pairs, exploited(&all, 1, 4));
        let origins =
            |seed| (0..20).map(|step| exploited(&all, seed, step)[0].1).collect::<Vec<_>>();
        assert!(origins(1).contains(&8) && origins(1).contains(&9));
        assert!(exploited(&sweep(&[&[0.5], &[0.5]]), 1, 4).is_empty(), "a copy would be no better");
        assert!(exploited(&sweep(&[&[0.5]]), 1, 4).is_empty());
    }
}

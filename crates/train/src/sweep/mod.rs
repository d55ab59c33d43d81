//! Members that end early, copy each other, or begin when another has ended.
//!
//! After each step a scheduler looks at the control scores of all members and decides which of them
//! end, and in population-based training which copy others. With the setting `places`, a member
//! that ends gives its place to the next one, which makes all steps of its own. A member that has
//! ended is evaluated, and its weights are written. Decisions are a pure function of settings, seed
//! and scores, so a run that was killed makes the same decisions again.
//!
//! - here: the state of all members, which a checkpoint stores;
//! - `rules`: the decisions of the schedulers.

mod rules;

use std::fmt;

use meristem_device::random::{Purpose, Rng};
use serde::{Deserialize, Serialize};

use crate::config::TrainConfig;
use crate::config::types::{Member, PlannedChange, PlannedChanges, Scheduler};
use crate::error::{Error, Result};

/// Reason for which a member has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// Its score was not among those that go on after a rung.
    Rung,
    /// Its best score was below the median of the others' mean scores.
    Median,
    /// Its score did not improve for too long.
    Patience,
    /// Its training failed too often.
    Diverged,
    /// The setting `member_changes` or `end_members` of the run ends it.
    Planned,
    /// It has made all its steps in a run with places, so its place is free.
    Complete,
    /// The program that trains the members ended it ([`Searcher`](crate::external::Searcher)).
    Stopped,
}

impl EndReason {
    /// The name in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rung => "rung",
            Self::Median => "median",
            Self::Patience => "patience",
            Self::Diverged => "diverged",
            Self::Planned => "planned",
            Self::Complete => "complete",
            Self::Stopped => "stopped",
        }
    }

    /// The reason in words.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Rung => "not among the best of its rung",
            Self::Median => "below the median",
            Self::Patience => "no better score for too long",
            Self::Diverged => "training failed",
            Self::Planned => "as planned",
            Self::Complete => "all steps made",
            Self::Stopped => "stopped by the program",
        }
    }
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Numbers of the members that the scheduler of `config` ends after `steps` completed steps.
/// `scores` has the control score of each member after each of its steps, `[members][steps]`;
/// `ended` has the numbers of the members that ended earlier.
pub fn losers(
    config: &TrainConfig,
    scores: &[Vec<f64>],
    ended: &[usize],
    steps: usize,
) -> Vec<usize> {
    let member = |(number, scores): (usize, &Vec<f64>)| MemberState {
        ended: ended.contains(&number).then_some(EndReason::Planned),
        scores: scores.clone(),
        ..MemberState::begun(0)
    };
    let members = scores.iter().enumerate().map(member).collect();
    let sweep = Sweep { members };
    let ended = |change| match change {
        Change::End { member, .. } => Some(member),
        Change::Copy { .. } => None,
    };
    sweep.changes(config, steps).into_iter().filter_map(ended).collect()
}

/// State of a member.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct MemberState {
    /// Control score after each step; negative infinity where there was none.
    pub(crate) scores: Vec<f64>,
    /// The reason for which it has ended, if it has.
    pub(crate) ended: Option<EndReason>,
    /// Its settings, if they differ from those at the beginning of the run.
    pub(crate) settings: Option<String>,
    /// First step of the member, as a step of the run; for a copy, the first step of its origin.
    /// `None` while the member waits for a place.
    #[serde(default = "at_the_start")]
    pub(crate) begun: Option<usize>,
}

/// First step of a member in a checkpoint without this field: without places all members begin with
/// step 0.
fn at_the_start() -> Option<usize> {
    Some(0)
}

impl MemberState {
    /// A member that begins with a step of the run.
    fn begun(step: usize) -> Self {
        Self { begun: Some(step), ..Self::default() }
    }

    /// Whether it is in training.
    fn trains(&self) -> bool {
        self.begun.is_some() && self.ended.is_none()
    }

    /// Whether it has not begun yet.
    fn waits(&self) -> bool {
        self.begun.is_none() && self.ended.is_none()
    }

    /// The last score.
    fn score(&self) -> f64 {
        self.scores.last().copied().unwrap_or(f64::NEG_INFINITY)
    }

    /// The best score.
    fn best(&self) -> f64 {
        self.scores.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }

    /// The mean of the scores of the first `steps` steps.
    fn mean(&self, steps: usize) -> f64 {
        self.scores[..steps].iter().sum::<f64>() / steps as f64
    }
}

/// Change of a member after a step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Change {
    /// The member ends.
    End { member: usize, reason: EndReason },
    /// The member becomes a copy of another, with other settings.
    Copy { member: usize, from: usize, settings: Member },
}

/// State of all members of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sweep {
    pub(crate) members: Vec<MemberState>,
}

impl Sweep {
    /// The members of a run at its beginning; none if it has no `members`.
    pub(crate) fn new(config: &TrainConfig) -> Self {
        let count = config.members.as_ref().map_or(0, |members| members.all().len());
        let mut sweep = Self { members: vec![MemberState::default(); count] };
        Self::planned(config, 0).iter().for_each(|change| sweep.record(change));
        sweep
    }

    /// The members that begin with the next step, because there are free places: the first ones
    /// that wait.
    pub(crate) fn next(&self, config: &TrainConfig) -> Vec<usize> {
        let free = config.places().saturating_sub(self.trained().count());
        let waiting = self.members.iter().enumerate().filter(|(_, member)| member.waits());
        waiting.map(|(number, _)| number).take(free).collect()
    }

    /// Begins a member with step `step` of the run.
    pub(crate) fn begin(&mut self, member: usize, step: usize, settings: Option<&Member>) {
        let state = &mut self.members[member];
        state.begun = Some(step);
        state.settings = settings.map(Member::to_string);
    }

    /// Step of the run with which an env began.
    pub(crate) fn begun(&self, env: usize) -> usize {
        let member = env.checked_rem(self.members.len());
        member.and_then(|member| self.members[member].begun).unwrap_or(0)
    }

    /// Whether the run has no members.
    pub(crate) fn is_without_members(&self) -> bool {
        self.members.is_empty()
    }

    /// Whether all members have ended because their training failed.
    pub(crate) fn all_diverged(&self) -> bool {
        self.members.iter().all(|member| member.ended == Some(EndReason::Diverged))
    }

    /// Whether the member of env `env` is in training; always in a run without members.
    pub(crate) fn trains_env(&self, env: usize) -> bool {
        match self.members.len() {
            0 => true,
            count => self.trains_member(env % count),
        }
    }

    /// Whether a member is in training.
    pub(crate) fn trains_member(&self, member: usize) -> bool {
        self.members[member].trains()
    }

    /// Adds the scores of a step: the mean of each member's envs. `scores` has the envs in
    /// training, with their numbers.
    pub(crate) fn add_scores(&mut self, scores: &[(usize, Option<f64>)]) {
        let count = self.members.len().max(1);
        for (number, member) in self.members.iter_mut().enumerate() {
            let own = scores.iter().filter(|(env, _)| env % count == number);
            let own: Vec<f64> = own
                .map(|(_, score)| {
                    score.filter(|score| !score.is_nan()).unwrap_or(f64::NEG_INFINITY)
                })
                .collect();
            if !own.is_empty() {
                member.scores.push(own.iter().sum::<f64>() / own.len() as f64);
            }
        }
    }

    /// Number of members that have not ended.
    pub(crate) fn left(&self) -> usize {
        self.members.iter().filter(|member| member.ended.is_none()).count()
    }

    /// The members in training, with their numbers.
    pub(crate) fn trained(&self) -> impl Iterator<Item = (usize, &MemberState)> {
        self.members.iter().enumerate().filter(|(_, member)| member.trains())
    }

    /// The settings of a member.
    pub(crate) fn settings(&self, config: &TrainConfig, member: usize) -> Member {
        let own = self.members[member].settings.as_deref();
        let own = own.and_then(|text| Member::parse(text).ok());
        let first = || config.members.as_ref().map(|members| members.of_env(member).clone());
        own.or_else(first).unwrap_or_default()
    }

    /// The changes after `steps` completed steps of the run, in the order in which they take
    /// effect: the planned ones, or else those of the scheduler, which changes nothing after the
    /// last step.
    pub(crate) fn changes(&self, config: &TrainConfig, steps: usize) -> Vec<Change> {
        if config.member_changes.is_some() {
            return Self::planned(config, steps);
        }
        if steps >= config.steps_of_round() {
            return vec![];
        }
        let end = |members: Vec<usize>, reason| {
            members.into_iter().map(|member| Change::End { member, reason }).collect()
        };
        match config.scheduler {
            Scheduler::None => vec![],
            Scheduler::Halving(reduction) => {
                let bracket = rules::Bracket::new(self.members.len(), config.steps, reduction);
                end(bracket.losers(self, 0..self.members.len(), config), EndReason::Rung)
            }
            Scheduler::Hyperband(reduction) => {
                let all = rules::brackets(self.members.len(), config.steps, reduction);
                let losers = all
                    .iter()
                    .flat_map(|(bracket, members)| bracket.losers(self, members.clone(), config));
                end(losers.collect(), EndReason::Rung)
            }
            Scheduler::Median(grace) => end(rules::below_median(self, grace), EndReason::Median),
            Scheduler::Patience(patience) => {
                end(rules::without_progress(self, patience), EndReason::Patience)
            }
            Scheduler::Pbt(every) if steps.is_multiple_of(every) => {
                let copy = |(member, from)| {
                    let (env, step) = (member as u64, 2 * steps as u64 + 1);
                    let mut random = Rng::new(config.seed, Purpose::Exploration, env, step);
                    let settings = self.settings(config, from);
                    let space = config.space.as_ref();
                    // Perturbed settings may contradict each other, such as widen_by and
                    // widen_up_to. Then the copy has those of its origin.
                    let perturbed = space.map(|space| space.perturb(&settings, &mut random));
                    let usable = perturbed.filter(|own| config.of_new_member(own).is_ok());
                    Change::Copy { member, from, settings: usable.unwrap_or(settings) }
                };
                rules::exploited(self, config.seed, steps).into_iter().map(copy).collect()
            }
            Scheduler::Pbt(_) => vec![],
        }
    }

    /// The planned changes after `steps` completed steps.
    fn planned(config: &TrainConfig, steps: usize) -> Vec<Change> {
        let all = config.member_changes.iter().flat_map(PlannedChanges::all);
        let change = |&PlannedChange { member, ref copy, .. }: &PlannedChange| match copy.clone() {
            None => Change::End { member, reason: EndReason::Planned },
            Some((from, settings)) => Change::Copy { member, from, settings },
        };
        all.filter(|planned| planned.steps == steps).map(change).collect()
    }

    /// Ends the members that the setting `end_members` names. Returns the numbers of those that had
    /// not ended before, also of members that wait for a place.
    ///
    /// # Errors
    /// [`Error::Value`]: a member that the run does not have.
    pub(crate) fn end_now(&mut self, config: &TrainConfig) -> Result<Vec<usize>> {
        let count = self.members.len();
        let mut ended = config.end_members.as_ref().map_or(vec![], |own| own.all().to_vec());
        if let Some(unknown) = ended.iter().find(|number| **number >= count) {
            let expected = format!("members below {count}, the number of members");
            return Err(Error::value("end-members", unknown, expected));
        }
        ended.retain(|member| self.members[*member].ended.is_none());
        let reason = EndReason::Planned;
        ended.iter().for_each(|&member| self.record(&Change::End { member, reason }));
        Ok(ended)
    }

    /// Records a change.
    pub(crate) fn record(&mut self, change: &Change) {
        match change {
            Change::End { member, reason } => self.members[*member].ended = Some(*reason),
            Change::Copy { member, from, settings } => {
                // A copy has the history of its origin, whose weights it has.
                let settings = Some(settings.to_string());
                let ended = None;
                self.members[*member] =
                    MemberState { ended, settings, ..self.members[*from].clone() };
            }
        }
    }

    /// The ends of the members that have made all their steps, in a run with places.
    pub(crate) fn complete(&self, config: &TrainConfig) -> Vec<Change> {
        let complete = |(_, member): &(usize, &MemberState)| {
            config.places.is_some() && member.scores.len() >= config.steps
        };
        let reason = EndReason::Complete;
        let complete = self.trained().filter(complete);
        complete.map(|(member, _)| Change::End { member, reason }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigLayer;

    #[test]
    fn planned_changes_take_effect_after_their_steps() {
        let mut flags = ConfigLayer::default();
        let changes = r#"["end 1@0","copy 1 from 0@4: lr=0.3","end 0@4","end 1@9"]"#;
        for (key, text) in
            [("members", "lr=0.1,0.2"), ("controller", "none"), ("member_changes", changes)]
        {
            flags.set(key, text).unwrap();
        }
        let config = TrainConfig::resolve(ConfigLayer::default(), flags).unwrap();
        let mut sweep = Sweep::new(&config);
        sweep.next(&config).into_iter().for_each(|member| sweep.begin(member, 0, None));
        assert!(sweep.trains_member(0) && !sweep.trains_member(1), "member 1 begins as a copy");
        let end = |member| Change::End { member, reason: EndReason::Planned };
        let settings = Member::parse("lr=0.3").unwrap();
        assert!(sweep.changes(&config, 3).is_empty());
        let changes = sweep.changes(&config, 4);
        assert_eq!(changes, [Change::Copy { member: 1, from: 0, settings }, end(0)]);
        changes.iter().for_each(|change| sweep.record(change));
        assert!(!sweep.trains_member(0) && sweep.trains_member(1));
        assert_eq!(sweep.settings(&config, 1).to_string(), "lr=0.3");
        assert_eq!(sweep.changes(&config, 9), [end(1)]);
    }

    #[test]
    fn the_score_of_a_member_is_the_mean_of_its_envs() {
        let members = vec![MemberState::begun(0); 2];
        let mut sweep = Sweep { members };
        sweep.add_scores(&[(0, Some(0.5)), (1, Some(f64::NAN)), (2, Some(0.7)), (3, Some(0.1))]);
        assert_eq!(sweep.members[0].score(), 0.6);
        assert_eq!(sweep.members[1].score(), f64::NEG_INFINITY);
        sweep.record(&Change::End { member: 1, reason: EndReason::Median });
        assert!(sweep.trains_env(2) && !sweep.trains_env(3));
        sweep.add_scores(&[(0, Some(0.8)), (2, Some(0.8))]);
        let steps: Vec<usize> = sweep.members.iter().map(|member| member.scores.len()).collect();
        assert_eq!(steps, [2, 1]);
    }
}

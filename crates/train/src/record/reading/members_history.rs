//! Members of a run: which are still trained, and which are copies, in bounded memory.

use std::collections::VecDeque;

use super::env_history::shorten;
use crate::config::types::SEPARATOR;
use crate::record::events::Recorded;
use crate::sweep::EndReason;

/// Members that are kept, more than a run may have.
const MEMBERS_MAX: usize = 10_000;
/// Copies that are kept, the newest ones.
const COPIES_MAX: usize = 1 << 16;

/// Names and values of the settings of a member, from a text such as `lr=0.1; host=baseline`.
pub fn member_settings(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split(SEPARATOR).filter_map(|setting| setting.split_once('='))
}

/// One member.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemberHistory {
    /// Its settings, such as `lr=0.1; host=baseline`.
    pub settings: String,
    /// The step with which it began; `None` while it waits for a place.
    pub begun: Option<usize>,
    /// Last step of its training and the reason for its end, if it has ended.
    pub ended: Option<(usize, Recorded<EndReason>)>,
    /// The origin of the last copy, and the step after which the member became this copy.
    pub copied: Option<(usize, usize)>,
    /// Newest step.
    newest: Option<NewestStep>,
}

/// The newest step of a member: sum and number of the control scores of its envs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct NewestStep {
    step: usize,
    sum: f64,
    count: usize,
}

impl MemberHistory {
    /// Names and values of its settings.
    pub fn values(&self) -> impl Iterator<Item = (&str, &str)> {
        member_settings(&self.settings)
    }

    /// Mean control score of its envs in their newest step; `None` if one was not measured or is
    /// not a number.
    pub fn score(&self) -> Option<f64> {
        let score = self.newest.map(|newest| newest.sum / newest.count as f64);
        score.filter(|score| score.is_finite())
    }

    /// Number of steps that it was trained.
    pub fn steps(&self) -> Option<usize> {
        let begun = self.begun.unwrap_or(0);
        self.newest.map(|newest| newest.step.saturating_add(1).saturating_sub(begun))
    }
}

/// A member that became a copy of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberCopy {
    /// Number of the member.
    pub member: usize,
    /// Number of the member that it is a copy of.
    pub from: usize,
    /// Step after which the member became a copy.
    pub step: usize,
}

/// The members of a run by number, at most 10,000; empty for a run without members.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MembersHistory {
    members: Vec<MemberHistory>,
    copies: VecDeque<MemberCopy>,
}

impl MembersHistory {
    /// Members with these settings, at the beginning. Only the first `places` have begun.
    pub(super) fn new(settings: &[String], places: Option<usize>) -> Self {
        let member = |(number, settings): (usize, &String)| {
            let mut settings = settings.clone();
            shorten(&mut settings);
            let begun = places.is_none_or(|places| number < places).then_some(0);
            MemberHistory { settings, begun, ..MemberHistory::default() }
        };
        let members = settings.iter().take(MEMBERS_MAX).enumerate().map(member).collect();
        Self { members, copies: VecDeque::new() }
    }

    pub(super) fn begin(&mut self, number: usize, step: usize, mut settings: String) {
        shorten(&mut settings);
        if let Some(member) = self.members.get_mut(number) {
            *member = MemberHistory { settings, begun: Some(step), ..MemberHistory::default() };
        }
    }

    /// All members, by number.
    pub fn all(&self) -> impl ExactSizeIterator<Item = (usize, &MemberHistory)> {
        self.members.iter().enumerate()
    }

    /// The copies in the order of their steps, the newest 65,536.
    pub fn copies(&self) -> impl ExactSizeIterator<Item = &MemberCopy> {
        self.copies.iter()
    }

    /// The number of the member of an env; `None` for a run without members.
    pub fn number_of_env(&self, env: usize) -> Option<usize> {
        env.checked_rem(self.members.len())
    }

    /// The member of an env.
    pub fn of_env(&self, env: usize) -> Option<&MemberHistory> {
        self.members.get(self.number_of_env(env)?)
    }

    /// Number of members in training.
    pub fn trained(&self) -> usize {
        let trains = |member: &&MemberHistory| member.begun.is_some() && member.ended.is_none();
        self.members.iter().filter(trains).count()
    }

    /// Adds a step of an env.
    pub(super) fn step(&mut self, env: usize, step: usize, score: Option<f64>) {
        let Some(number) = self.number_of_env(env) else { return };
        let newest = &mut self.members[number].newest;
        let before = newest.filter(|newest| newest.step == step);
        let NewestStep { sum, count, .. } =
            before.unwrap_or(NewestStep { step, sum: 0.0, count: 0 });
        let sum = sum + score.unwrap_or(f64::NAN);
        *newest = Some(NewestStep { step, sum, count: count.saturating_add(1) });
    }

    pub(super) fn end(&mut self, numbers: &[usize], step: usize, reason: &Recorded<EndReason>) {
        for number in numbers {
            if let Some(member) = self.members.get_mut(*number) {
                let mut reason = reason.clone();
                if let Recorded::Later(text) = &mut reason {
                    shorten(text);
                }
                member.ended = Some((step, reason));
            }
        }
    }

    pub(super) fn copy(&mut self, copy: MemberCopy, mut settings: String) {
        shorten(&mut settings);
        let MemberCopy { member, from, step } = copy;
        if let Some(member) = self.members.get_mut(member) {
            let MemberHistory { begun, newest, .. } = *member;
            let copied = Some((from, step));
            *member = MemberHistory { settings, begun, ended: None, copied, newest };
            self.copies.push_back(copy);
            if self.copies.len() > COPIES_MAX {
                self.copies.pop_front();
            }
        }
    }
}

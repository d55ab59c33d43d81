//! Members of a run: which are still trained, and which are copies, in bounded memory.

use std::collections::BTreeMap;

use super::env_history::{ENVS_MAX, shorten};
use crate::record::events::Recorded;
use crate::sweep::EndReason;

/// One member.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemberHistory {
    /// Its settings, such as `lr=0.1; host=baseline`.
    pub settings: String,
    /// The step with which it began; `None` while it waits for a place.
    pub begun: Option<usize>,
    /// Last step of its training and the reason for its end, if it has ended.
    pub ended: Option<(usize, Recorded<EndReason>)>,
    /// The member that it last became a copy of, and the step after which.
    pub copied: Option<(usize, usize)>,
}

/// The members of a run by number, at most 1024; empty for a run without members.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MembersHistory(BTreeMap<usize, MemberHistory>);

impl MembersHistory {
    /// Members with these settings, at the beginning. Only the first `places` have begun.
    pub(super) fn new(settings: &[String], places: Option<usize>) -> Self {
        let member = |(number, settings): (usize, &String)| {
            let mut settings = settings.clone();
            shorten(&mut settings);
            let begun = places.is_none_or(|places| number < places).then_some(0);
            (number, MemberHistory { settings, begun, ..MemberHistory::default() })
        };
        Self(settings.iter().take(ENVS_MAX).enumerate().map(member).collect())
    }

    pub(super) fn begin(&mut self, number: usize, step: usize, mut settings: String) {
        shorten(&mut settings);
        if let Some(member) = self.0.get_mut(&number) {
            *member = MemberHistory { settings, begun: Some(step), ..MemberHistory::default() };
        }
    }

    /// All members, by number.
    pub fn all(&self) -> impl ExactSizeIterator<Item = (usize, &MemberHistory)> {
        self.0.iter().map(|(number, member)| (*number, member))
    }

    /// The member of an env.
    pub fn of_env(&self, env: usize) -> Option<&MemberHistory> {
        self.0.get(&env.checked_rem(self.0.len())?)
    }

    /// Number of members in training.
    pub fn trained(&self) -> usize {
        let trains = |member: &&MemberHistory| member.begun.is_some() && member.ended.is_none();
        self.0.values().filter(trains).count()
    }

    pub(super) fn end(&mut self, numbers: &[usize], step: usize, reason: &Recorded<EndReason>) {
        for number in numbers {
            if let Some(member) = self.0.get_mut(number) {
                let mut reason = reason.clone();
                if let Recorded::Later(text) = &mut reason {
                    shorten(text);
                }
                member.ended = Some((step, reason));
            }
        }
    }

    pub(super) fn copy(&mut self, number: usize, from: usize, step: usize, mut settings: String) {
        shorten(&mut settings);
        if let Some(member) = self.0.get_mut(&number) {
            let begun = member.begun;
            *member = MemberHistory { settings, begun, ended: None, copied: Some((from, step)) };
        }
    }
}

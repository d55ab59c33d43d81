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
    /// Last step of its training and the reason for its end, if it has ended.
    pub ended: Option<(usize, Recorded<EndReason>)>,
    /// The member that it last became a copy of, and the step after which.
    pub copied: Option<(usize, usize)>,
}

/// The members of a run by number, at most 1024; empty for a run without members.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MembersHistory(BTreeMap<usize, MemberHistory>);

impl MembersHistory {
    /// Members with these settings, at the beginning.
    pub(super) fn new(settings: &[String]) -> Self {
        let member = |settings: &String| {
            let mut settings = settings.clone();
            shorten(&mut settings);
            MemberHistory { settings, ..MemberHistory::default() }
        };
        Self(settings.iter().take(ENVS_MAX).map(member).enumerate().collect())
    }

    /// All members, by number.
    pub fn all(&self) -> impl ExactSizeIterator<Item = (usize, &MemberHistory)> {
        self.0.iter().map(|(number, member)| (*number, member))
    }

    /// The member of an env.
    pub fn of_env(&self, env: usize) -> Option<&MemberHistory> {
        self.0.get(&env.checked_rem(self.0.len())?)
    }

    /// Number of members that are still trained.
    pub fn trained(&self) -> usize {
        self.0.values().filter(|member| member.ended.is_none()).count()
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
            *member = MemberHistory { settings, ended: None, copied: Some((from, step)) };
        }
    }
}

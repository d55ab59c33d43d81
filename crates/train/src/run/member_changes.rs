//! Changes of members between two steps of an episode: some end, some become copies of others, and
//! some begin in the places of those that have ended.

use std::collections::BTreeSet;

use super::episode::Episode;
use super::results::in_sweep;
use super::weights_files::write_weights;
use crate::config::make_portable;
use crate::env::{Env, Population};
use crate::error::{Error, Result};
use crate::position::StepPosition;
use crate::record::events::Event;
use crate::settings::{Member, Sampler};
use crate::setup::Hosts;
use crate::step::report;
use crate::sweep::{Change, EndReason};

impl Episode<'_, '_> {
    /// Ends, copies and begins members after a step, as scheduler and searcher decide. Waits for
    /// the devices if a member ends or is copied.
    ///
    /// # Errors
    /// The error of a diverged env, if no member is left because all have diverged; out of memory,
    /// a device failure, a failed searcher, a failed write.
    pub(super) fn change_members(
        &mut self,
        population: &mut Population,
        when: StepPosition,
        diverged: Vec<(usize, Error)>,
    ) -> Result<()> {
        let count = self.sweep.members.len();
        if count == 0 {
            return Ok(());
        }
        let scores = |env: &Env| (env.index, env.grown.control_score());
        self.sweep.add_scores(&population.envs.iter().map(scores).collect::<Vec<_>>());
        let trained: Vec<usize> = self.sweep.trained().map(|(member, _)| member).collect();
        let of_diverged: BTreeSet<usize> = diverged.iter().map(|(env, _)| env % count).collect();
        let end = |member| Change::End { member, reason: EndReason::Diverged };
        let mut changes = vec![];
        let ends = of_diverged.into_iter().map(end).collect();
        self.take_effect(population, ends, &mut changes)?;
        let of_scheduler = self.sweep.changes(&self.setup.config, when.step + 1);
        self.take_effect(population, of_scheduler, &mut changes)?;
        let of_searcher = self.report_to_searcher(&trained)?;
        self.take_effect(population, of_searcher, &mut changes)?;
        let complete = self.sweep.complete(&self.setup.config);
        self.take_effect(population, complete, &mut changes)?;
        self.report_completions(&trained)?;
        if changes.is_empty() {
            return Ok(());
        }
        self.announce(changes, when);
        self.retire(population)?;
        population.add(self.begin_members(when.step + 1)?);
        self.serve(population)?;
        // In a run that trains some members of another run again it is no error if all diverge:
        // they end as they did in that run.
        let is_part = self.setup.config.env_numbers.is_some();
        match diverged.into_iter().next() {
            Some((_, error)) if self.sweep.all_diverged() && !is_part => Err(error),
            _ => Ok(()),
        }
    }

    /// Records changes, copies the envs of members that become copies, and adds the changes to
    /// `taken`.
    fn take_effect(
        &mut self,
        population: &mut Population,
        changes: Vec<Change>,
        taken: &mut Vec<Change>,
    ) -> Result<()> {
        for change in changes {
            if let Change::Copy { member, settings, .. } = &change {
                self.setup.set_member(*member, settings, Hosts::InProgress)?;
            }
            self.sweep.record(&change);
            if let Change::Copy { member, from, .. } = &change {
                self.copy_envs(population, *from, *member)?;
            }
            taken.push(change);
        }
        Ok(())
    }

    /// Replaces the env of a member by a copy of the env of member `from`. Only a run with one env
    /// for each member copies members, so the number of a member is the index of its env.
    fn copy_envs(&mut self, population: &mut Population, from: usize, member: usize) -> Result<()> {
        let count = self.sweep.members.len();
        self.ended_envs.retain(|env| env.env % count != member);
        self.resources.draw_samples(self.setup, &[member])?;
        for options in self.host_options(|_, env| env == member) {
            let copied = population.copy(self.setup, from, options)?;
            population.add(copied);
        }
        let number = |env: usize| self.setup.config.env_number(env);
        self.controller.get().copy_env(number(from), number(member));
        Ok(())
    }

    /// Reports the last scores of `trained`, the members that were trained in this step, to the
    /// searcher. Returns an end for each member that the searcher stops.
    fn report_to_searcher(&mut self, trained: &[usize]) -> Result<Vec<Change>> {
        let Some(searcher) = &mut self.searcher else { return Ok(vec![]) };
        let mut ends = vec![];
        for &member in trained {
            let state = &self.sweep.members[member];
            let score = state.scores.last().copied().filter(|score| score.is_finite());
            let goes_on = searcher.report(member, state.scores.len(), score)?;
            if !goes_on && self.sweep.trains_member(member) {
                ends.push(Change::End { member, reason: EndReason::Stopped });
            }
        }
        Ok(ends)
    }

    /// Reports to the searcher each of `trained`, the members that were trained in this step, whose
    /// training is over.
    fn report_completions(&mut self, trained: &[usize]) -> Result<()> {
        let steps = self.setup.config.steps;
        let Some(searcher) = &mut self.searcher else { return Ok(()) };
        for &member in trained {
            let state = &self.sweep.members[member];
            if !self.sweep.trains_member(member) || state.scores.len() >= steps {
                let ended = state.ended.filter(|reason| *reason != EndReason::Complete);
                searcher.complete(member, ended)?;
            }
        }
        Ok(())
    }

    /// Begins the next members in free places, with step `step` of the round. Returns their envs.
    ///
    /// # Errors
    /// Out of memory, a failed searcher, settings that a member cannot have.
    pub(super) fn begin_members(&mut self, step: usize) -> Result<Population> {
        let count = self.sweep.members.len();
        let members = self.sweep.next(&self.setup.config);
        for &member in &members {
            let settings = self.suggested(member)?;
            if let Some(settings) = &settings {
                self.apply_suggestion(member, settings)?;
            }
            self.sweep.begin(member, step, settings.as_ref());
            // Members that begin with the run, with the settings in its configuration, get no
            // event.
            if step > 0 || settings.is_some() {
                let settings = self.sweep.settings(&self.setup.config, member).to_string();
                let round = self.round;
                self.journal.announce(Event::MemberBegun { member, round, step, settings });
            }
        }
        self.fresh_envs(|_, env| members.binary_search(&(env % count)).is_ok())
    }

    /// Sets the settings of a member that begins to those that the searcher has chosen, and draws
    /// its training samples by these settings.
    fn apply_suggestion(&mut self, member: usize, settings: &Member) -> Result<()> {
        self.setup.set_member(member, settings, Hosts::Fresh)?;
        self.checkpoints.identity.files.clone_from(&self.setup.files);
        let envs: Vec<usize> =
            (member..self.setup.config.envs).step_by(self.sweep.members.len()).collect();
        let drawn = self.resources.draw_samples(self.setup, &envs);
        drawn.map_err(|error| error.in_member(member))
    }

    /// The settings of a member that the searcher chooses, with the sampler `external`.
    fn suggested(&mut self, member: usize) -> Result<Option<Member>> {
        let asks = self.setup.config.sampler == Sampler::External;
        let searcher = self.searcher.as_mut().filter(|_| asks);
        let suggested = searcher.map(|searcher| searcher.suggest(member)).transpose()?;
        let portable = |mut settings| make_portable(&mut settings).map(|()| settings);
        suggested.map(portable).transpose()
    }

    /// Evaluates the envs that are not trained any more, writes their weights, and frees their
    /// memory. Waits for the devices if there are any.
    pub(super) fn retire(&mut self, population: &mut Population) -> Result<()> {
        if self.sweep.is_without_members() {
            return Ok(());
        }
        let mut ended = population.split(|env| !self.sweep.trains_env(env));
        if ended.envs.is_empty() {
            return Ok(());
        }
        let Self { resources, setup, sweep, ended_envs, .. } = self;
        resources.serve_evaluation(setup, &ended.indices())?;
        let results = report::report(resources, setup, &mut ended)?;
        write_weights(&setup.interface, self.folder, self.world, &ended.envs)?;
        let of_member = |env| in_sweep(sweep, &setup.config, env);
        ended_envs.extend(results.into_iter().map(of_member));
        Ok(())
    }

    /// Serves batches to the envs in training, and gives the controller the settings of their
    /// members, in a run with members.
    pub(super) fn serve(&mut self, population: &Population) -> Result<()> {
        if self.sweep.is_without_members() {
            return Ok(());
        }
        for env in &population.envs {
            let samples = self.resources.train_samples_of(self.setup, env.index);
            self.controller.set_env(env.number, self.setup.member(env.index), samples);
        }
        self.resources.select(self.setup, &population.indices())
    }

    /// Announces changes: successive ends for the same reason are one event.
    fn announce(&mut self, changes: Vec<Change>, StepPosition { round, step }: StepPosition) {
        let left = self.sweep.left();
        let mut changes = changes.into_iter().peekable();
        while let Some(change) = changes.next() {
            self.journal.announce(match change {
                Change::Copy { member, from, settings } => {
                    let settings = settings.to_string();
                    Event::MemberCopied { member, from, round, step, settings }
                }
                Change::End { member, reason } => {
                    let mut members = vec![member];
                    let same = |next: &Change| match next {
                        Change::End { reason: other, .. } => *other == reason,
                        Change::Copy { .. } => false,
                    };
                    while let Some(Change::End { member, .. }) = changes.next_if(same) {
                        members.push(member);
                    }
                    Event::MembersEnded { members, round, step, reason: reason.into(), left }
                }
            });
        }
    }
}

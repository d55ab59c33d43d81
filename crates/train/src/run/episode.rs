//! One episode of all envs: its steps on all processes, its checkpoints, and the policy's update at
//! the end.
//!
//! After every step all processes meet: rank 0 gets the events of all envs, and all learn whether
//! any of them was asked to stop.

use std::collections::BTreeSet;

use meristem_control::RoundReport;
use meristem_device::random::{Purpose, Rng};

use crate::checkpoint::{Checkpoints, Current};
use crate::env::{Env, HostOptions, Population, SavedEnv};
use crate::error::{Error, Result};
use crate::external::Continuation;
use crate::position::StepPosition;
use crate::processes::World;
use crate::record::events::{Event, StepCompleted};
use crate::record::journal::{Journal, KeptEvent};
use crate::record::totals::Totals;
use crate::resources::{Replicas, Resources};
use crate::setup::Setup;
use crate::setup::controllers::AnyController;
use crate::step::{StepContext, step, visit};
use crate::sweep::{Change, EndReason, Sweep};

/// An episode in progress.
pub(crate) struct Episode<'a, 'j> {
    pub(crate) setup: &'a mut Setup,
    pub(crate) resources: &'a mut Resources,
    pub(crate) controller: &'a mut AnyController,
    pub(crate) journal: &'a mut Journal<'j>,
    /// Whether this process has completed a step.
    pub(crate) warm: &'a mut bool,
    pub(crate) world: &'a mut World,
    /// Totals of all ranks; only meaningful on rank 0.
    pub(crate) totals: &'a mut Totals,
    pub(crate) sweep: &'a mut Sweep,
    pub(crate) round: usize,
    pub(crate) checkpoints: &'a Checkpoints,
}

/// Start of an episode.
pub(crate) enum Start {
    Fresh,
    /// This step, with the saved envs of this process.
    At(usize, Vec<SavedEnv>),
}

/// An episode that has ended.
pub(crate) struct EndedEpisode {
    /// The envs of this process, before their evaluation on the test split.
    pub(crate) population: Population,
    /// Number of completed steps.
    pub(crate) steps: usize,
    /// Whether all its steps were made, or all members have ended.
    pub(crate) complete: bool,
    /// Whether the run was asked to stop.
    pub(crate) interrupted: bool,
    /// Report of the policy's update, if there is a policy and the episode was completed.
    pub(crate) policy: Option<RoundReport>,
}

impl<'j> Episode<'_, 'j> {
    /// Runs the steps from `start` on. Waits for the devices once a step, and for each checkpoint.
    ///
    /// # Errors
    /// A diverged env, a full disk, a device failure.
    pub(crate) fn train(&mut self, start: Start) -> Result<EndedEpisode> {
        let round = self.round;
        let _round = self.resources.devices.span(|| format!("round {round}"));
        let (first, mut population) = match start {
            Start::Fresh => {
                self.journal.announce(Event::RoundStarted { round });
                (0, self.fresh_population()?)
            }
            Start::At(step, saved) => (step, self.restore_population(saved)?),
        };
        self.select_envs(&mut population, Sweep::trains);
        let mut steps = first;
        let mut interrupted = false;
        for step in first..self.setup.config.steps {
            if population.envs.is_empty() {
                break;
            }
            if self.stops_before(&mut population, StepPosition { round, step })? {
                interrupted = true;
                break;
            }
            interrupted = self.step_of_all(&mut population, StepPosition { round, step })?;
            steps += 1;
            let config = &self.setup.config;
            interrupted |= config.stop_after == Some(round * config.steps + steps);
            // After the last step of a round, `PreparedRun` writes the checkpoint.
            if steps < self.setup.config.steps {
                self.checkpoint(&mut population, steps, interrupted)?;
            }
            if interrupted {
                break;
            }
        }
        let complete = steps == self.setup.config.steps || population.envs.is_empty();
        // All envs are reported, also those of members that have ended.
        self.select_envs(&mut population, |_, _| true);
        // A policy does not learn from an incomplete episode.
        let policy = if complete { self.end_round(&population, steps)? } else { None };
        Ok(EndedEpisode { population, steps, complete, interrupted, policy })
    }

    /// Writes a checkpoint when one is due, and when the run is stopped. One follows the run's
    /// first step, because hot scopes apply from the second step on: if they end the run, it can
    /// resume.
    fn checkpoint(
        &mut self,
        population: &mut Population,
        step: usize,
        stopped: bool,
    ) -> Result<()> {
        let every = self.setup.config.checkpoint_every;
        let first = self.round == 0 && step == 1;
        let due = every > 0 && (first || step.is_multiple_of(every));
        if !due && !stopped {
            return Ok(());
        }
        // Events must not depend on a stop by the user.
        if due {
            self.journal.announce(Event::CheckpointWritten { round: self.round, step });
        }
        self.write_checkpoint(population, StepPosition { round: self.round, step })
    }

    /// Calls an external controller before a step. Returns whether the run stops here.
    fn stops_before(&mut self, population: &mut Population, when: StepPosition) -> Result<bool> {
        loop {
            let next = visit::before_step(&mut self.context(population, when))?;
            // At the start of a round there is nothing to write: the run has just begun, or has
            // just written a checkpoint.
            if next != Continuation::Step && when.step > 0 {
                self.write_checkpoint(population, when)?;
            }
            match next {
                Continuation::Step => return Ok(false),
                Continuation::Checkpoint => {}
                Continuation::Stop => return Ok(true),
            }
        }
    }

    /// Writes a checkpoint from which the run resumes at step `next`.
    fn write_checkpoint(&mut self, population: &mut Population, next: StepPosition) -> Result<()> {
        let mut saved = population.save(self.setup)?;
        for (env, replicas) in saved.iter_mut().zip(&mut self.resources.replicas) {
            let own = replicas.save(&env.tensors.grown.optimiser)?;
            env.tensors.exchange = self.world.merge(own)?;
        }
        let controller = self.controller.get().save()?;
        let (totals, sweep) = (*self.totals, self.sweep.clone());
        let current = Current { next, envs: saved, totals, controller, sweep };
        self.checkpoints.write(current, self.world, self.journal)
    }

    fn restore_population(&mut self, saved: Vec<SavedEnv>) -> Result<Population> {
        for (env, replicas) in saved.iter().zip(&mut self.resources.replicas) {
            replicas.restore(&env.tensors.exchange);
        }
        Population::restore(self.setup, &self.host_options(), saved)
    }

    fn fresh_population(&mut self) -> Result<Population> {
        self.resources.replicas.iter_mut().for_each(Replicas::forget);
        let envs = self.resources.devices.envs();
        let numbers = envs.map(|env| self.setup.config.env_number(env));
        numbers.for_each(|number| self.controller.get().begin_episode(number));
        Population::new(self.setup, &self.host_options())
    }

    /// Options of the hosts of this process's envs.
    fn host_options(&self) -> Vec<HostOptions<'_>> {
        let Self { setup, resources, .. } = self;
        let (seed, config) = (self.seed(), &setup.config);
        let batch_log = if config.log_batches { resources.train.len().max(1) } else { 1 };
        let streams = resources.devices.streams_by_env();
        streams.map(|(index, stream)| HostOptions { index, stream, seed, batch_log }).collect()
    }

    /// Seed of the round's hosts.
    fn seed(&self) -> u64 {
        let config = &self.setup.config;
        // Round 0 uses the run's seed itself.
        match self.round {
            0 => config.seed,
            round => Rng::new(config.seed, Purpose::Init, u64::MAX, round as u64).next_u64(),
        }
    }

    /// Context of a step.
    fn context<'s>(
        &'s mut self,
        population: &'s mut Population,
        when: StepPosition,
    ) -> StepContext<'s, 'j> {
        StepContext {
            when,
            population,
            setup: self.setup,
            resources: self.resources,
            controller: self.controller,
            journal: self.journal,
            processes: self.world.size(),
            spent: Totals::default(),
            diverged: vec![],
            warm: self.warm,
        }
    }

    /// Runs a step on all ranks. Returns whether any of them was asked to stop.
    fn step_of_all(&mut self, population: &mut Population, when: StepPosition) -> Result<bool> {
        let mut context = self.context(population, when);
        let done = step(&mut context);
        let (spent, diverged) = (context.spent, std::mem::take(&mut context.diverged));
        let sent_bytes = spent.exchange_bytes;
        if done.is_err() {
            self.resources.replicas.iter_mut().for_each(Replicas::leave);
        }
        // The events of a failed step are reported, too.
        let gathered = self.world.gather_envs((self.journal.take_kept(), spent));
        let (done, gathered) = match (done, gathered) {
            // The process's own error is more precise than the absence of another process.
            (Err(own), Err(_)) => return Err(own),
            (done, gathered) => (done, gathered?),
        };
        let (mut kept, spent): (Vec<Vec<KeptEvent>>, Vec<Totals>) = gathered.into_iter().unzip();
        let own = if self.world.has_same_envs() { digest(&kept) } else { 0 };
        self.totals.add(&spent);
        merge_times(&mut kept, &spent);
        self.journal.record_kept(kept.into_iter());
        let stops = done.and_then(|()| self.journal.stop_requested());
        let all = self.world.all_gather(stops.map(|stops| (stops, own, sent_bytes)))?;
        self.totals.exchange_bytes += all.iter().map(|(.., sent_bytes)| sent_bytes).sum::<u64>();
        let (stops, digests): (Vec<bool>, Vec<u32>) =
            all.into_iter().map(|(stops, digest, _)| (stops, digest)).unzip();
        // Processes with the same envs must have the same results.
        if digests.iter().any(|other| *other != digests[0]) {
            let fingerprints = digests.iter().map(|digest| format!("{digest:08x}"));
            let fingerprints = fingerprints.collect::<Vec<_>>();
            return Err(Error::ReplicasDiffer { fingerprints: fingerprints.join(", ") });
        }
        self.change_members(population, when, diverged)?;
        Ok(stops.contains(&true))
    }

    /// Ends members and copies members, as the scheduler decides after a step. Waits for the
    /// devices if a member is copied.
    ///
    /// # Errors
    /// The error of a diverged env, if no member is left because all have diverged; out of memory,
    /// a device failure.
    fn change_members(
        &mut self,
        population: &mut Population,
        when: StepPosition,
        diverged: Vec<(usize, Error)>,
    ) -> Result<()> {
        let StepPosition { round, step } = when;
        let count = self.sweep.members.len();
        if count == 0 {
            return Ok(());
        }
        let scores = |env: &Env| (env.index, env.grown.control_score());
        self.sweep.add_scores(&population.envs.iter().map(scores).collect::<Vec<_>>());
        let of_diverged: BTreeSet<usize> = diverged.iter().map(|(env, _)| env % count).collect();
        let end = |member| Change::End { member, reason: EndReason::Diverged };
        let mut changes: Vec<Change> = of_diverged.into_iter().map(end).collect();
        changes.iter().for_each(|change| self.sweep.record(change));
        let others = self.sweep.changes(&self.setup.config, step + 1);
        for change in &others {
            if let Change::Copy { member, from, settings } = change {
                self.setup.set_member(*member, settings)?;
                let options = self.host_options().into_iter().find(|own| own.index == *member);
                let copy = |options| population.copy(self.setup, *from, options);
                options.map_or(Ok(()), copy)?;
                let number = |env: usize| self.setup.config.env_number(env);
                self.controller.get().copy_env(number(*from), number(*member));
            }
            self.sweep.record(change);
        }
        changes.extend(others);
        if changes.is_empty() {
            return Ok(());
        }
        let left = self.sweep.trained().count();
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
        self.select_envs(population, Sweep::trains);
        // Some members of another run end as they ended there.
        let is_part = self.setup.config.env_numbers.is_some();
        match diverged.into_iter().next() {
            Some((_, error)) if self.sweep.all_diverged() && !is_part => Err(error),
            _ => Ok(()),
        }
    }

    /// Trains, in a run with members, only the envs that `is_trained` selects.
    fn select_envs(
        &mut self,
        population: &mut Population,
        is_trained: impl Fn(&Sweep, usize) -> bool,
    ) {
        if !self.sweep.is_without_members() {
            population.select(|env| is_trained(self.sweep, env));
            self.resources.select(&population.numbers());
        }
    }

    /// Ends the round: a learning controller updates its policy.
    fn end_round(&mut self, population: &Population, steps: usize) -> Result<Option<RoundReport>> {
        let _span = self.resources.devices.span(|| "policy update");
        let report = self.controller.get().end_round(&population.views(steps, steps))?;
        if let Some(report) = report.clone() {
            let round = self.round;
            self.journal.announce(Event::PolicyUpdated { round, report });
        }
        Ok(report)
    }
}

/// Digest of a step's results: measurements, decisions and fingerprints of all envs.
fn digest(kept: &[Vec<KeptEvent>]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    for KeptEvent { event, .. } in kept.iter().flatten() {
        if let Event::StepCompleted(step) = event {
            let StepCompleted { train_loss, control_loss, action, reward, fingerprint, .. } = step;
            let all =
                format!("{train_loss:?} {control_loss:?} {action} {reward:?} {fingerprint:?}");
            crc.update(all.as_bytes());
        }
    }
    crc.finalize()
}

/// Sets time and throughput in the events to the values of all ranks together.
fn merge_times(kept: &mut [Vec<KeptEvent>], spent: &[Totals]) {
    let images: u64 = spent.iter().map(|rank| rank.images).sum();
    let seconds = spent.iter().map(|rank| rank.step_seconds).fold(0.0, f64::max);
    for KeptEvent { event, .. } in kept.iter_mut().flatten() {
        if let Event::StepCompleted(step) = event {
            step.step_seconds = step.step_seconds.map(|_| seconds);
            step.images_per_s = step.images_per_s.map(|_| images as f64 / seconds);
        }
    }
}

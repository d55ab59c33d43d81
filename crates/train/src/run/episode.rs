//! One episode of all envs: its steps on all processes, its checkpoints, and the policy's update at
//! the end.
//!
//! After every step all processes meet: rank 0 gets the events of all envs, and all learn whether
//! any of them was asked to stop.

use meristem_control::RoundReport;
use meristem_device::random::{Purpose, Rng};

use crate::checkpoint::{Checkpoints, Current};
use crate::env::{HostOptions, Population, SavedEnv};
use crate::error::{Error, Result};
use crate::external::{Continuation, Searcher};
use crate::position::StepPosition;
use crate::processes::World;
use crate::record::events::{Event, StepCompleted};
use crate::record::journal::{Journal, KeptEvent};
use crate::record::run_folder::RunFolder;
use crate::record::summary::EnvSummary;
use crate::record::totals::Totals;
use crate::resources::{Replicas, Resources};
use crate::setup::Setup;
use crate::setup::controllers::AnyController;
use crate::step::{StepContext, step, visit};
use crate::sweep::Sweep;

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
    /// Results of the envs whose members have ended.
    pub(crate) ended_envs: &'a mut Vec<EnvSummary>,
    /// The program's search over settings of members, if there is one.
    pub(crate) searcher: Option<&'a mut Box<dyn Searcher>>,
    /// Folder of the run, if it has one.
    pub(crate) folder: Option<&'a RunFolder>,
    pub(crate) round: usize,
    pub(crate) checkpoints: &'a mut Checkpoints,
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
    /// Runs the steps from `start` on. Waits for the devices at least once a step, and for each
    /// checkpoint.
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
        let mut steps = first;
        let mut interrupted = false;
        for step in first..self.setup.config.steps_of_round() {
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
            if steps < self.setup.config.steps_of_round() {
                self.checkpoint(&mut population, steps, interrupted)?;
            }
            if interrupted {
                break;
            }
        }
        let complete = steps == self.setup.config.steps_of_round() || population.envs.is_empty();
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
        let ended_envs = self.ended_envs.clone();
        let current = Current { next, envs: saved, ended_envs, totals, controller, sweep };
        self.checkpoints.write(current, self.world, self.journal)
    }

    fn restore_population(&mut self, saved: Vec<SavedEnv>) -> Result<Population> {
        for (env, replicas) in saved.iter().zip(&mut self.resources.replicas) {
            replicas.restore(&env.tensors.exchange);
        }
        let envs: Vec<usize> = saved.iter().map(|saved| saved.index).collect();
        self.resources.draw_samples(self.setup, &envs)?;
        let options = self.host_options(|_, env| envs.contains(&env));
        let mut population = Population::restore(self.setup, &options, saved)?;
        self.retire(&mut population)?;
        self.serve(&population)?;
        Ok(population)
    }

    fn fresh_population(&mut self) -> Result<Population> {
        self.resources.replicas.iter_mut().for_each(Replicas::forget);
        let population = if self.sweep.is_without_members() {
            self.fresh_envs(|_, _| true)?
        } else {
            self.begin_members(0)?
        };
        self.serve(&population)?;
        Ok(population)
    }

    /// Fresh envs of this process, selected by index.
    pub(super) fn fresh_envs(
        &mut self,
        is_selected: impl Fn(&Self, usize) -> bool,
    ) -> Result<Population> {
        let options = self.host_options(is_selected);
        let indices: Vec<usize> = options.iter().map(|options| options.index).collect();
        let population = Population::new(self.setup, &options)?;
        for index in indices {
            let number = self.setup.config.env_number(index);
            self.controller.get().begin_episode(number);
        }
        Ok(population)
    }

    /// Options of the hosts of some envs of this process, selected by index.
    pub(super) fn host_options(
        &self,
        is_selected: impl Fn(&Self, usize) -> bool,
    ) -> Vec<HostOptions<'_>> {
        let Self { setup, resources, sweep, .. } = self;
        let config = &setup.config;
        let streams = resources.devices.streams_by_env();
        let selected = streams.filter(|(index, _)| is_selected(self, *index));
        selected
            .map(|(index, stream)| {
                // The gather already has the samples of a new member, but gets its batch size
                // only after the hosts are built.
                let batches = || {
                    resources.train.order().batches_with(index, setup.member(index).config.batch)
                };
                let batch_log = if config.log_batches { batches().max(1) } else { 1 };
                let (seed, begun) = (self.seed(index), sweep.begun(index));
                HostOptions { index, stream, seed, batch_log, begun }
            })
            .collect()
    }

    /// Seed of the host of env `env` in this round.
    fn seed(&self, env: usize) -> u64 {
        let seed = self.setup.member(env).config.seed;
        // Round 0 uses the seed of the settings itself.
        match self.round {
            0 => seed,
            round => Rng::new(seed, Purpose::Init, u64::MAX, round as u64).next_u64(),
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
        if self.setup.config.places.is_some() {
            self.totals.place_steps += self.sweep.trained().count() as u64;
        }
        self.change_members(population, when, diverged)?;
        Ok(stops.contains(&true))
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

//! One episode of all envs: its steps on all processes, its checkpoints, and what a policy learns
//! from it.
//!
//! After every step all processes meet: the first hears what happened to the envs of all, and all
//! learn whether one of them was asked to stop.

use meristem_control::{EnvView, RoundReport};
use meristem_device::random::{Purpose, Rng};

use crate::checkpoint::{Checkpoints, Current};
use crate::env::{Env, EnvOptions, SavedEnv};
use crate::error::{Error, Result};
use crate::fleet::Replicas;
use crate::position::Position;
use crate::processes::World;
use crate::record::events::{Event, StepCompleted};
use crate::record::journal::Kept;
use crate::record::totals::Totals;
use crate::step::{Context, step};

/// An episode in progress.
pub(crate) struct Episode<'a, 'j> {
    pub(crate) context: Context<'a, 'j>,
    pub(crate) world: &'a mut World,
    /// Totals of all ranks; of interest to the first alone.
    pub(crate) totals: &'a mut Totals,
    pub(crate) round: usize,
    pub(crate) checkpoints: &'a Checkpoints,
}

/// Where an episode begins: with fresh hosts, or in the middle.
pub(crate) enum Start {
    Fresh,
    /// At this step, with these envs of this process.
    At(usize, Vec<SavedEnv>),
}

/// An episode that has run.
pub(crate) struct Trained {
    /// The envs of this process, not yet read against the test set.
    pub(crate) envs: Vec<Env>,
    /// Steps done.
    pub(crate) steps: usize,
    /// Whether it was asked to stop.
    pub(crate) interrupted: bool,
    /// The report of the policy's update, if there is one and the episode is whole.
    pub(crate) policy: Option<RoundReport>,
}

impl Episode<'_, '_> {
    /// Runs the steps from `start` on. One wait per step, and those of the checkpoints.
    ///
    /// # Errors
    /// A diverged env, a full disk, a failed device.
    pub(crate) fn train(&mut self, start: Start) -> Result<Trained> {
        let round = self.round;
        let _round = self.context.fleet.machine.span(|| format!("round {round}"));
        let (first, mut envs) = match start {
            Start::Fresh => {
                self.context.journal.announce(Event::RoundStarted { round });
                (0, self.fresh_envs()?)
            }
            Start::At(step, saved) => (step, self.restore_envs(saved)?),
        };
        let mut steps = first;
        let mut interrupted = false;
        for step in first..self.context.setup.config.steps {
            interrupted = self.step_of_all(&mut envs, Position { round, step })?;
            steps += 1;
            // Between two rounds the run itself writes one.
            if steps < self.context.setup.config.steps {
                self.checkpoint(&mut envs, steps, interrupted)?;
            }
            if interrupted {
                break;
            }
        }
        // An episode that was cut short is no whole one to learn from.
        let policy = match steps == self.context.setup.config.steps {
            true => self.end_round(&envs, steps)?,
            false => None,
        };
        Ok(Trained { envs, steps, interrupted, policy })
    }

    /// Writes a checkpoint where one is due, and where the run is stopped. The run's first step has
    /// one because hot scopes judge from the second on: whatever they refuse, there is a checkpoint
    /// to go on from (V2).
    fn checkpoint(&mut self, envs: &mut [Env], step: usize, stopped: bool) -> Result<()> {
        let every = self.context.setup.config.checkpoint_every;
        let first = self.round == 0 && step == 1;
        let due = every > 0 && (first || step.is_multiple_of(every));
        if !due && !stopped {
            return Ok(());
        }
        let next = Position { round: self.round, step };
        // Where a run is stopped by hand must not show in its events.
        if due {
            self.context.journal.announce(Event::CheckpointWritten { round: next.round, step });
        }
        let mut saved: Vec<SavedEnv> =
            envs.iter_mut().map(|env| env.save(self.context.setup)).collect::<Result<_>>()?;
        for (env, replicas) in saved.iter_mut().zip(&mut self.context.fleet.replicas) {
            env.tensors.exchange = self.world.merge(replicas.save()?)?;
        }
        let controller = self.context.controller.get().save()?;
        let current = Current { next, envs: saved, totals: *self.totals, controller };
        self.checkpoints.write(current, self.world, self.context.journal)
    }

    fn restore_envs(&mut self, saved: Vec<SavedEnv>) -> Result<Vec<Env>> {
        for (env, replicas) in saved.iter().zip(&mut self.context.fleet.replicas) {
            replicas.restore(&env.tensors.exchange);
        }
        let options = self.env_options();
        let restore = |(options, saved)| Env::restore(self.context.setup, options, saved);
        options.into_iter().zip(saved).map(restore).collect()
    }

    fn fresh_envs(&mut self) -> Result<Vec<Env>> {
        self.context.fleet.replicas.iter_mut().for_each(Replicas::forget);
        let envs = self.context.fleet.machine.envs();
        envs.for_each(|env| self.context.controller.get().begin_episode(env));
        let fresh = |options| Env::new(self.context.setup, options);
        self.env_options().into_iter().map(fresh).collect()
    }

    /// Options of the envs of this process.
    fn env_options(&self) -> Vec<EnvOptions<'_>> {
        let Context { setup, fleet, .. } = &self.context;
        let (seed, config) = (self.seed(), &setup.config);
        let batch_log = if config.log_batches { fleet.train.len().max(1) } else { 1 };
        let streams = fleet.machine.streams_by_env();
        streams.map(|(index, stream)| EnvOptions { index, stream, seed, batch_log }).collect()
    }

    /// Seed of the round's hosts.
    fn seed(&self) -> u64 {
        let config = &self.context.setup.config;
        // Round 0 uses the seed itself, so that one round is what its seed says.
        match self.round {
            0 => config.seed,
            round => Rng::new(config.seed, Purpose::Init, u64::MAX, round as u64).next_u64(),
        }
    }

    /// One step on all ranks; whether one of them was asked to stop.
    fn step_of_all(&mut self, envs: &mut [Env], when: Position) -> Result<bool> {
        self.context.spent = Totals::default();
        let done = step(&mut self.context, envs, when);
        if done.is_err() {
            self.context.fleet.replicas.iter_mut().for_each(Replicas::leave);
        }
        // Of a step that failed, too, what happened is told.
        let told = self.world.gather_envs((self.context.journal.take_kept(), self.context.spent));
        let (done, told) = match (done, told) {
            // Its own says more than that another is gone.
            (Err(own), Err(_)) => return Err(own),
            (done, told) => (done, told?),
        };
        let (mut kept, spent): (Vec<Vec<Kept>>, Vec<Totals>) = told.into_iter().unzip();
        let seen = if self.world.has_same_envs() { digest(&kept) } else { 0 };
        self.totals.add(&spent);
        together(&mut kept, &spent);
        self.context.journal.tell_kept(kept.into_iter());
        let stops = done.and_then(|()| self.context.journal.stop_requested());
        let (stops, seen): (Vec<bool>, Vec<u32>) =
            self.world.all_gather(stops.map(|stops| (stops, seen)))?.into_iter().unzip();
        // What all have is the same on all.
        if seen.iter().any(|other| *other != seen[0]) {
            let fingerprints = seen.iter().map(|seen| format!("{seen:08x}")).collect::<Vec<_>>();
            return Err(Error::ReplicasDiffer { fingerprints: fingerprints.join(", ") });
        }
        Ok(stops.contains(&true))
    }

    /// The episode is over: a controller that learns does so now, and it is told of.
    fn end_round(&mut self, envs: &[Env], steps: usize) -> Result<Option<RoundReport>> {
        let _span = self.context.fleet.machine.span(|| "policy update");
        let views: Vec<EnvView<'_>> = envs.iter().map(|env| env.view(steps, steps)).collect();
        let report = self.context.controller.get().end_round(&views)?;
        if let Some(report) = report.clone() {
            let round = self.round;
            self.context.journal.announce(Event::PolicyUpdated { round, report });
        }
        Ok(report)
    }
}

/// A digest of what a step was for its envs: what they measured, what was decided, and the
/// fingerprints.
fn digest(kept: &[Vec<Kept>]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    for Kept { event, .. } in kept.iter().flatten() {
        if let Event::StepCompleted(step) = event {
            let StepCompleted { train_loss, control_loss, action, reward, fingerprint, .. } = step;
            let all =
                format!("{train_loss:?} {control_loss:?} {action} {reward:?} {fingerprint:?}");
            crc.update(all.as_bytes());
        }
    }
    crc.finalize()
}

/// Makes one step of what ranks did side by side: its speed, where it is told of, is that of all of
/// them together.
fn together(kept: &mut [Vec<Kept>], spent: &[Totals]) {
    let images: u64 = spent.iter().map(|rank| rank.images).sum();
    let seconds = spent.iter().map(|rank| rank.step_seconds).fold(0.0, f64::max);
    for Kept { event, .. } in kept.iter_mut().flatten() {
        if let Event::StepCompleted(step) = event {
            step.step_seconds = step.step_seconds.map(|_| seconds);
            step.images_per_second = step.images_per_second.map(|_| images as f64 / seconds);
        }
    }
}

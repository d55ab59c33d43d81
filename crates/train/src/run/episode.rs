//! One episode of all envs: steps of training, measuring and acting, then the report.
//!
//! The way of a step: time passes for the hosts and their networks follow (`growth::open_step`); the epoch's
//! batches are gathered and trained on, all envs side by side, nothing is waited for (`train_epoch`, H4); the
//! control split is evaluated in every configuration (`evaluate`); one read-back brings all metrics of all
//! envs (H1); what has failed is rolled back (`governor`); the controller decides and `growth::act` does it; what
//! is in order is kept. Then all processes meet: the first hears what happened to the envs of all.

use meristem_control::{EnvView, RoundReport};
use meristem_device::random::{Purpose, Rng};
use meristem_device::{Counts, HotScope, Policy};
use meristem_nn::Network;

use serde::{Deserialize, Serialize};

use crate::checkpoint::writer::Keeper;
use crate::checkpoint::{EnvState, EnvTensors, Position};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::fleet::replicas::{Epoch, Replicas};
use crate::fleet::{Fleet, labelled, networks};
use crate::processes::world::World;
use crate::record::events::{Event, StepCompleted};
use crate::record::observer::{Journal, Told};
use crate::record::summary::{HotTotals, Validation};
use crate::setup::Setup;
use crate::setup::controllers::AnyController;
use crate::step::counterfactuals;
use crate::step::growth::{self, When};
use crate::step::measure;
use crate::step::permitted;
use crate::step::telemetry::{Clock, Telling};

/// What a run adds up over its episodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Totals {
    /// Steps of all rounds.
    pub(crate) steps: u64,
    /// Batches of all envs.
    pub(crate) training_steps: u64,
    /// Images trained.
    pub(crate) images: u64,
    /// Seconds in steps.
    pub(crate) step_seconds: f64,
    /// Inner loops of the epochs after the first of each process.
    pub(crate) hot: HotTotals,
    /// Counterfactual validation.
    pub(crate) validation: Validation,
    /// Rollbacks of all envs.
    pub(crate) rollbacks: u64,
}

impl Totals {
    /// Adds a step that all ranks did, side by side.
    fn add(&mut self, ranks: &[Totals]) {
        self.steps += ranks.first().map_or(0, |first| first.steps);
        self.step_seconds += ranks.iter().map(|rank| rank.step_seconds).fold(0.0, f64::max);
        for rank in ranks {
            self.training_steps += rank.training_steps;
            self.images += rank.images;
            self.hot.merge(&rank.hot);
            self.validation.merge(&rank.validation);
            self.rollbacks += rank.rollbacks;
        }
    }
}

/// Everything an episode works with.
pub(crate) struct Episode<'a, 'j> {
    pub(crate) setup: &'a Setup,
    pub(crate) world: &'a mut World,
    pub(crate) fleet: &'a mut Fleet,
    pub(crate) controller: &'a mut AnyController,
    pub(crate) journal: &'a mut Journal<'j>,
    /// Of all ranks; of interest to the first alone.
    pub(crate) totals: &'a mut Totals,
    /// What the step in progress adds to them here.
    pub(crate) spent: Totals,
    pub(crate) round: usize,
    pub(crate) keeper: &'a Keeper,
    /// Whether this process has done a step: its first may make what the others reuse (D5).
    pub(crate) warm: &'a mut bool,
}

/// Where an episode begins: with fresh hosts, or in the middle.
pub(crate) enum Start {
    Fresh,
    /// At this step, with these envs of this process.
    At(usize, Vec<(EnvState, EnvTensors)>),
}

/// An episode that has run.
pub(crate) struct Trained {
    /// The envs of this process, not yet read against the test set.
    pub(crate) envs: Vec<Env>,
    /// Steps done.
    pub(crate) steps: usize,
    /// Whether it was asked to stop.
    pub(crate) interrupted: bool,
    /// What the policy learned, if there is one and the episode is whole.
    pub(crate) policy: Option<RoundReport>,
}

impl Episode<'_, '_> {
    /// Runs the steps from `start` on. One wait per step, and those of the checkpoints.
    ///
    /// # Errors
    /// A diverged env, a full disk, a failed device.
    pub(crate) fn train(&mut self, start: Start) -> Result<Trained> {
        let round = self.round;
        let _round = self.fleet.machine.span(|| format!("round {round}"));
        let (first, mut envs) = match start {
            Start::Fresh => {
                self.journal.announce(Event::RoundStarted { round });
                (0, self.fresh_envs()?)
            }
            Start::At(step, saved) => (step, self.restore_envs(saved)?),
        };
        let mut steps = first;
        let mut interrupted = false;
        for step in first..self.setup.config.steps {
            interrupted = self.step_of_all(&mut envs, When { round, step })?;
            steps += 1;
            // Between two rounds the run itself writes one.
            if steps < self.setup.config.steps {
                self.checkpoint(&mut envs, steps, interrupted)?;
            }
            if interrupted {
                break;
            }
        }
        // An episode that was cut short is no whole one to learn from.
        let policy = match steps == self.setup.config.steps {
            true => self.end_round(&envs, steps)?,
            false => None,
        };
        Ok(Trained { envs, steps, interrupted, policy })
    }

    /// Writes a checkpoint where one is due, and where the run is stopped. The run's first step has one because
    /// hot scopes judge from the second on: whatever they refuse, there is a checkpoint to go on from (V2).
    fn checkpoint(&mut self, envs: &mut [Env], step: usize, stopped: bool) -> Result<()> {
        let every = self.setup.config.checkpoint_every;
        let first = self.round == 0 && step == 1;
        let due = every > 0 && (first || step.is_multiple_of(every));
        if !due && !stopped {
            return Ok(());
        }
        let next = Position { round: self.round, step };
        // Where a run is stopped by hand must not show in its events.
        if due {
            self.journal.announce(Event::CheckpointWritten { round: next.round, step });
        }
        let mut saved: Vec<(EnvState, EnvTensors)> =
            envs.iter_mut().map(|env| env.save(self.setup)).collect::<Result<_>>()?;
        for ((_, tensors), replicas) in saved.iter_mut().zip(&mut self.fleet.replicas) {
            tensors.exchange = self.world.unite(replicas.save()?)?;
        }
        let controller = self.controller.get().save()?;
        let others = (&mut *self.world, &mut *self.journal);
        self.keeper.write(next, saved, (*self.totals, controller), others)
    }

    fn restore_envs(&mut self, saved: Vec<(EnvState, EnvTensors)>) -> Result<Vec<Env>> {
        for ((_, tensors), replicas) in saved.iter().zip(&mut self.fleet.replicas) {
            replicas.restore(&tensors.exchange);
        }
        let (seed, batch_log) = (self.seed(), self.batch_log());
        let places = self.fleet.machine.places();
        places
            .zip(saved)
            .map(|(place, (state, tensors))| {
                Env::restore(self.setup, place, (seed, batch_log), (state, &tensors))
            })
            .collect()
    }

    /// Seed of the round's hosts.
    fn seed(&self) -> u64 {
        let config = &self.setup.config;
        // Round 0 uses the seed itself, so that one round is what its seed says.
        match self.round {
            0 => config.seed,
            round => Rng::new(config.seed, Purpose::Init, u64::MAX, round as u64).next_u64(),
        }
    }

    /// Batch losses that a network remembers.
    fn batch_log(&self) -> usize {
        if self.setup.config.log_batches { self.fleet.train.len().max(1) } else { 1 }
    }

    fn fresh_envs(&mut self) -> Result<Vec<Env>> {
        self.fleet.replicas.iter_mut().for_each(Replicas::forget);
        let (seed, batch_log) = (self.seed(), self.batch_log());
        let places = self.fleet.machine.places();
        places
            .map(|(index, stream)| {
                self.controller.get().begin_episode(index);
                Env::new(self.setup, index, stream, (seed, batch_log))
            })
            .collect()
    }

    /// One step on all ranks; whether one of them was asked to stop.
    fn step_of_all(&mut self, envs: &mut [Env], when: When) -> Result<bool> {
        self.spent = Totals::default();
        let done = self.step(envs, when);
        if done.is_err() {
            self.fleet.replicas.iter_mut().for_each(Replicas::leave);
        }
        // Of a step that failed, too, what happened is told.
        let told = self.world.of_envs((self.journal.take_kept(), self.spent));
        let (done, told) = match (done, told) {
            // Its own says more than that another is gone.
            (Err(own), Err(_)) => return Err(own),
            (done, told) => (done, told?),
        };
        let (mut kept, spent): (Vec<Vec<Told>>, Vec<Totals>) = told.into_iter().unzip();
        let seen = if self.world.is_alike() { digest(&kept) } else { 0 };
        self.totals.add(&spent);
        together(&mut kept, &spent);
        self.journal.tell_kept(kept.into_iter());
        let stops = done.and_then(|()| self.journal.stop_requested());
        let (stops, seen): (Vec<bool>, Vec<u32>) =
            self.world.share(stops.map(|stops| (stops, seen)))?.into_iter().unzip();
        // What all have is the same on all.
        if seen.iter().any(|other| *other != seen[0]) {
            let fingerprints = seen.iter().map(|seen| format!("{seen:08x}")).collect::<Vec<_>>();
            return Err(Error::ReplicasDiffer { fingerprints: fingerprints.join(", ") });
        }
        Ok(stops.contains(&true))
    }

    /// One step of this process' envs.
    fn step(&mut self, envs: &mut [Env], when: When) -> Result<()> {
        let telling = Telling::of(&self.setup.config, when.step);
        let mut clock = Clock::start(telling);
        let _step = self.fleet.machine.span(|| format!("step {}", when.step));
        for env in &mut *envs {
            growth::open_step(env, self.setup, when, self.journal)?;
        }
        set_alphas(envs)?;
        for (env, sizes) in envs.iter_mut().zip(&self.fleet.batch_sizes) {
            // What growth makes new is made here, not in the inner loop.
            for &size in sizes {
                env.network.prepare_training(size)?;
            }
        }
        for (env, replicas) in envs.iter_mut().zip(&mut self.fleet.replicas) {
            replicas.open(&mut env.network, self.fleet.train.order().batches())?;
        }
        clock.lap(|phases| &mut phases.open);
        let epoch = when.round * self.setup.config.steps + when.step;
        self.train_epoch(envs, epoch as u64)?;
        clock.lap(|phases| &mut phases.train);
        let control = self.hot_scopes(permitted::CONTROL_STEP, permitted::control_step);
        measure::control(self.fleet, envs)?;
        measure::read(self.fleet, envs)?;
        clock.lap(|phases| &mut phases.measure);
        self.spent.images = envs.iter().map(|env| env.train.samples).sum();
        self.spent.step_seconds = clock.measured();
        self.tell_batches(envs, when);
        drop(control);
        self.journal.next_phase();
        self.govern(envs, when)?;
        self.journal.next_phase();
        let ranks = self.setup.config.policy_ranks().div_ceil(self.world.size()) as u64;
        let deciding = self.hot_scopes(permitted::DECIDE, |_| permitted::decide(ranks));
        let actions = self.decide(envs, when)?;
        drop(deciding);
        clock.lap(|phases| &mut phases.decide);
        *self.warm = true;
        self.spent.steps = 1;
        self.journal.next_phase();
        for (env, action) in envs.iter().zip(actions) {
            if let Some(found) = counterfactuals::of(env, when)? {
                self.spent.validation.add(&found.cost);
                self.journal.emit(Event::Counterfactuals(found));
            }
            let mut event = step_event(env, when, action, telling);
            clock.tell(&mut event, self.spent.images);
            self.journal.emit(Event::StepCompleted(event));
        }
        self.keep(envs, when)
    }

    /// The inner loop: every batch of the epoch, to every env. Waits for nothing (D5, H4): a hot scope counts
    /// what it does, and refuses what it must not do.
    fn train_epoch(&mut self, envs: &mut [Env], epoch: u64) -> Result<()> {
        let _span = self.fleet.machine.span(|| "train_epoch");
        let Fleet { machine, train, replicas, .. } = &mut *self.fleet;
        // What goes to another process is waited for, and counted.
        let sends = replicas.is_some() && self.world.size() > 1;
        let policy = if sends || !*self.warm { Policy::Off } else { self.setup.config.hot_scope.0 };
        let (machine, journal) = (&*machine, &mut *self.journal);
        let scopes = || machine.hot_scopes(permitted::TRAIN_STEP, policy, permitted::train_step);
        let Epoch { batches, counts } = match (replicas, &mut *envs) {
            (Some(replicas), [Env { index, network, .. }]) => {
                let mut observed = |network: &Network| journal.batch_enqueued(*index, network);
                replicas.train_epoch(epoch, (train, network), &scopes, &mut observed)?
            }
            _ => {
                train.start_epoch(epoch)?;
                let scopes = scopes();
                let mut networks = networks(envs);
                let mut batches = 0;
                while let Some(next) = train.next()? {
                    batches += next.len() as u64;
                    networks.train_step(&labelled(&next))?;
                    for (batch, network) in next.iter().zip(networks.networks()) {
                        journal.batch_enqueued(batch.env, network)?;
                    }
                }
                let counts = scopes.into_iter().map(|scope| scope.finish().counts).collect();
                Epoch { batches, counts }
            }
        };
        if *self.warm {
            self.spent.hot.add(batches, counts.into_iter());
        }
        self.spent.training_steps = batches;
        Ok(())
    }

    /// A scope on each device. This process's first step is only counted.
    #[track_caller]
    pub(crate) fn hot_scopes(
        &self,
        name: &'static str,
        permitted: impl Fn(u64) -> Counts,
    ) -> Vec<HotScope> {
        self.fleet.machine.hot_scopes(name, self.hot_policy(), permitted)
    }

    fn hot_policy(&self) -> Policy {
        if *self.warm { self.setup.config.hot_scope.0 } else { Policy::Off }
    }

    /// One line per batch and env, in the order in which they were trained.
    fn tell_batches(&mut self, envs: &[Env], When { round, step }: When) {
        if !self.setup.config.log_batches {
            return;
        }
        for batch in 0..self.fleet.train.len() {
            self.journal.next_phase();
            for env in envs {
                if let Some(&loss) = env.train.batch_losses.get(batch) {
                    let env = env.index;
                    self.journal.emit_waiting(Event::BatchCompleted {
                        env,
                        round,
                        step,
                        batch,
                        loss,
                    });
                }
            }
        }
    }

    /// Asks the controller about all envs at once, and does what it says; the actions in words.
    fn decide(&mut self, envs: &mut [Env], when: When) -> Result<Vec<String>> {
        let _span = self.fleet.machine.span(|| "decide");
        let steps = self.setup.config.steps;
        envs.iter_mut().for_each(Env::remember);
        let views: Vec<EnvView<'_>> = envs.iter().map(|env| env.view(when.step, steps)).collect();
        let actions = self.controller.get().decide_all(&views)?;
        let both = envs.iter_mut().zip(&actions);
        let words: Vec<String> = both
            .map(|(env, action)| growth::act(env, action, self.setup, when, self.journal))
            .collect::<Result<_>>()?;
        let rewards: Vec<f32> = envs.iter().map(|env| env.reward.total() as f32).collect();
        self.controller.get().reward_all(&rewards)?;
        Ok(words)
    }

    /// The episode is over: a controller that learns does so now, and it is told of.
    fn end_round(&mut self, envs: &[Env], steps: usize) -> Result<Option<RoundReport>> {
        let _span = self.fleet.machine.span(|| "policy update");
        let views: Vec<EnvView<'_>> = envs.iter().map(|env| env.view(steps, steps)).collect();
        let report = self.controller.get().end_round(&views)?;
        if let Some(report) = report.clone() {
            let round = self.round;
            self.journal.announce(Event::PolicyUpdated { round, report });
        }
        Ok(report)
    }
}

/// Gives every network the alphas of its env's configurations, and empty metrics.
///
/// # Errors
/// A failed stream.
pub(crate) fn set_alphas(envs: &mut [Env]) -> Result<()> {
    let tables: Vec<Vec<Vec<f32>>> = envs.iter().map(|env| env.alphas().to_vec()).collect();
    let mut networks = networks(envs);
    networks.set_alphas(&tables)?;
    Ok(networks.reset_metrics()?)
}

/// A digest of what a step was for its envs: what they measured, what was decided, and the fingerprints.
fn digest(kept: &[Vec<Told>]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    for (_, _, event) in kept.iter().flatten() {
        if let Event::StepCompleted(step) = event {
            let StepCompleted { train_loss, control_loss, action, reward, fingerprint, .. } = step;
            let all =
                format!("{train_loss:?} {control_loss:?} {action} {reward:?} {fingerprint:?}");
            crc.update(all.as_bytes());
        }
    }
    crc.finalize()
}

/// Makes one step of what ranks did side by side: its speed, where it is told of, is that of all of them together.
fn together(kept: &mut [Vec<Told>], spent: &[Totals]) {
    let images: u64 = spent.iter().map(|rank| rank.images).sum();
    let seconds = spent.iter().map(|rank| rank.step_seconds).fold(0.0, f64::max);
    for (_, _, event) in kept.iter_mut().flatten() {
        if let Event::StepCompleted(step) = event {
            step.step_seconds = step.step_seconds.map(|_| seconds);
            step.images_per_second = step.images_per_second.map(|_| images as f64 / seconds);
        }
    }
}

fn step_event(
    env: &Env,
    When { round, step }: When,
    action: String,
    telling: Telling,
) -> StepCompleted {
    let train = &env.train;
    let samples = train.samples.max(1) as f64;
    StepCompleted {
        env: env.index,
        round,
        step,
        train_loss: train.loss_sum / samples,
        train_accuracy: train.correct as f64 / samples,
        control_loss: env.control.and_then(|control| control.loss()),
        control_accuracy: env.control.and_then(|control| control.accuracy()),
        host_gradient_norm: telling.host_gradient_norm(env),
        host_parameters: env.parameters().host,
        grown_parameters: env.parameters().grown(),
        slots: growth::slot_states(env, telling.gradients()),
        action,
        reward: env.reward,
        step_seconds: None,
        images_per_second: None,
        phases: None,
        gradients: telling.gradient_statistics(env),
        fingerprint: (train.fingerprint != 0).then(|| format!("{:016x}", train.fingerprint)),
    }
}

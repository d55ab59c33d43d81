//! One step of this process's envs:
//!
//! - `growth::open_step` advances the hosts and updates their networks;
//! - `training` gathers the batches of the epoch and trains all envs side by side, without waiting;
//! - `measure` evaluates the control split in every configuration, and reads the metrics of all
//!   envs back at once;
//! - `governor` rolls failed envs back;
//! - `visit` lets an external controller look at the envs;
//! - `decision` asks the controller, `growth::act` executes its actions;
//! - `governor::take_snapshots` takes the snapshots that are due.
//!
//! The other modules: `counterfactuals` has the contributions of modules, `telemetry` the details
//! for the events, `permitted` the limits of the hot path, and `report` the evaluation at the end
//! of an episode.

mod context;
mod counterfactuals;
mod decision;
mod governor;
mod growth;
mod measure;
mod permitted;
pub(crate) mod report;
mod telemetry;
mod training;
pub(crate) mod visit;

pub(crate) use self::context::Context;
use self::telemetry::{Clock, Telling};
use crate::env::{Env, Twin, networks, set_alphas};
use crate::error::Result;
use crate::fleet::Fleet;
use crate::position::Position;
use crate::record::events::{Event, StepCompleted, TwinStep};

/// Runs one step. Waits for the devices.
///
/// # Errors
/// A diverged env, a device failure.
pub(crate) fn step(context: &mut Context<'_, '_>, envs: &mut [Env], when: Position) -> Result<()> {
    let telling = Telling::of(&context.setup.config, when.step);
    let mut clock = Clock::start(telling);
    let _step = context.fleet.machine.span(|| format!("step {}", when.step));
    for env in &mut *envs {
        growth::open_step(env, context.setup, when, context.journal)?;
    }
    set_alphas(envs)?;
    for (env, sizes) in envs.iter_mut().zip(&context.fleet.batch_sizes) {
        // Memory for new plans is allocated here, not in the inner loop.
        env.prepare_training(sizes)?;
    }
    prepare(context.fleet, envs)?;
    for (env, replicas) in envs.iter_mut().zip(&mut context.fleet.replicas) {
        replicas.open(&mut env.network, context.fleet.train.order().batches())?;
    }
    clock.lap(|phases| &mut phases.open);
    let epoch = when.round * context.setup.config.steps + when.step;
    training::train_epoch(context, envs, epoch as u64)?;
    training::recompute_statistics(context, envs, epoch as u64)?;
    clock.lap(|phases| &mut phases.train);
    let workers = context.fleet.machine.workers();
    let limits = |envs| permitted::control_step(envs, workers);
    let control = context.hot_scopes(permitted::CONTROL_STEP, limits);
    measure::control(context.fleet, envs)?;
    measure::read(context.fleet, envs)?;
    clock.lap(|phases| &mut phases.measure);
    for env in &mut *envs {
        let images = env.train.samples;
        let twin = env.twin.as_ref().map_or(0, Twin::images);
        context.spent.images += images + twin;
        // A backward pass costs two forward passes: by activations, and by weights.
        context.spent.training_flops += env.count_flops(3, images)?;
    }
    context.spent.step_seconds = clock.measured();
    tell_batches(context, envs, when);
    drop(control);
    context.journal.next_phase();
    governor::govern(context, envs, when)?;
    context.journal.next_phase();
    envs.iter_mut().for_each(Env::remember);
    visit::before_decision(context, envs, when)?;
    let ranks = context.setup.config.policy_ranks().div_ceil(context.processes) as u64;
    let taught = when.round < context.setup.config.ppo_demonstrations;
    let deciding = context.hot_scopes(permitted::DECIDE, |_| permitted::decide(ranks, taught));
    let actions = decision::decide(context, envs, when)?;
    drop(deciding);
    clock.lap(|phases| &mut phases.decide);
    *context.warm = true;
    context.spent.steps = 1;
    context.journal.next_phase();
    for (env, action) in envs.iter().zip(actions) {
        if let Some(found) = counterfactuals::of(env, when)? {
            context.spent.counterfactual_cost.add(&found.cost);
            context.journal.emit(Event::Counterfactuals(found));
        }
        let mut event = step_event(env, when, action, telling);
        clock.tell(&mut event, context.spent.images);
        context.journal.emit(Event::StepCompleted(event));
    }
    governor::take_snapshots(context, envs, when)
}

/// Builds what the inner loop and the evaluation launch for all envs at once, so that neither does.
fn prepare(fleet: &Fleet, envs: &mut [Env]) -> Result<()> {
    let rows: Vec<_> = envs.iter().map(|env| 0..env.configurations()).collect();
    let mut networks = networks(envs);
    if fleet.replicas.is_none() {
        fleet.train_batches.iter().try_for_each(|sizes| networks.prepare_training(sizes))?;
    }
    let mut evaluated = fleet.control_batches.iter();
    evaluated.try_for_each(|sizes| networks.prepare_evaluation(sizes, &rows, 0))
}

/// Records one event per batch and env, in the order of training.
fn tell_batches(context: &mut Context<'_, '_>, envs: &[Env], Position { round, step }: Position) {
    if !context.setup.config.log_batches {
        return;
    }
    for batch in 0..context.fleet.train.len() {
        context.journal.next_phase();
        for env in envs {
            if let Some(&loss) = env.train.batch_losses.get(batch) {
                let env = env.index;
                context.journal.emit_waiting(Event::BatchCompleted {
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

fn step_event(
    env: &Env,
    Position { round, step }: Position,
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
        images_per_s: None,
        phases: None,
        gradients: telling.gradient_statistics(env),
        fingerprint: (train.fingerprint != 0).then(|| format!("{:016x}", train.fingerprint)),
        twin: env.twin.as_ref().map(twin_step),
    }
}

fn twin_step(twin: &Twin) -> TwinStep {
    let control = twin.control();
    TwinStep {
        train_loss: twin.train_loss(),
        control_loss: control.loss(),
        control_accuracy: control.accuracy(),
    }
}

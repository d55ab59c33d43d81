//! Governor in the training loop: detection of failed envs, and their recovery (`docs/growth.md`,
//! Governor).
//!
//! Every env is checked ([`LossMonitor`]) after the read-back of a step and before any decision, by
//! its control loss or, if there is no control split, by its training loss. Both losses and all
//! weights must be finite.
//!
//! **A rollback** restores the snapshot: the weights and statistics of the host and of its
//! fossilized modules, bit for bit. Live modules are pruned, and the optimiser is reset. Earlier
//! measurements are dropped: the restored host is evaluated on the control split, and its losses
//! and scores, its reward and its trajectory start there, so that no difference spans the rollback.
//! The step then continues as for every other env: the controller decides about the restored host,
//! which trains again in the next step.
//!
//! **The cause** is the last transition of the trajectory that changed the network (a successful op
//! other than WAIT), or the last transition if none did. It gets the penalty, and the trajectory
//! ends before this step as a termination. The first step of an episode has no transition before
//! it, so nothing is ended or penalised then.
//!
//! **Snapshots** are kept on the env's device. One is taken at the beginning of an episode, then at
//! fixed intervals, and whenever a module is fossilized or a layer gets wider, so that it always
//! has the env's fossilized modules and widths. In a step that failed, or whose loss was a spike,
//! only a fossilized module or a wider layer causes a snapshot; in such a step the snapshot for a
//! wider layer does not reset the count of failures. The run ends after too many failures
//! without a snapshot in between, because rolling back does not help, and after an episode in which
//! every step fails. It ends for all envs, because a policy learns from all envs or from none. In a
//! run with members, only the member of the env ends, unless the controller is a policy or a user's
//! program.

use meristem_control::{GovernorConfig, TrainingFailure};
use meristem_grow::StageChange;

use crate::env::{Env, GovernorState};
use crate::error::{Error, Result};
use crate::position::StepPosition;
use crate::record::events::Event;
use crate::resources::Replicas;
use crate::step::context::StepContext;
use crate::step::growth::ModulesBefore;
use crate::step::{measure, permitted};

/// Checks all envs by the measurements of the step, and restores failed ones from their snapshots.
/// Waits for the device if an env failed.
///
/// # Errors
/// [`Error::Diverged`] after too many failures, or a device failure.
pub(super) fn govern(context: &mut StepContext<'_, '_>) -> Result<()> {
    context.journal.next_phase();
    let (config, guessing) = (context.setup.config.governor, context.setup.task.guessing);
    let mut restored = vec![];
    for nth in 0..context.population.envs.len() {
        let env = &mut context.population.envs[nth];
        let loss = env.governed_loss();
        if let Some(failure) = env.governor.monitor.check(&config, loss, guessing) {
            roll_back(context, nth, failure, &config)?;
            restored.push(nth);
        }
    }
    measure::evaluate_again(context.resources, context.population, &restored)
}

fn roll_back(
    context: &mut StepContext<'_, '_>,
    nth: usize,
    failure: TrainingFailure,
    config: &GovernorConfig,
) -> Result<()> {
    let env = &mut context.population.envs[nth];
    let _span = context.resources.devices.span(|| format!("rollback of env {}", env.index));
    let (index, number, StepPosition { round, step }) = (env.index, env.number, context.when);
    env.governor.failures += 1;
    let GovernorState { snapshot_step: restored_step, failures, .. } = env.governor;
    // An episode that is too short for the limit must not consist of failures only.
    if failures >= config.failures_max || failures as usize == context.setup.config.steps {
        let error = Error::Diverged { env: index, round, step, failure, failures };
        let what = format!("{}; rolling back does not help", failure.describe());
        context.journal.emit_waiting(Event::Anomaly { env: index, round, step, what });
        if !context.ends_members() {
            return Err(error);
        }
        context.diverged.push((index, error));
    }
    let env = &mut context.population.envs[nth];
    let cause = env.governor.cause(env.grown.own_step(step));
    let control_loss = env.grown.control_loss();
    let before = ModulesBefore::new(env);
    let changes = env.restore_snapshot(context.setup)?;
    context.resources.replicas.iter_mut().for_each(Replicas::forget);
    env.governor.rolled_back();
    context.controller.get().roll_back(number, cause, config.penalty as f32)?;
    context.spent.rollbacks += 1;
    let pruned = changes.iter().map(|change: &StageChange| change.slot.to_string()).collect();
    context.journal.emit_waiting(Event::GovernorRollback {
        env: index,
        round,
        step,
        failure,
        train_loss: env.grown.train_loss(),
        control_loss,
        restored_step: restored_step.map(|own| env.grown.step_of_round(own)),
        pruned,
        penalty: cause.map_or(0.0, |_| config.penalty),
        cause_step: cause.map(|own| env.grown.step_of_round(own)),
    });
    changes
        .iter()
        .for_each(|change| before.record_change(env, change, context.when, context.journal));
    Ok(())
}

/// Takes the snapshots that are due after a step. Waits for the device only if a layer became wider
/// in this step, or, on a CUDA device, if the topology of a host with a due snapshot changed in it.
///
/// # Errors
/// Out of memory, a device failure.
pub(super) fn take_snapshots(context: &mut StepContext<'_, '_>) -> Result<()> {
    let (config, policy, step) =
        (context.setup.config.governor, context.hot_policy(), context.when.step);
    let mut due: Vec<&mut Env> = vec![];
    for env in &mut context.population.envs {
        let own_step = env.grown.own_step(step);
        if env.has_changed() {
            env.governor.changed = Some(own_step);
        }
        if env.is_snapshot_due(&config, own_step) {
            env.grown.sync(context.setup)?;
            due.push(env);
        }
    }
    let devices = &context.resources.devices;
    let _scopes = devices.hot_scopes(permitted::SNAPSHOT, policy, permitted::snapshot);
    let (mut networks, mut snapshots) = (vec![], vec![]);
    for env in &mut due {
        let (network, snapshot, graph) = env.snapshot_parts(context.setup)?;
        networks.push(network);
        snapshots.push((snapshot, graph));
    }
    meristem_nn::NetworkFleet::new(networks).take_snapshots(snapshots)?;
    for env in due {
        env.snapshot_taken(env.grown.own_step(step));
    }
    Ok(())
}

//! The governor in the loop: what it remembers of an env, and how an env that has failed goes on
//! (`docs/growth.md`, Governor).
//!
//! After the read-back of a step and before anything is decided, every env is judged ([`Vitals`]):
//! by its control loss, or by its training loss where there is no control split. Neither, and no
//! weight, may be NaN or infinite.
//!
//! **A rollback** brings back the snapshot: the weights and statistics of the host and of its
//! fossilized modules, bit for bit. Live modules are pruned, the optimiser starts anew. Nothing
//! that was measured before counts any more: the restored host is read against the control split,
//! and its history of losses and accuracies, its reward and its trajectory begin there, so that no
//! difference reaches across. Then the step goes on as in every other env: the controller decides
//! about the restored host, which trains again in the next step.
//!
//! **The cause** is the last transition of the trajectory that changed something (any op but WAIT
//! that succeeded), or, if none did, its last transition. It bears the penalty, and the trajectory
//! ends before this step as a termination. In an episode's first step there is no transition:
//! nothing is ended or punished then.
//!
//! **Snapshots** lie on the env's device. One is taken as the episode begins, then every so many
//! steps and after each fossilize, so that it always has the fossilized modules of its env; in a
//! step that failed, or whose loss was a spike, only a fossilize is a reason for one. Failures with
//! no snapshot between them say that going back is no help: the last that is allowed ends the run
//! (the other envs with it: what cannot be trained is for the user to mend, and a policy learns
//! from all envs or from none), and so does an episode of nothing but failures.

use meristem_control::{Failure, GovernorConfig};
use meristem_grow::StageChange;

use crate::env::{Env, Guard};
use crate::error::{Error, Result};
use crate::fleet::Replicas;
use crate::position::Position;
use crate::record::events::Event;
use crate::step::context::Context;
use crate::step::growth::Before;
use crate::step::{measure, permitted};

/// Judges all envs by what the step measured; those that have failed go back to their snapshots.
/// Waits for the device where one has.
///
/// # Errors
/// [`Error::Diverged`]: going back is no help. A failed device.
pub(crate) fn govern(
    context: &mut Context<'_, '_>,
    envs: &mut [Env],
    when: Position,
) -> Result<()> {
    let rules = context.setup.config.governor();
    let mut restored = vec![];
    for (index, env) in envs.iter_mut().enumerate() {
        let loss = env.vital_loss();
        if let Some(failure) = env.guard.vitals.check(&rules, loss) {
            roll_back(context, env, failure, &rules, when)?;
            restored.push(index);
        }
    }
    measure::again(context.fleet, envs, &restored)
}

fn roll_back(
    context: &mut Context<'_, '_>,
    env: &mut Env,
    failure: Failure,
    rules: &GovernorConfig,
    when: Position,
) -> Result<()> {
    let _span = context.fleet.machine.span(|| format!("rollback of env {}", env.index));
    let (index, Position { round, step }) = (env.index, when);
    env.guard.failures += 1;
    let Guard { snapshot_step: restored_step, failures, .. } = env.guard;
    // An episode too short for so many is not to pass either if it was nothing but failures.
    if failures >= rules.failures_max || failures as usize == context.setup.config.steps {
        let error = Error::Diverged { env: index, round, step, failure, failures };
        let what = format!("{}; going back is no help", failure.describe());
        context.journal.emit_waiting(Event::Anomaly { env: index, round, step, what });
        return Err(error);
    }
    let (cause, control_loss) = (env.guard.cause(step), env.control);
    let before = Before::of(env);
    let changes = env.restore_snapshot(context.setup)?;
    context.fleet.replicas.iter_mut().for_each(Replicas::forget);
    env.guard.rolled_back();
    context.controller.get().roll_back(index, cause, rules.penalty as f32)?;
    context.spent.rollbacks += 1;
    let pruned = changes.iter().map(|change: &StageChange| change.slot.to_string()).collect();
    context.journal.emit_waiting(Event::GovernorRollback {
        env: index,
        round,
        step,
        failure,
        train_loss: env.train.loss_sum / env.train.samples.max(1) as f64,
        control_loss: control_loss.and_then(|control| control.loss()),
        restored_step,
        pruned,
        penalty: cause.map_or(0.0, |_| rules.penalty),
        cause_step: cause,
    });
    changes.iter().for_each(|change| before.tell(env, change, when, context.journal));
    Ok(())
}

/// Takes the snapshots that are due after a step. Waits for nothing.
///
/// # Errors
/// Memory, a failed device.
pub(crate) fn take_snapshots(
    context: &Context<'_, '_>,
    envs: &mut [Env],
    Position { step, .. }: Position,
) -> Result<()> {
    let rules = context.setup.config.governor();
    let mut due: Vec<&mut Env> = vec![];
    for env in envs {
        if env.has_changed() {
            env.guard.changed = Some(step);
        }
        if env.is_snapshot_due(&rules, step) {
            env.sync_network(context.setup)?;
            due.push(env);
        }
    }
    let _scopes = context.hot_scopes(permitted::SNAPSHOT, permitted::snapshot);
    let (mut networks, mut snapshots) = (vec![], vec![]);
    for env in &mut due {
        let (network, snapshot, graph) = env.snapshot_due(context.setup)?;
        networks.push(network);
        snapshots.push((snapshot, graph));
    }
    meristem_nn::Fleet::of(networks).take_snapshots(snapshots)?;
    for env in due {
        (env.guard.snapshot_step, env.guard.failures) = (Some(step), 0);
    }
    Ok(())
}

//! Events of a step.

use crate::env::{Env, TrainedHost};
use crate::error::Result;
use crate::position::StepPosition;
use crate::record::events::{Event, StepCompleted, TwinStep};
use crate::step::context::StepContext;
use crate::step::telemetry::{StepClock, StepDetails};
use crate::step::{counterfactuals, growth};

/// Records one event per batch and env, in the order of training, if that is requested.
pub(super) fn record_batches(context: &mut StepContext<'_, '_>) {
    let StepPosition { round, step } = context.when;
    if !context.setup.config.log_batches {
        return;
    }
    for batch in 0..context.resources.train.len() {
        context.journal.next_phase();
        for env in &context.population.envs {
            let Some(&loss) = env.grown.metrics.batch_losses.get(batch) else { continue };
            let env = env.index;
            context.journal.emit_waiting(Event::BatchCompleted { env, round, step, batch, loss });
        }
    }
}

/// Records the results of the step, with the actions in words, and the contributions of modules.
///
/// # Errors
/// Never if the networks have metrics of every configuration.
pub(super) fn record_results(
    context: &mut StepContext<'_, '_>,
    actions: Vec<String>,
    clock: &StepClock,
) -> Result<()> {
    context.journal.next_phase();
    let has_own_loss = context.resources.loss.is_some();
    let StepContext { when, population, journal, spent, .. } = context;
    for (nth, (env, action)) in population.envs.iter().zip(actions).enumerate() {
        if let Some(found) = counterfactuals::measured(env, *when, has_own_loss)? {
            spent.counterfactual_cost.add(&found.cost);
            journal.emit(Event::Counterfactuals(found));
        }
        let mut event = step_event(env, *when, action, clock.details());
        event.twin = population.twins.get(nth).map(twin_step);
        clock.add_times(&mut event, spent.images);
        journal.emit(Event::StepCompleted(event));
    }
    Ok(())
}

fn step_event(
    env: &Env,
    StepPosition { round, step }: StepPosition,
    action: String,
    details: StepDetails,
) -> StepCompleted {
    let Env { grown, .. } = env;
    let fingerprint = Some(grown.metrics.fingerprint).filter(|fingerprint| *fingerprint != 0);
    StepCompleted {
        env: env.index,
        round,
        step,
        train_loss: grown.train_loss(),
        train_score: grown.train_score(),
        control_loss: grown.control_loss(),
        control_score: grown.control_score(),
        host_gradient_norm: details.host_gradient_norm(grown),
        host_parameters: grown.parameters.host,
        grown_parameters: grown.parameters.grown(),
        slots: growth::slot_states(env, details.gradients()),
        action,
        reward: env.reward,
        step_seconds: None,
        images_per_s: None,
        phases: None,
        gradients: details.gradient_statistics(grown),
        fingerprint: fingerprint.map(|fingerprint| format!("{fingerprint:016x}")),
        twin: None,
    }
}

fn twin_step(twin: &TrainedHost) -> TwinStep {
    let known = twin.unless_diverged();
    TwinStep {
        train_loss: known.map(TrainedHost::train_loss),
        control_loss: known.and_then(TrainedHost::control_loss),
        control_score: known.and_then(TrainedHost::control_score),
    }
}

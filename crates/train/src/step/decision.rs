//! Decision of a step.

use meristem_control::{ActionContext, EnvFacts};

use crate::error::Result;
use crate::resources::ScopedDevice;
use crate::step::context::StepContext;
use crate::step::{growth, permitted, visit, width_scores};

/// Calls the controller with all envs at once, executes its actions and computes their rewards.
/// Returns the actions in words.
///
/// # Errors
/// The controller's error, an illegal action.
pub(super) fn decide(context: &mut StepContext<'_, '_>) -> Result<Vec<String>> {
    context.journal.next_phase();
    width_scores::measure(context)?;
    let StepContext { setup, resources, population, when, .. } = &mut *context;
    for env in &mut population.envs {
        env.remember();
        let own = &setup.member(env.index).config;
        env.facts = EnvFacts {
            train_samples: resources.train.order().samples_of(env.index),
            lr_factor: own.lr_factor(env.grown.own_step(when.step)) as f32,
            score_kind: setup.task.score.kind(),
            widen_by: own.heuristic.widen_by,
            widen_up_to: own.heuristic.widen_up_to,
        };
    }
    visit::before_decision(context)?;
    let config = &context.setup.config;
    let ranks = config.policy_ranks().div_ceil(context.processes) as u64;
    let taught = context.when.round < config.ppo_demonstrations;
    let limits = |device: &ScopedDevice| permitted::decide(device, ranks, taught);
    let _scopes = context.hot_scopes(permitted::DECIDE, limits);
    let _span = context.resources.devices.span(|| "decide");
    let views = context.population.views(context.when.step, config.steps);
    let actions = context.controller.get().decide_all(&views)?;
    let both = actions.iter().zip(&views);
    let states: Vec<ActionContext> =
        both.map(|(action, view)| ActionContext::new(action, view)).collect();
    let mut words = vec![];
    for ((env, action), before) in context.population.envs.iter_mut().zip(&actions).zip(&states) {
        words.push(growth::act(env, action, before, context.setup, context.when, context.journal)?);
    }
    let rewards = context.population.envs.iter().map(|env| env.reward.total() as f32);
    context.controller.get().reward_all(&rewards.collect::<Vec<_>>())?;
    Ok(words)
}

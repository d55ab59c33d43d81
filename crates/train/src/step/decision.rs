//! Decision of a step.

use meristem_control::EnvView;

use crate::env::Env;
use crate::error::Result;
use crate::position::Position;
use crate::step::context::Context;
use crate::step::growth;

/// Asks the controller about all envs at once and executes its actions. Returns them in words.
pub(super) fn decide(
    context: &mut Context<'_, '_>,
    envs: &mut [Env],
    when: Position,
) -> Result<Vec<String>> {
    let _span = context.fleet.machine.span(|| "decide");
    let steps = context.setup.config.steps;
    let views: Vec<EnvView<'_>> = envs.iter().map(|env| env.view(when.step, steps)).collect();
    let actions = context.controller.get().decide_all(&views)?;
    let both = envs.iter_mut().zip(&actions);
    let words: Vec<String> = both
        .map(|(env, action)| growth::act(env, action, context.setup, when, context.journal))
        .collect::<Result<_>>()?;
    let rewards: Vec<f32> = envs.iter().map(|env| env.reward.total() as f32).collect();
    context.controller.get().reward_all(&rewards)?;
    Ok(words)
}

//! Contributions of an env's modules, and the cost of measuring them.

use meristem_grow::{Contribution, Interaction};
use meristem_nn::EvalMetrics;

use crate::env::Env;
use crate::error::Result;
use crate::position::StepPosition;
use crate::record::events::{
    CounterfactualCost, Counterfactuals, ModuleOff, ModulePair, ModulesOn,
};

/// Contributions of the live modules of an env with an alpha above 0; `None` without such modules,
/// or without a control split. With `has_own_loss` the program computes the loss.
///
/// # Errors
/// Never if the network has metrics of every configuration.
pub(super) fn measured(
    env: &Env,
    StepPosition { round, step }: StepPosition,
    has_own_loss: bool,
) -> Result<Option<Counterfactuals>> {
    let (asked, rows) = (&env.counterfactual, env.control_rows());
    let Some(main) = rows.first().filter(|_| !asked.modules().is_empty()) else { return Ok(None) };
    let grown = &env.grown;
    let scores: Vec<f64> = rows.iter().map(|row| grown.score_pp(row)).collect();
    let name = |slot: usize| env.grown.host.slots()[slot].name.to_string();
    let shapley = asked.shapley_pp(&scores);
    let module = |found: &Contribution| ModuleOff {
        slot: name(found.slot),
        score_without: found.score_without,
        contribution: found.score_pp,
        contribution_loss: found.loss,
        shapley: shapley[found.slot],
    };
    let pair = |pair: Interaction| ModulePair { slots: pair.slots.map(name), interaction: pair.pp };
    let on = |(row, metrics): (usize, &EvalMetrics)| ModulesOn {
        on: asked.on(row).map(name).collect(),
        score: metrics.score(grown.score).unwrap_or(f64::NAN),
        loss: metrics.loss().unwrap_or(f64::NAN),
    };
    let (flops, flops_of_one) = env.grown.network.eval_flops(0..rows.len())?;
    // With a loss of the program each configuration is a pass of its own.
    let flops = if has_own_loss { rows.len() as u64 * flops_of_one } else { flops };
    let configurations = asked.configurations().len();
    Ok(Some(Counterfactuals {
        env: env.index,
        round,
        step,
        score: main.score(grown.score).unwrap_or(f64::NAN),
        modules: env.contributions.iter().map(module).collect(),
        interactions: asked.interactions_pp(&scores).into_iter().map(pair).collect(),
        configurations: rows.iter().enumerate().map(on).collect(),
        cost: CounterfactualCost {
            configurations,
            evaluated: rows.len(),
            images: main.samples,
            flops,
            flops_separate: configurations as u64 * flops_of_one,
        },
    }))
}

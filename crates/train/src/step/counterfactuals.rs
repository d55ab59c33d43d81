//! Contributions of an env's modules, and the cost of measuring them.

use meristem_grow::{Configuration, Interaction};
use meristem_nn::EvalMetrics;

use crate::env::{Env, percent};
use crate::error::Result;
use crate::position::Position;
use crate::record::events::{
    CounterfactualCost, Counterfactuals, ModuleOff, ModulePair, ModulesOn,
};

/// Contributions of the live modules of an env; `None` without live modules or control split.
///
/// # Errors
/// None if the network has metrics of every configuration.
pub(crate) fn of(env: &Env, Position { round, step }: Position) -> Result<Option<Counterfactuals>> {
    let (asked, rows) = (&env.counterfactual, env.control_rows());
    let Some(main) = rows.first().filter(|_| !asked.modules().is_empty()) else { return Ok(None) };
    let accuracies: Vec<f64> = rows.iter().map(percent).collect();
    let name = |slot: usize| env.host.slots()[slot].name.to_string();
    let shapley = asked.shapley_pp(&accuracies);
    let module = |&slot: &usize| {
        let off = rows.get(asked.row_of(Configuration::SoloOff(slot))?)?;
        let (without, contribution_loss) = (off.accuracy()?, off.loss_over(main));
        let contribution = 100.0 * (main.accuracy()? - without);
        let (name, shapley) = (name(slot), shapley[slot]);
        let (slot, accuracy_without) = (name, without);
        Some(ModuleOff { slot, accuracy_without, contribution, contribution_loss, shapley })
    };
    let pair = |pair: Interaction| ModulePair { slots: pair.slots.map(name), interaction: pair.pp };
    let on = |(row, metrics): (usize, &EvalMetrics)| ModulesOn {
        on: asked.on(row).map(name).collect(),
        accuracy: metrics.accuracy().unwrap_or(f64::NAN),
        loss: metrics.loss().unwrap_or(f64::NAN),
    };
    let (flops, one) = env.network.eval_flops(0..rows.len())?;
    let configurations = asked.configurations().len();
    Ok(Some(Counterfactuals {
        env: env.index,
        round,
        step,
        accuracy: main.accuracy().unwrap_or(f64::NAN),
        modules: asked.modules().iter().filter_map(module).collect(),
        interactions: asked.interactions_pp(&accuracies).into_iter().map(pair).collect(),
        configurations: rows.iter().enumerate().map(on).collect(),
        cost: CounterfactualCost {
            configurations,
            evaluated: rows.len(),
            images: main.samples,
            flops,
            flops_separate: configurations as u64 * one,
        },
    }))
}

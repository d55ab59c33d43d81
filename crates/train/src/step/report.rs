//! Report of an episode: the last measurements of its envs.

use std::path::PathBuf;

use meristem_nn::Metrics;

use crate::env::{Env, Population, TrainedHost};
use crate::error::Result;
use crate::record::run_folder::weights_name;
use crate::record::summary::{EnvSummary, ModuleSummary, TwinSummary};
use crate::resources::Resources;
use crate::setup::Setup;
use crate::step::measure;

/// Evaluates all networks at the end of an episode: leave-one-out of every module on the control
/// split, and once on the test split, if there is one. Waits for the devices once.
///
/// # Errors
/// A device failure.
pub(crate) fn report(
    resources: &mut Resources,
    setup: &Setup,
    population: &mut Population,
) -> Result<Vec<EnvSummary>> {
    population.envs.iter_mut().try_for_each(|env| env.open_report(setup))?;
    population.twins.iter().try_for_each(|twin| twin.network.reset_metrics())?;
    measure::evaluate_control(resources, population)?;
    if let Some(test) = &mut resources.test {
        let pass = test.pass(0..population.envs.len())?;
        let after = |configurations| configurations..configurations + 1;
        measure::evaluate(population, pass, after)?;
    }
    let has_control = resources.control.is_some();
    let all = measure::read_all(resources, population)?;
    let Population { envs, twins } = population;
    let mut summaries = vec![];
    for (nth, (env, metrics)) in envs.iter_mut().zip(all).enumerate() {
        let twin = twins.get(nth).map(summarise_twin);
        summaries.push(EnvSummary { twin, ..summarise(env, metrics, has_control) });
    }
    Ok(summaries)
}

fn summarise(env: &mut Env, metrics: Metrics, has_control: bool) -> EnvSummary {
    let (train_loss, train_accuracy) = (env.grown.train_loss(), env.grown.train_accuracy());
    env.note(metrics, has_control);
    let grown = &env.grown;
    let test = grown.evaluation(env.configurations());
    EnvSummary {
        env: env.index,
        train_loss,
        train_accuracy,
        control_loss: grown.control_loss(),
        control_accuracy: grown.control_accuracy(),
        test_loss: test.loss(),
        test_accuracy: test.accuracy(),
        parameters: grown.parameters.total(),
        host_parameters: grown.parameters.host,
        grown_parameters: grown.parameters.grown(),
        modules: modules(env),
        training_flops: grown.training_flops,
        twin: None,
        history: env.history,
        rollbacks: env.governor.rollbacks,
        weights: PathBuf::from("weights").join(weights_name(env.index)),
    }
}

fn summarise_twin(twin: &TrainedHost) -> TwinSummary {
    let known = twin.known();
    // Configuration 0 was evaluated on the control split, configuration 1 on the test split.
    let test = known.map(|twin| twin.evaluation(1));
    TwinSummary {
        control_loss: known.and_then(TrainedHost::control_loss),
        control_accuracy: known.and_then(TrainedHost::control_accuracy),
        test_loss: test.and_then(|test| test.loss()),
        test_accuracy: test.and_then(|test| test.accuracy()),
        parameters: twin.parameters.total(),
        training_flops: twin.training_flops,
    }
}

fn modules(env: &Env) -> Vec<ModuleSummary> {
    let grown = &env.grown;
    let slots = grown.host.slots().iter().zip(&env.seen.measured).zip(&grown.parameters.modules);
    slots
        .filter_map(|((slot, measured), &parameters)| {
            let module = slot.module.as_ref()?;
            Some(ModuleSummary {
                slot: slot.name.to_string(),
                blueprint: module.blueprint.name.clone(),
                stage: slot.stage.into(),
                alpha: f64::from(slot.alpha()),
                parameters,
                contribution: measured.contribution_pp.map(f64::from),
            })
        })
        .collect()
}

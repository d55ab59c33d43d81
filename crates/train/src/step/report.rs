//! Report of an episode: the last measurements of its envs.

use std::path::PathBuf;

use meristem_nn::{Metrics, Score};

use crate::env::{Env, Population, TrainedHost};
use crate::error::Result;
use crate::record::run_folder::weights_name;
use crate::record::summary::{EnvSummary, ModuleSummary, TwinSummary};
use crate::resources::Resources;
use crate::setup::Setup;
use crate::step::measure;

/// Evaluates all networks at the end of an episode: leave-one-out of every module on the control
/// split, and once on the test split, if there is one. Waits for the devices.
///
/// # Errors
/// A device failure.
pub(crate) fn report(
    resources: &mut Resources,
    setup: &Setup,
    population: &mut Population,
) -> Result<Vec<EnvSummary>> {
    if population.envs.is_empty() {
        return Ok(vec![]);
    }
    population.envs.iter_mut().try_for_each(|env| env.open_report(setup))?;
    population.twins.iter_mut().try_for_each(TrainedHost::reset_metrics)?;
    measure::evaluate_control(resources, population)?;
    if let Resources { test: Some(test), loss, .. } = &mut *resources {
        let pass = test.pass(0..population.envs.len())?;
        let after = |configurations| configurations..configurations + 1;
        measure::evaluate(population, loss.as_mut(), pass, after)?;
    }
    let all = measure::read_all(resources, population)?;
    let splits =
        ReportSplits { has_control: resources.control.is_some(), test: setup.task.test_score };
    let Population { envs, twins, .. } = population;
    let mut summaries = vec![];
    for (nth, (env, metrics)) in envs.iter_mut().zip(all).enumerate() {
        let twin = twins.get(nth).map(|twin| summarise_twin(twin, &splits));
        let part = resources.parts.get(env.index).cloned();
        summaries.push(EnvSummary { twin, part, ..summarise(env, metrics, &splits) });
    }
    Ok(summaries)
}

/// Splits that a report evaluates.
struct ReportSplits {
    /// Whether there is a control split.
    has_control: bool,
    /// Score on the test split.
    test: Score,
}

fn summarise(env: &mut Env, metrics: Metrics, splits: &ReportSplits) -> EnvSummary {
    let (train_loss, train_score) = (env.grown.train_loss(), env.grown.train_score());
    env.note(metrics, splits.has_control);
    let grown = &env.grown;
    let test = grown.evaluation(env.configurations());
    EnvSummary {
        env: env.index,
        member: None,
        member_number: None,
        steps: None,
        ended: None,
        part: None,
        train_loss,
        train_score,
        control_loss: grown.control_loss(),
        control_score: grown.control_score(),
        test_loss: test.loss(),
        test_score: test.score(splits.test),
        parameters: grown.parameters.total(),
        host_parameters: grown.parameters.host,
        grown_parameters: grown.parameters.grown(),
        modules: modules(env),
        training_flops: grown.training_flops,
        twin: None,
        history: env.module_counts,
        rollbacks: env.governor.rollbacks,
        weights: PathBuf::from("weights").join(weights_name(env.index)),
    }
}

fn summarise_twin(twin: &TrainedHost, splits: &ReportSplits) -> TwinSummary {
    let known = twin.unless_diverged();
    // Configuration 0 was evaluated on the control split, configuration 1 on the test split.
    let test = known.map(|twin| twin.evaluation(1));
    TwinSummary {
        control_loss: known.and_then(TrainedHost::control_loss),
        control_score: known.and_then(TrainedHost::control_score),
        test_loss: test.and_then(|test| test.loss()),
        test_score: test.and_then(|test| test.score(splits.test)),
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

//! Report of an episode: the last measurements of its envs.

use std::path::PathBuf;

use meristem_grow::ParameterCounts;
use meristem_nn::{EvalMetrics, Metrics};

use crate::env::{Env, TWIN_TEST, Twin, networks};
use crate::error::Result;
use crate::fleet::Fleet;
use crate::record::run_folder::weights_name;
use crate::record::summary::{EnvSummary, ModuleSummary, TwinSummary};
use crate::setup::Setup;
use crate::step::measure;

/// Evaluates the envs at the end of an episode: leave-one-out of every module on the control split,
/// and once on the test split, if there is one; the twins likewise. Waits for the devices once.
///
/// # Errors
/// A device failure.
pub(crate) fn report(
    fleet: &mut Fleet,
    setup: &Setup,
    envs: &mut [Env],
) -> Result<Vec<EnvSummary>> {
    let mut test_rows = vec![];
    for env in envs.iter_mut() {
        test_rows.push(env.open_report(setup)?);
    }
    measure::control(fleet, envs)?;
    let rows: Vec<_> = test_rows.iter().map(|&row| row..row + 1).collect();
    if let Some(test) = &mut fleet.test {
        let pass = test.pass(0..envs.len())?;
        measure::serve(networks(envs), pass, &rows, TWIN_TEST)?;
    }
    let has_control = fleet.control.is_some();
    let all = measure::read_all(fleet, envs)?;
    let mut summaries = vec![];
    for ((env, metrics), row) in envs.iter_mut().zip(all).zip(test_rows) {
        let test = metrics.eval.get(row).copied().unwrap_or_default();
        summaries.push(summarise(env, metrics, test, has_control));
    }
    Ok(summaries)
}

fn summarise(env: &mut Env, metrics: Metrics, test: EvalMetrics, has_control: bool) -> EnvSummary {
    let samples = env.train.samples.max(1) as f64;
    let (train_loss, train_correct) = (env.train.loss_sum, env.train.correct as f64);
    env.note(metrics, has_control);
    let ParameterCounts { host, .. } = *env.parameters();
    EnvSummary {
        env: env.index,
        train_loss: train_loss / samples,
        train_accuracy: train_correct / samples,
        control_loss: env.control.and_then(|control| control.loss()),
        control_accuracy: env.control.and_then(|control| control.accuracy()),
        test_loss: test.loss(),
        test_accuracy: test.accuracy(),
        parameters: env.parameters().total(),
        host_parameters: host,
        grown_parameters: env.parameters().grown(),
        modules: modules(env),
        training_flops: env.training_flops,
        twin: env.twin.as_ref().map(summarise_twin),
        history: env.history,
        rollbacks: env.guard.rollbacks,
        weights: PathBuf::from("weights").join(weights_name(env.index)),
    }
}

fn summarise_twin(twin: &Twin) -> TwinSummary {
    let (control, test) = (twin.control(), twin.test());
    TwinSummary {
        control_loss: control.loss(),
        control_accuracy: control.accuracy(),
        test_loss: test.loss(),
        test_accuracy: test.accuracy(),
        parameters: twin.parameters,
        training_flops: twin.training_flops,
    }
}

fn modules(env: &Env) -> Vec<ModuleSummary> {
    let slots = env.host.slots().iter().zip(&env.measured).zip(&env.parameters().modules);
    slots
        .filter_map(|((slot, measured), &parameters)| {
            let module = slot.module.as_ref()?;
            Some(ModuleSummary {
                slot: slot.name.to_string(),
                blueprint: module.blueprint.name.clone(),
                stage: slot.stage.to_string(),
                alpha: f64::from(slot.alpha()),
                parameters,
                contribution: measured.contribution_pp.map(f64::from),
            })
        })
        .collect()
}

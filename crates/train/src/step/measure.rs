//! Reading envs against a split: enqueued for all of them, then one read-back.

use std::ops::Range;
use std::path::PathBuf;

use meristem_data::GatherBatches;
use meristem_grow::ParameterCounts;
use meristem_nn::{EvalMetrics, Metrics};

use crate::env::Env;
use crate::error::Result;
use crate::fleet::{Fleet, labelled, networks};
use crate::record::summary::{EnvSummary, ModuleSummary};
use crate::setup::Setup;

/// Evaluates every env on the control split, in every configuration of its step. Waits for nothing.
///
/// # Errors
/// A failed device.
pub(crate) fn control(fleet: &mut Fleet, envs: &mut [Env]) -> Result<()> {
    let _span = fleet.machine.span(|| "evaluate");
    let configurations: Vec<_> = envs.iter().map(|env| 0..env.configurations()).collect();
    serve(envs, &mut fleet.control, &configurations)
}

/// One pass over a split, batch by batch for all envs: each is gathered once, and validated in one launch for all
/// configurations of its env (C1). Without a gather there is nothing to validate.
fn serve(
    envs: &mut [Env],
    gathers: &mut [GatherBatches],
    configurations: &[Range<usize>],
) -> Result<()> {
    if gathers.is_empty() {
        return Ok(());
    }
    gathers.iter_mut().try_for_each(|gather| gather.start_epoch(0))?;
    let mut networks = networks(envs);
    loop {
        let mut batches = vec![];
        for gather in &mut *gathers {
            // All serve one split, and end together.
            let Some(next) = gather.next()? else { return Ok(()) };
            batches.extend(next);
        }
        networks.eval_rows(&labelled(&batches), configurations)?;
    }
}

/// The one read-back of a step: all metrics of all envs (H1). Waits for the devices.
///
/// # Errors
/// A failed device.
pub(crate) fn read(fleet: &Fleet, envs: &mut [Env]) -> Result<()> {
    let has_control = !fleet.control.is_empty();
    networks(envs).count_non_finite()?;
    let all = match (&fleet.replicas, &envs[..]) {
        (Some(replicas), [env]) => {
            vec![replicas.read(&fleet.machine, fleet.train.order(), &env.network)?]
        }
        _ => read_all(fleet, envs)?,
    };
    for (env, metrics) in envs.iter_mut().zip(all) {
        env.note(metrics, has_control);
    }
    Ok(())
}

/// Reads envs that were rolled back, by their places here, against the control split once more. Waits for the devices,
/// if there are any.
///
/// # Errors
/// A failed device.
pub(crate) fn again(fleet: &mut Fleet, envs: &mut [Env], restored: &[usize]) -> Result<()> {
    if restored.is_empty() || fleet.control.is_empty() {
        return Ok(());
    }
    let _span = fleet.machine.span(|| "evaluate again");
    for &place in restored {
        let one = place..place + 1;
        let row = 0..1;
        serve(&mut envs[one.clone()], &mut fleet.control[one], &[row])?;
    }
    let all = read_all(fleet, envs)?;
    for (place, (env, metrics)) in envs.iter_mut().zip(all).enumerate() {
        if restored.contains(&place) {
            env.note_control(&metrics, true);
        }
    }
    Ok(())
}

fn read_all(fleet: &Fleet, envs: &[Env]) -> Result<Vec<Metrics>> {
    let _span = fleet.machine.span(|| "read");
    let tensors: Vec<_> = envs.iter().map(|env| env.network.metrics()).collect();
    fleet.machine.read_metrics(&tensors)
}

/// The end of an episode: leave-one-out of every module on the control split, and the one look at the test
/// split. One wait.
///
/// # Errors
/// A failed device.
pub(crate) fn report(
    fleet: &mut Fleet,
    setup: &Setup,
    envs: &mut [Env],
) -> Result<Vec<EnvSummary>> {
    let mut test_rows = vec![];
    for env in envs.iter_mut() {
        test_rows.push(env.open_report(setup)?);
    }
    control(fleet, envs)?;
    let rows: Vec<_> = test_rows.iter().map(|&row| row..row + 1).collect();
    serve(envs, &mut fleet.test, &rows)?;
    let has_control = !fleet.control.is_empty();
    let all = read_all(fleet, envs)?;
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
        test_loss: test.loss().unwrap_or(f64::NAN),
        test_accuracy: test.accuracy().unwrap_or(f64::NAN),
        parameters: env.parameters().total(),
        host_parameters: host,
        grown_parameters: env.parameters().grown(),
        modules: modules(env),
        history: env.history,
        rollbacks: env.guard.rollbacks,
        weights: PathBuf::from("weights").join(weights_name(env.index)),
    }
}

/// File name of an env's weights.
pub(crate) fn weights_name(env: usize) -> String {
    format!("env-{env}.safetensors")
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

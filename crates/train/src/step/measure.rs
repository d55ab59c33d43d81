//! Evaluation of envs on a split: enqueued for all envs, then one read-back.

use std::ops::Range;

use meristem_data::GatherBatches;
use meristem_nn::Metrics;

use crate::env::{Env, networks};
use crate::error::Result;
use crate::fleet::{Fleet, labelled};

/// Evaluates every env on the control split, in every configuration of its step. Does not wait for
/// the device.
///
/// # Errors
/// A device failure.
pub(crate) fn control(fleet: &mut Fleet, envs: &mut [Env]) -> Result<()> {
    let _span = fleet.machine.span(|| "evaluate");
    let configurations: Vec<_> = envs.iter().map(|env| 0..env.configurations()).collect();
    serve(envs, &mut fleet.control, &configurations)
}

/// Enqueues one pass over a split, batch by batch for all envs. Each batch is gathered once and
/// evaluated in one launch for all configurations of its env. Without gathers it does nothing.
pub(super) fn serve(
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
            // All gathers serve the same split and end together.
            let Some(next) = gather.next()? else { return Ok(()) };
            batches.extend(next);
        }
        networks.eval_rows(&labelled(&batches), configurations)?;
    }
}

/// Reads all metrics of all envs: the one read-back of a step. Waits for the devices.
///
/// # Errors
/// A device failure.
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

/// Evaluates the restored envs, given by index, on the control split again. Waits for the devices
/// if there are any.
///
/// # Errors
/// A device failure.
pub(crate) fn again(fleet: &mut Fleet, envs: &mut [Env], restored: &[usize]) -> Result<()> {
    if restored.is_empty() || fleet.control.is_empty() {
        return Ok(());
    }
    let _span = fleet.machine.span(|| "evaluate again");
    for &index in restored {
        let one = index..index + 1;
        let row = 0..1;
        serve(&mut envs[one.clone()], &mut fleet.control[one], &[row])?;
    }
    let all = read_all(fleet, envs)?;
    for (index, (env, metrics)) in envs.iter_mut().zip(all).enumerate() {
        if restored.contains(&index) {
            env.note_control(&metrics, true);
        }
    }
    Ok(())
}

pub(super) fn read_all(fleet: &Fleet, envs: &[Env]) -> Result<Vec<Metrics>> {
    let _span = fleet.machine.span(|| "read");
    let tensors: Vec<_> = envs.iter().map(|env| env.network.metrics()).collect();
    fleet.machine.read_metrics(&tensors)
}

//! Measuring envs on a split: enqueued for all of them, then one read-back.

use std::ops::Range;

use meristem_data::GatherBatches;
use meristem_nn::Metrics;

use crate::env::{Env, networks};
use crate::error::Result;
use crate::fleet::{Fleet, labelled};

/// Evaluates every env on the control split, in every configuration of its step. Waits for nothing.
///
/// # Errors
/// A failed device.
pub(crate) fn control(fleet: &mut Fleet, envs: &mut [Env]) -> Result<()> {
    let _span = fleet.machine.span(|| "evaluate");
    let configurations: Vec<_> = envs.iter().map(|env| 0..env.configurations()).collect();
    serve(envs, &mut fleet.control, &configurations)
}

/// One pass over a split, batch by batch for all envs: each is gathered once, and validated in one
/// launch for all configurations of its env (C1). Without a gather there is nothing to validate.
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

/// Measures envs that were rolled back, by their indices here, on the control split once more.
/// Waits for the devices, if there are any.
///
/// # Errors
/// A failed device.
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

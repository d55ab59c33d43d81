//! Evaluation of envs on a split: enqueued for all envs, then one read-back.

use std::ops::Range;

use meristem_nn::{Metrics, NetworkFleet};

use crate::env::{Env, Networks, networks};
use crate::error::Result;
use crate::fleet::{Fleet, Pass};

/// Evaluates every env on the control split, in every configuration of its step, and every twin.
/// Does not wait for the device.
///
/// # Errors
/// A device failure.
pub(crate) fn control(fleet: &mut Fleet, envs: &mut [Env]) -> Result<()> {
    let _span = fleet.machine.span(|| "evaluate");
    let configurations: Vec<_> = envs.iter().map(|env| 0..env.configurations()).collect();
    let Some(control) = &mut fleet.control else { return Ok(()) };
    let pass = control.pass(0..envs.len())?;
    serve(networks(envs), pass, &configurations, 0)
}

/// Enqueues one pass over a split, batch by batch for all envs. Each batch is evaluated in one
/// launch for all configurations of its env, and in another for this row of its twin.
pub(super) fn serve(
    mut networks: Networks<'_>,
    mut pass: Pass<'_>,
    configurations: &[Range<usize>],
    of_twins: usize,
) -> Result<()> {
    while let Some(batches) = pass.next()? {
        let batches: Vec<_> = batches.iter().map(|[inputs, targets]| (inputs, targets)).collect();
        networks.eval_rows(&batches, configurations, of_twins)?;
    }
    Ok(())
}

/// Reads all metrics of all envs: the one read-back of a step. Waits for the devices.
///
/// # Errors
/// A device failure.
pub(crate) fn read(fleet: &Fleet, envs: &mut [Env]) -> Result<()> {
    let has_control = fleet.control.is_some();
    let Networks { grown, twins } = networks(envs);
    grown.count_non_finite()?;
    twins.count_non_finite()?;
    let all = match (&fleet.replicas, &mut *envs) {
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
    let Some(control) = fleet.control.as_mut().filter(|_| !restored.is_empty()) else {
        return Ok(());
    };
    let _span = fleet.machine.span(|| "evaluate again");
    for &index in restored {
        let one = index..index + 1;
        let row = 0..1;
        // A twin has been evaluated, and is not restored.
        let networks = networks(&mut envs[one.clone()]);
        let networks = Networks { twins: NetworkFleet::new([]), ..networks };
        serve(networks, control.pass(one)?, &[row], 0)?;
    }
    let all = read_all(fleet, envs)?;
    for (index, (env, metrics)) in envs.iter_mut().zip(all).enumerate() {
        if restored.contains(&index) {
            env.note_control(&metrics, true);
        }
    }
    Ok(())
}

/// Reads the metrics of all envs and of their twins, which keep their own.
pub(super) fn read_all(fleet: &Fleet, envs: &mut [Env]) -> Result<Vec<Metrics>> {
    let _span = fleet.machine.span(|| "read");
    let twins = envs.iter().filter_map(|env| env.twin.as_ref());
    let of_twins = twins.map(|twin| twin.network.metrics());
    let tensors: Vec<_> = envs.iter().map(|env| env.network.metrics()).chain(of_twins).collect();
    let mut all = fleet.machine.read_metrics(&tensors)?;
    let of_twins = all.split_off(envs.len());
    let twins = envs.iter_mut().filter_map(|env| env.twin.as_mut());
    twins.zip(of_twins).for_each(|(twin, metrics)| twin.note(metrics));
    Ok(all)
}

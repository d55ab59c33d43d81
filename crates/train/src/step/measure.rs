//! Evaluation of all networks on a split: enqueued for all of them, then one read-back.

use std::ops::Range;

use meristem_nn::{Metrics, NetworkFleet};

use crate::env::Population;
use crate::error::Result;
use crate::resources::{Resources, ScopedDevice, SplitPass, labelled};
use crate::step::context::StepContext;
use crate::step::permitted;

/// Evaluates all networks on the control split, reads the metrics of the step back, and counts its
/// images and operations. Waits for the devices.
///
/// # Errors
/// A device failure.
pub(super) fn measure(context: &mut StepContext<'_, '_>) -> Result<()> {
    let workers = context.resources.devices.workers();
    let Resources { control, control_batches, .. } = &*context.resources;
    let pass = control.as_ref().map(|control| control.pass_batches(control_batches.len()));
    let pass = pass.unwrap_or_default();
    let limits = |device: &ScopedDevice| permitted::control_step(device, workers, pass);
    let _scopes = context.hot_scopes(permitted::CONTROL_STEP, limits);
    evaluate_control(context.resources, context.population)?;
    read(context.resources, context.population)?;
    for trained in context.population.hosts_mut() {
        let images = trained.train.samples;
        context.spent.images += images;
        // A backward pass costs two forward passes: by activations, and by weights.
        context.spent.training_flops += trained.count_flops(3, images)?;
    }
    Ok(())
}

/// Evaluates all networks on the control split, each env in every configuration of its step. Does
/// not wait for the device.
///
/// # Errors
/// A device failure.
pub(super) fn evaluate_control(
    resources: &mut Resources,
    population: &mut Population,
) -> Result<()> {
    let _span = resources.devices.span(|| "evaluate");
    let Some(control) = &mut resources.control else { return Ok(()) };
    let pass = control.pass(0..population.envs.len())?;
    evaluate(population, pass, |configurations| 0..configurations)
}

/// Enqueues one pass over a split, batch by batch, for all networks. `rows` maps the number of a
/// network's configurations to the rows of alphas that the network evaluates, in one launch per
/// batch.
pub(super) fn evaluate(
    population: &mut Population,
    pass: SplitPass<'_>,
    rows: impl Fn(usize) -> Range<usize>,
) -> Result<()> {
    let configurations = population.configurations().into_iter();
    let rows: Vec<Vec<_>> =
        configurations.map(|counts| counts.into_iter().map(&rows).collect()).collect();
    enqueue(&mut population.fleets(), pass, &rows)
}

fn enqueue(
    fleets: &mut [NetworkFleet<'_>],
    mut pass: SplitPass<'_>,
    rows: &[Vec<Range<usize>>],
) -> Result<()> {
    while let Some(batches) = pass.next()? {
        let envs: Vec<usize> = batches.iter().map(|batch| batch.env).collect();
        let batches = labelled(&batches);
        for (networks, rows) in fleets.iter_mut().zip(rows) {
            let rows: Vec<_> = envs.iter().map(|env| rows[*env].clone()).collect();
            networks.select(&envs).eval_rows(&batches, &rows)?;
        }
    }
    Ok(())
}

/// Reads all metrics of all networks: the one read-back of a step. Waits for the devices.
fn read(resources: &Resources, population: &mut Population) -> Result<()> {
    let has_control = resources.control.is_some();
    population.fleets().iter().try_for_each(|networks| networks.count_non_finite())?;
    let all = match (&resources.replicas, &population.envs[..]) {
        (Some(replicas), [env]) => {
            vec![replicas.read(&resources.devices, resources.train.order(), &env.grown.network)?]
        }
        _ => read_all(resources, population)?,
    };
    for (env, metrics) in population.envs.iter_mut().zip(all) {
        env.note(metrics, has_control);
    }
    Ok(())
}

/// Evaluates the restored envs, given by index, on the control split again. Waits for the devices
/// if an env was restored.
///
/// # Errors
/// A device failure.
pub(super) fn evaluate_again(
    resources: &mut Resources,
    population: &mut Population,
    restored: &[usize],
) -> Result<()> {
    let Some(control) = resources.control.as_mut().filter(|_| !restored.is_empty()) else {
        return Ok(());
    };
    let _span = resources.devices.span(|| "evaluate again");
    for &index in restored {
        let network = &mut population.envs[index].grown.network;
        let (mut networks, main) = ([NetworkFleet::new([network])], 0..1);
        enqueue(&mut networks, control.pass(index..index + 1)?, &[vec![main]])?;
    }
    let all = read_all(resources, population)?;
    for (index, (env, metrics)) in population.envs.iter_mut().zip(all).enumerate() {
        if restored.contains(&index) {
            env.note_control(&metrics, true);
        }
    }
    Ok(())
}

/// Reads the metrics of all networks. Returns the envs' metrics; each twin records its metrics.
pub(super) fn read_all(resources: &Resources, population: &mut Population) -> Result<Vec<Metrics>> {
    let _span = resources.devices.span(|| "read");
    let tensors: Vec<_> = population.hosts().map(|trained| trained.network.metrics()).collect();
    let mut all = resources.devices.read_metrics(&tensors)?;
    let of_twins = all.split_off(population.envs.len());
    for (twin, metrics) in population.twins.iter_mut().zip(of_twins) {
        twin.note(metrics, resources.control.is_some());
    }
    Ok(all)
}

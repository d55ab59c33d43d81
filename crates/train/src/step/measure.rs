//! Evaluation of all networks on a split: enqueued for all of them, then one read-back.

use std::ops::Range;

use meristem_nn::Metrics;

use crate::env::{Population, TrainedHost};
use crate::error::Result;
use crate::own_loss::ProgramLoss;
use crate::resources::{Resources, ScopedDevice, SplitPass, labelled};
use crate::step::context::StepContext;
use crate::step::own_loss::{self, fleet, select};
use crate::step::permitted;

/// Evaluates all networks on the control split, reads the metrics of the step back, and counts its
/// images and operations. Waits for the devices.
///
/// # Errors
/// A device failure.
pub(super) fn measure(context: &mut StepContext<'_, '_>) -> Result<()> {
    let workers = context.resources.devices.workers();
    let Resources { control, control_batch_shapes, .. } = &*context.resources;
    let pass = control.as_ref().map(|control| control.pass_batches(control_batch_shapes.len()));
    let pass = pass.unwrap_or_default();
    let rows = context.population.configurations().into_iter().flatten().sum::<usize>() as u64;
    let own = context
        .resources
        .loss
        .as_ref()
        .map(|loss| permitted::own_loss(rows * pass.gathered, loss.is_on_device()));
    let limits = |device: &ScopedDevice| {
        permitted::sum(permitted::control_step(device, workers, pass), own.unwrap_or_default())
    };
    let _scopes = context.hot_scopes(permitted::CONTROL_STEP, limits);
    evaluate_control(context.resources, context.population)?;
    read(context.resources, context.population)?;
    for trained in context.population.hosts_mut() {
        let images = trained.metrics.samples;
        context.spent.images += images;
        // A backward pass costs two forward passes: derivatives with respect to activations and to
        // weights.
        context.spent.training_flops += trained.count_flops(3, images)?;
    }
    Ok(())
}

/// Evaluates all networks on the control split, each env in every configuration of its step. Waits
/// as [`evaluate`] does.
///
/// # Errors
/// A device failure.
pub(super) fn evaluate_control(
    resources: &mut Resources,
    population: &mut Population,
) -> Result<()> {
    let _span = resources.devices.span(|| "evaluate");
    let Resources { control: Some(control), loss, .. } = resources else { return Ok(()) };
    let pass = control.pass(0..population.envs.len())?;
    evaluate(population, loss.as_mut(), pass, |configurations| 0..configurations)
}

/// Evaluates one pass over a split, batch by batch, for all networks. For a network with n
/// configurations, `rows(n)` are the rows of alphas that it evaluates, in one launch per batch.
/// Waits for a device only for a loss that the program computes, and for a host buffer of streamed
/// images.
///
/// # Errors
/// A device failure, a failure of the program's loss.
pub(super) fn evaluate(
    population: &mut Population,
    loss: Option<&mut ProgramLoss>,
    pass: SplitPass<'_>,
    rows: impl Fn(usize) -> Range<usize>,
) -> Result<()> {
    let configurations = population.configurations().into_iter();
    let rows: Vec<Vec<_>> =
        configurations.map(|counts| counts.into_iter().map(&rows).collect()).collect();
    enqueue(&mut population.host_fleets(), loss, pass, &rows)
}

fn enqueue(
    fleets: &mut [Vec<&mut TrainedHost>],
    mut loss: Option<&mut ProgramLoss>,
    mut pass: SplitPass<'_>,
    rows: &[Vec<Range<usize>>],
) -> Result<()> {
    while let Some(batches) = pass.next()? {
        // In a pass over a split `batch.env` is a position in the fleet, not an env's index.
        let positions: Vec<usize> = batches.iter().map(|batch| batch.env).collect();
        let batches = labelled(&batches);
        for (hosts, rows) in fleets.iter_mut().zip(rows) {
            let rows: Vec<_> = positions.iter().map(|nth| rows[*nth].clone()).collect();
            let mut hosts = select(hosts, &positions);
            match &mut loss {
                Some(loss) => own_loss::evaluate(loss, &mut hosts, &batches, &rows)?,
                None => fleet(&mut hosts).eval_rows(&batches, &rows)?,
            }
        }
    }
    Ok(())
}

/// Reads all metrics of all networks in one read-back; after a rollback there is another. Waits for
/// the devices.
fn read(resources: &Resources, population: &mut Population) -> Result<()> {
    let has_control = resources.control.is_some();
    population.fleets().iter().try_for_each(|networks| networks.count_non_finite())?;
    let all = match (&resources.replicas, &population.envs[..]) {
        (Some(replicas), [env]) => {
            let order = resources.train.order();
            let mut metrics = replicas.read(&resources.devices, order, &env.grown.network)?;
            // The metrics of the ranks have the training losses already; `own_results` adds the
            // evaluations.
            env.grown.own_results.add_to(&mut metrics);
            vec![metrics]
        }
        _ => read_all(resources, population)?,
    };
    for (env, metrics) in population.envs.iter_mut().zip(all) {
        env.note(metrics, has_control);
    }
    Ok(())
}

/// Evaluates the envs at the positions `restored` of `population.envs` on the control split again.
/// Waits for the devices if there are any.
///
/// # Errors
/// A device failure.
pub(super) fn evaluate_again(
    resources: &mut Resources,
    population: &mut Population,
    restored: &[usize],
) -> Result<()> {
    let Resources { devices, control: Some(control), loss, .. } = resources else {
        return Ok(());
    };
    if restored.is_empty() {
        return Ok(());
    }
    let span = devices.span(|| "evaluate again");
    for &nth in restored {
        let (mut hosts, main) = ([vec![&mut population.envs[nth].grown]], 0..1);
        let pass = control.pass(nth..nth + 1)?;
        enqueue(&mut hosts, loss.as_mut(), pass, &[vec![main]])?;
    }
    drop(span);
    let all = read_all(resources, population)?;
    for (nth, (env, metrics)) in population.envs.iter_mut().zip(all).enumerate() {
        if restored.contains(&nth) {
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
    for (trained, metrics) in population.hosts().zip(&mut all) {
        trained.own_results.add_to(metrics);
    }
    let of_twins = all.split_off(population.envs.len());
    for (twin, metrics) in population.twins.iter_mut().zip(of_twins) {
        twin.note(metrics, resources.control.is_some());
    }
    Ok(all)
}

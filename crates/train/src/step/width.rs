//! Further features of layers that have become wider, if their initialisation measures gradients.

use std::time::Instant;

use meristem_nn::WidthProbe;

use crate::error::Result;
use crate::resources::{STATISTICS_EPOCH, labelled};
use crate::step::context::StepContext;
use crate::step::training::place;

/// Batches that an initialisation measures, or all of an epoch if it has fewer: the first of
/// [`STATISTICS_EPOCH`].
const BATCHES: usize = 16;

/// Makes the networks wider whose hosts have become wider by an action of this step, if the
/// initialisation of further features measures training batches. Others follow their hosts without
/// it. Waits for the devices.
///
/// # Errors
/// Out of memory, a device failure.
pub(super) fn widen(context: &mut StepContext<'_, '_>) -> Result<()> {
    let StepContext { population, setup, resources, .. } = context;
    let probes = population.envs.iter().map(|env| env.grown.width_probe(setup));
    let mut probes: Vec<Option<WidthProbe>> = probes.collect::<Result<_>>()?;
    if probes.iter().all(Option::is_none) {
        return Ok(());
    }
    let _span = resources.devices.span(|| "measure further features");
    let started = Instant::now();
    let numbers = population.numbers();
    let mut flops = vec![0; probes.len()];
    while probes.iter().any(Option::is_some) {
        resources.train.start_epoch(STATISTICS_EPOCH)?;
        for _ in 0..BATCHES {
            let Some(next) = resources.train.next()? else { break };
            for (batch, (inputs, targets)) in next.iter().zip(labelled(&next)) {
                let at = place(batch.env, &numbers);
                let Some(probe) = &mut probes[at] else { continue };
                probe.add(inputs, targets)?;
                flops[at] += inputs.dims()[0] as u64 * probe.flops()?;
            }
        }
        for (env, probe) in population.envs.iter_mut().zip(&mut probes) {
            let Some(further) = probe.as_mut().map(WidthProbe::end_pass).transpose()?.flatten()
            else {
                continue;
            };
            env.grown.sync_with(setup, Some(&further))?;
            *probe = None;
        }
    }
    for (env, flops) in population.envs.iter_mut().zip(flops) {
        env.grown.training_flops += flops;
        context.spent.training_flops += flops;
    }
    context.spent.step_seconds += started.elapsed().as_secs_f64();
    Ok(())
}

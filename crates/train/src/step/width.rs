//! Initial values of further features, for initialisations that measure gradients.

use std::time::Instant;

use meristem_nn::WidthProbe;

use crate::error::Result;
use crate::resources::{STATISTICS_EPOCH, labelled};
use crate::step::context::StepContext;
use crate::step::training::position;

/// Number of batches that an initialisation measures: the first batches of [`STATISTICS_EPOCH`], or
/// all of them if the epoch has fewer.
const BATCHES: usize = 16;

/// Widens the networks of the hosts that an action of this step has widened, if the initialisation
/// of further features measures training batches. Networks with another initialisation become wider
/// when they are next synchronised with their hosts. Waits for the devices.
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
    let indices = population.indices();
    let mut flops = vec![0; probes.len()];
    while probes.iter().any(Option::is_some) {
        resources.train.start_epoch(STATISTICS_EPOCH)?;
        for _ in 0..BATCHES {
            let Some(next) = resources.train.next()? else { break };
            for (batch, (inputs, targets)) in next.iter().zip(labelled(&next)) {
                let at = position(batch.env, &indices);
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

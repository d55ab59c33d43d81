//! Orthogonality of the activations of layers, for rules of the heuristic that need it, and for a
//! policy that is to see it.

use std::time::Instant;

use meristem_nn::ActivationProbe;

use crate::env::Env;
use crate::error::Result;
use crate::resources::STATISTICS_EPOCH;
use crate::settings::{ControllerKind, ObservationForm};
use crate::setup::Setup;
use crate::step::context::StepContext;
use crate::step::training::position;

/// Number of batches that are measured: the first batches of [`STATISTICS_EPOCH`], or all of them
/// if the epoch has fewer.
const BATCHES: usize = 16;

/// Measures the layers that can become wider, in the envs whose rules need it. Waits for the
/// devices.
///
/// # Errors
/// Out of memory, a device failure.
pub(super) fn measure(context: &mut StepContext<'_, '_>) -> Result<()> {
    let StepContext { population, setup, resources, .. } = context;
    let probes = population.envs.iter().map(|env| probe(env, setup));
    let mut probes: Vec<Option<ActivationProbe>> = probes.collect::<Result<_>>()?;
    if probes.iter().all(Option::is_none) {
        return Ok(());
    }
    let _span = resources.devices.span(|| "measure orthogonality");
    let started = Instant::now();
    let indices = population.indices();
    resources.train.start_epoch(STATISTICS_EPOCH)?;
    for _ in 0..BATCHES {
        let Some(next) = resources.train.next()? else { break };
        for batch in &next {
            let at = position(batch.env, &indices);
            let Some(probe) = &mut probes[at] else { continue };
            probe.add(&batch.inputs)?;
            let flops = batch.inputs.dims()[0] as u64 * probe.flops()?;
            population.envs[at].grown.training_flops += flops;
            context.spent.training_flops += flops;
        }
    }
    for (env, probe) in population.envs.iter_mut().zip(&probes) {
        env.orthogonality = probe.as_ref().map(ActivationProbe::orthogonality).unwrap_or_default();
    }
    context.spent.step_seconds += started.elapsed().as_secs_f64();
    Ok(())
}

/// A probe of the layers of an env, if its rules need it.
fn probe(env: &Env, setup: &Setup) -> Result<Option<ActivationProbe>> {
    let config = &setup.member(env.index).config;
    let is_heuristic = config.controller == ControllerKind::Heuristic;
    // The controller of a program may be a policy that learns from one run after another.
    let of_policy = config.policy_form() == ObservationForm::SetWiden;
    if !(is_heuristic || of_policy) || !config.heuristic.needs_orthogonality() {
        return Ok(None);
    }
    let layers = env.grown.host.widenable();
    let readers: Vec<String> =
        layers.iter().map(|layer| format!("{}.weight", layer.reader())).collect();
    Ok(Some(ActivationProbe::new(&env.grown.network, &readers)?))
}

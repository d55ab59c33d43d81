//! Scores of the layers that can become wider, for rules of the heuristic that need them, and for a
//! policy that is to see the orthogonality of their activations.

use std::time::Instant;

use meristem_control::{WidthScore, WidthScores};
use meristem_device::Tensor;
use meristem_nn::{ActivationProbe, WidthProbe};

use crate::env::Env;
use crate::error::Result;
use crate::resources::{STATISTICS_EPOCH, labelled};
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
    let StepContext { population, setup, resources, when, .. } = context;
    let is_taught = when.round < setup.config.ppo_demonstrations;
    let probes = population.envs.iter().map(|env| Probes::new(env, setup, is_taught));
    let mut probes: Vec<Probes> = probes.collect::<Result<_>>()?;
    population.envs.iter_mut().for_each(|env| env.width_scores = WidthScores::default());
    if probes.iter().all(Probes::is_empty) {
        return Ok(());
    }
    let _span = resources.devices.span(|| "measure layers");
    let started = Instant::now();
    let indices = population.indices();
    resources.train.start_epoch(STATISTICS_EPOCH)?;
    for _ in 0..BATCHES {
        let Some(next) = resources.train.next()? else { break };
        for (batch, (inputs, targets)) in next.iter().zip(labelled(&next)) {
            let at = position(batch.env, &indices);
            let flops = inputs.dims()[0] as u64 * probes[at].add(inputs, targets)?;
            population.envs[at].grown.training_flops += flops;
            context.spent.training_flops += flops;
        }
    }
    for (env, probes) in population.envs.iter_mut().zip(&probes) {
        env.width_scores = probes.scores()?;
    }
    context.spent.step_seconds += started.elapsed().as_secs_f64();
    Ok(())
}

/// Probes of the layers of an env.
struct Probes {
    activations: Option<ActivationProbe>,
    /// For each score of gradients a probe of each layer; `None` for a layer without this score, or
    /// that cannot become wider now.
    gradients: Vec<(WidthScore, Vec<Option<LayerProbe>>)>,
}

/// A probe of a layer.
struct LayerProbe {
    probe: WidthProbe,
    /// Further features that the layer would get.
    by: usize,
}

impl Probes {
    /// The probes that the env's rules need. `is_taught`: in a round of demonstrations.
    fn new(env: &Env, setup: &Setup, is_taught: bool) -> Result<Self> {
        let config = &setup.member(env.index).config;
        let rules = &config.heuristic;
        let is_heuristic = config.controller == ControllerKind::Heuristic;
        // The controller of a program may be a policy that learns from one run after another.
        let of_policy = config.policy_form() == ObservationForm::SetWiden;
        let host = &env.grown.host;
        let layers = host.widenable();
        let orthogonality = (is_heuristic || of_policy) && rules.needs(WidthScore::Orthogonality);
        let activations = orthogonality.then(|| {
            let readers: Vec<String> =
                layers.iter().map(|layer| format!("{}.weight", layer.reader())).collect();
            ActivationProbe::new(&env.grown.network, &readers)
        });
        let mut gradients = vec![];
        for score in WidthScore::ALL {
            let init = score.gradients_of().filter(|_| is_heuristic || of_policy && is_taught);
            let Some(init) = init.filter(|_| rules.needs(score)) else { continue };
            let of_layer = |layer| {
                let Some(by) = rules.further_features(host, layer) else { return Ok(None) };
                let probe = env.grown.score_probe(setup, layer, init)?;
                Ok(probe.map(|probe| LayerProbe { probe, by }))
            };
            let probes: Vec<_> = (0..layers.len()).map(of_layer).collect::<Result<_>>()?;
            if probes.iter().any(Option::is_some) {
                gradients.push((score, probes));
            }
        }
        Ok(Self { activations: activations.transpose()?, gradients })
    }

    fn is_empty(&self) -> bool {
        self.activations.is_none() && self.gradients.is_empty()
    }

    /// Adds a batch. Returns the floating-point operations for one sample.
    fn add(&mut self, inputs: &Tensor, targets: &Tensor) -> Result<u64> {
        let mut flops = 0;
        if let Some(probe) = &mut self.activations {
            probe.add(inputs)?;
            flops += probe.flops()?;
        }
        let layers = self.gradients.iter_mut().flat_map(|(_, layers)| layers);
        for LayerProbe { probe, .. } in layers.flatten() {
            probe.add(inputs, targets)?;
            flops += probe.flops()?;
        }
        Ok(flops)
    }

    fn scores(&self) -> Result<WidthScores> {
        let mut scores = WidthScores::default();
        if let Some(probe) = &self.activations {
            scores.orthogonality = probe.orthogonality();
        }
        for (score, layers) in &self.gradients {
            let of_layer = |layer: &Option<LayerProbe>| match layer {
                None => Ok(f32::NAN),
                Some(LayerProbe { probe, by }) => Ok(probe.score(*by)?),
            };
            *scores.of_mut(*score) = layers.iter().map(of_layer).collect::<Result<_>>()?;
        }
        Ok(scores)
    }
}

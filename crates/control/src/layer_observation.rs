//! Observations of the layers that can become wider, the third set of a policy that chooses WIDEN.
//! `docs/control.md`, Observation, has a table.

use serde::{Deserialize, Serialize};

use crate::observation::{RowWriter, log_scale, over};
use crate::set_observation::{HostSizes, flag, ratio};
use crate::view::EnvView;
use crate::widening::LayerWidening;

/// Floats per layer.
pub(crate) const LEN: usize = 21;

/// Memory of a policy about the layers of an env, from the beginning of its trajectory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct LayerHistory {
    layers: Vec<SeenLayer>,
}

/// A layer at the last step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct SeenLayer {
    features: usize,
    /// Steps since the layer became wider: 1 in the first step after it.
    steps_since: Option<u32>,
    /// Orthogonality of the activations when it was first measured.
    first_orthogonality: Option<f32>,
}

impl LayerHistory {
    /// Records a step: once for each step, before the observation.
    pub(crate) fn record(&mut self, view: &EnvView<'_>) {
        for (index, layer) in view.host.widenable().into_iter().enumerate() {
            let (features, steps_since, first_orthogonality) = (layer.features, None, None);
            if index == self.layers.len() {
                self.layers.push(SeenLayer { features, steps_since, first_orthogonality });
            }
            let seen = &mut self.layers[index];
            seen.steps_since = match seen.steps_since {
                _ if features > seen.features => Some(1),
                // The env went back to an earlier state.
                _ if features < seen.features => None,
                steps => steps.map(|steps| steps.saturating_add(1)),
            };
            seen.features = features;
            let first = seen.first_orthogonality;
            seen.first_orthogonality =
                first.or(view.width_scores.orthogonality.get(index).copied());
        }
    }
}

/// Writes the observations of the layers of an env into `elements`, `[layers][LEN]`, and 0 into the
/// places beyond them. `widenings` are the changes of width that the policy may choose.
pub(crate) fn write(
    view: &EnvView<'_>,
    widenings: &[LayerWidening],
    history: &LayerHistory,
    elements: &mut [f32],
) {
    elements.fill(0.0);
    let (host, sizes) = (view.host, HostSizes::of(view.host));
    let layers = host.widenable().into_iter().zip(host.first_spec().widenable()).enumerate();
    let last = (widenings.len().max(2) - 1) as f32;
    let rows = elements.chunks_exact_mut(LEN).zip(layers).zip(widenings);
    for ((row, (index, (layer, first))), widening) in rows {
        let row = &mut RowWriter::new(row);
        let features = layer.features as f32;
        row.all(&[
            log_scale(features),
            ratio(features, first.features as f32),
            ratio(features, host.image().channels as f32),
            index as f32 / last,
        ]);
        let in_layer = host.slots().iter().filter(|slot| layer.slots.contains(&slot.name));
        let filled = in_layer.filter(|slot| slot.module.is_some()).count() as f32;
        let slots = layer.slots.len() as f32;
        row.all(&[log_scale(slots), filled / slots.max(1.0)]);
        let by = widening.by as f32;
        let share = widening.factor / view.facts.widen_up_to.max(1.0);
        row.all(&[log_scale(by), ratio(by, features), share.clamp(0.0, 2.0) as f32]);
        row.all(&[flag(widening.legal)]);
        let added = widening.size.map_or([0.0; 2], |size| {
            let more = |now: u64, before: u64| now.saturating_sub(before) as f32;
            let before = sizes.size;
            [more(size.parameters, before.parameters), more(size.macs, before.macs)]
        });
        for (added, (used, limit)) in added.into_iter().zip(sizes.limits()) {
            let share = limit.map_or(0.0, |limit| added / (limit - used).max(1.0));
            row.all(&[log_scale(added), ratio(added, used), share.clamp(0.0, 2.0)]);
        }
        let seen = history.layers.get(index);
        let orthogonality = view.width_scores.orthogonality.get(index).copied();
        let first = seen.and_then(|seen| seen.first_orthogonality);
        let change = orthogonality.zip(first).map_or(0.0, |(now, first)| now - first);
        row.all(&[flag(orthogonality.is_some()), orthogonality.unwrap_or(0.0), change]);
        let since = seen.and_then(|seen| seen.steps_since);
        let since = since.map_or(1.0, |steps| over(steps, view.episode_steps));
        row.all(&[flag(seen.is_some_and(|seen| seen.steps_since.is_some())), since]);
    }
}

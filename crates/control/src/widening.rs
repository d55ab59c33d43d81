//! The layer that the heuristic makes wider, by trigger and place.

use meristem_grow::Host;

use crate::heuristic_config::{HeuristicConfig, WidenPlace, WidenTrigger};
use crate::view::EnvView;

/// A layer that may become wider now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    /// Index of the layer ([`Host::widenable`]).
    pub(crate) layer: usize,
    /// Further features.
    pub(crate) by: usize,
    /// New number of features as a multiple of the initial number.
    factor: f64,
    /// φ − γ·φ₀; NaN if it was not measured.
    excess: f64,
}

/// The layer that becomes wider, by trigger and place, if any may. `first` has the orthogonality of
/// the layers in the first step, `fits` returns whether a host is within its budget.
pub(crate) fn choose(
    view: &EnvView<'_>,
    config: &HeuristicConfig,
    first: &[f32],
    fits: impl Fn(&Host) -> bool,
) -> Option<Candidate> {
    let initial = view.host.first_spec().widenable();
    let layers = view.host.widenable().into_iter().zip(initial).enumerate();
    let candidates = layers.filter_map(|(layer, (now, initial))| {
        let by = ((initial.features as f64 * config.widen_by).round() as usize).max(1);
        let factor = (now.features + by) as f64 / initial.features as f64;
        let [now, first] = [view.orthogonality, first]
            .map(|of| of.get(layer).map_or(f64::NAN, |phi| f64::from(*phi)));
        let excess = now - config.widen_orthogonality * first;
        let is_due = config.widen_trigger != WidenTrigger::Orthogonality || excess > 0.0;
        let fits_wider = || {
            let mut wider = view.host.clone();
            wider.widen(layer, by).is_ok() && fits(&wider)
        };
        let may = is_due && factor <= config.widen_up_to && fits_wider();
        may.then_some(Candidate { layer, by, factor, excess })
    });
    candidates.min_by(|one, other| match config.widen_place {
        WidenPlace::Smallest => one.factor.total_cmp(&other.factor),
        WidenPlace::Orthogonality => other.excess.total_cmp(&one.excess),
    })
}

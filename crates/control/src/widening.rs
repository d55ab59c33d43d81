//! The layer that the heuristic makes wider, by trigger and place, and the change of width that a
//! policy may choose for each layer.

use meristem_grow::{Host, NetworkSize, WidenableLayer};

use crate::budget;
use crate::heuristic_config::{HeuristicConfig, WidenPlace, WidenTrigger, WidthScore};
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
    /// Score that the place compares; −∞ if the score is NaN.
    score: f64,
}

/// The number of further features for a layer that began with `initial` features and has `now`: the
/// share `share` of `initial`, at least 1. Also returns the new number of features as a multiple of
/// `initial`.
fn growth(initial: usize, now: usize, share: f64) -> (usize, f64) {
    let by = ((initial as f64 * share).round() as usize).max(1);
    (by, (now + by) as f64 / initial as f64)
}

/// The change of width of a layer that a policy may choose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LayerWidening {
    /// Further features; 0 if the env forbids WIDEN.
    pub(crate) by: usize,
    /// New number of features as a multiple of the initial number.
    pub(crate) factor: f64,
    /// Whether the change is legal: the env allows this number of features, and the host allows the
    /// change ([`Host::widen`]).
    pub(crate) legal: bool,
    /// Size of the host after the change ([`Host::size`]); `None` if the env forbids WIDEN, or the
    /// layer cannot get these features, for instance because one of its slots has a module.
    pub(crate) size: Option<NetworkSize>,
}

/// Number of further features that WIDEN gives a layer; at least 1. `share` is the share of its
/// initial features.
pub(crate) fn amount(host: &Host, layer: usize, share: f64) -> usize {
    let initial = host.first_spec().widenable();
    initial.get(layer).map_or(1, |layer| growth(layer.features, 0, share).0)
}

impl HeuristicConfig {
    /// Further features that the heuristic may give a layer of [`Host::widenable`] at once; `None`
    /// if the layer, or the host, would be too large then, or if the host forbids the change.
    pub fn further_features(&self, host: &Host, layer: usize) -> Option<usize> {
        let (now, initial) = (host.widenable(), host.first_spec().widenable());
        let features = [initial.get(layer)?.features, now.get(layer)?.features];
        Some(further_features(host, self, (layer, features))?.0)
    }
}

/// As [`HeuristicConfig::further_features`], for a layer with its initial and its present number of
/// features. Also returns the new number as a multiple of the initial one.
fn further_features(
    host: &Host,
    config: &HeuristicConfig,
    (layer, [initial, now]): (usize, [usize; 2]),
) -> Option<(usize, f64)> {
    let (by, factor) = growth(initial, now, config.widen_by);
    let fits = || {
        let mut wider = host.clone();
        wider.widen(layer, by).is_ok() && budget::fits(&wider, config)
    };
    (factor <= config.widen_up_to && fits()).then_some((by, factor))
}

/// The changes of width that a policy may choose, for each layer of [`Host::widenable`].
pub(crate) fn widenings(view: &EnvView<'_>) -> Vec<LayerWidening> {
    let (host, facts) = (view.host, &view.facts);
    let layers = host.widenable().into_iter().zip(host.first_spec().widenable()).enumerate();
    let one = |(layer, (now, initial)): (usize, (WidenableLayer, WidenableLayer))| {
        let (by, factor) = growth(initial.features, now.features, facts.widen_by);
        if facts.widen_by == 0.0 {
            let factor = now.features as f64 / initial.features as f64;
            return LayerWidening { by: 0, factor, legal: false, size: None };
        }
        let mut wider = host.clone();
        let legal = factor <= facts.widen_up_to && wider.widen(layer, by).is_ok();
        let wider = if legal { Ok(wider) } else { host.with_features(layer, by) };
        let size = wider.ok().and_then(|wider| wider.size().ok());
        LayerWidening { by, factor, legal, size }
    };
    layers.map(one).collect()
}

/// The layer that becomes wider, by trigger and place, if any may. `first` has the orthogonality of
/// the layers in the first step.
pub(crate) fn choose(
    view: &EnvView<'_>,
    config: &HeuristicConfig,
    first: &[f32],
) -> Option<Candidate> {
    let initial = view.host.first_spec().widenable();
    let layers = view.host.widenable().into_iter().zip(initial).enumerate();
    let candidates = layers.filter_map(|(layer, (now, initial))| {
        let score = |score: WidthScore| {
            let at = |of: &[f32]| of.get(layer).map_or(f64::NAN, |value| f64::from(*value));
            let now = at(view.width_scores.of(score));
            match score {
                WidthScore::Orthogonality => now - config.widen_orthogonality * at(first),
                WidthScore::GradientRatio | WidthScore::NaturalGradient => now,
            }
        };
        let threshold = match config.widen_trigger {
            WidenTrigger::GradientRatio(least) | WidenTrigger::NaturalGradient(least) => least,
            WidenTrigger::Schedule | WidenTrigger::Plateau | WidenTrigger::Orthogonality => 0.0,
        };
        let is_due = config.widen_trigger.score().is_none_or(|of| score(of) > threshold);
        if !is_due {
            return None;
        }
        let score = config.widen_place.score().map_or(0.0, score);
        let score = if score.is_nan() { f64::NEG_INFINITY } else { score };
        let of_layer = (layer, [initial.features, now.features]);
        let (by, factor) = further_features(view.host, config, of_layer)?;
        Some(Candidate { layer, by, factor, score })
    });
    candidates.min_by(|one, other| match config.widen_place {
        WidenPlace::Smallest => one.factor.total_cmp(&other.factor),
        _ => other.score.total_cmp(&one.score),
    })
}

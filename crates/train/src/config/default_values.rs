//! Default values and limits of settings, with their reasons.

use meristem_control::PpoConfig;
use meristem_grow::{Gates, Rules};

use super::types::{OptimizerKind, Preset, number_text};

/// Seconds that ranks wait for each other. At the end of a step a rank with small envs waits for a
/// rank whose envs have grown.
pub(super) const COMM_DEADLINE: usize = 600;

/// Host that is too small for the embedded dataset, so that growth pays there: 496 parameters.
pub(super) const SMALL_HOST: &str = "cnn:channels=2";

/// Width of a new policy with preset full.
const FULL_WIDTH: usize = 512;

/// First seed of `control eval`. It differs from the seed of training, so that a policy is compared
/// on other hosts than it learned on.
pub(crate) const FIRST_STUDY_SEED: u64 = 1000;

/// Share of the control split, with a controller.
pub(crate) const CONTROL_SHARE: f64 = 0.1;

/// Batches for recomputing running statistics. Control curves are as smooth with 8 as with 44
/// (records/2026-11-26-running-statistics.md).
pub(crate) const STATISTICS_BATCHES: usize = 16;

/// Largest whole number in TOML, the format of `config.toml`.
pub(super) const WHOLE_MAX: u64 = i64::MAX as u64;

/// Maximum number of ranks.
pub(super) const RANKS_MAX: u64 = 64;

/// Maximum gradient norm of a host and of each module.
pub(super) const CLIP_NORM: f32 = 1.0;

/// Default of the hyperparameter `flag` with each optimiser, such as `0.1 with sgd; 0.0001 with
/// lion`.
pub(super) fn optimizer_default(flag: &str) -> String {
    let of = |kind: OptimizerKind| {
        kind.defaults().flags().into_iter().find(|(known, _)| *known == flag)?.1
    };
    let mut each: Vec<(String, Vec<&str>)> = vec![];
    for (name, kind) in OptimizerKind::NAMES {
        let Some(number) = of(kind).map(number_text) else { continue };
        match each.iter_mut().find(|(known, _)| *known == number) {
            Some((_, names)) => names.push(name),
            None => each.push((number, vec![name])),
        }
    }
    let each = each.iter().map(|(number, names)| format!("{number} with {}", names.join(", ")));
    each.collect::<Vec<_>>().join("; ")
}

/// Rules of short runs: modules blend early, and a small contribution suffices.
pub(super) fn short(min_contribution_pp: f64) -> Rules {
    let gates = Gates { min_contribution_pp, ..Gates::default().quick() };
    Rules { gates, ..Rules::default() }
}

/// Width of a new policy.
pub(crate) fn policy_width(preset: Preset) -> usize {
    match preset {
        Preset::Default | Preset::Quick => PpoConfig::default().hidden,
        Preset::Full => FULL_WIDTH,
    }
}

//! What the hot path may do: the permitted copies, waits and allocations of a step (V2, H1, H4).
//!
//! The whole program's permitted waits, and the sites at which a run may copy, wait or allocate, are the
//! table `permitted.toml` beside this crate's manifest, each with its reason. `cargo xtask tidy` holds the
//! first half, the test below the second: what is new must be entered, what is gone must be taken out.

use meristem_device::Counts;

/// Name of the scope around the inner loop: gather and training step, batch after batch.
pub(crate) const TRAIN_STEP: &str = "train_step";

/// Name of the scope around evaluation on the control split and the step's read-back.
pub(crate) const CONTROL_STEP: &str = "control_step";

/// Name of the scope around the decision about all envs, the deeds and their rewards.
pub(crate) const DECIDE: &str = "decide";

/// Name of the scope around the snapshots of a step.
pub(crate) const SNAPSHOT: &str = "snapshot";

/// What the inner loop may do on a device: nothing. The permutation was copied before it, plans and buffers
/// were made before it.
pub(crate) fn train_step(_envs: u64) -> Counts {
    Counts::default()
}

/// What a control step may do on a device with so many envs.
pub(crate) fn control_step(envs: u64) -> Counts {
    Counts {
        // The metrics of all envs, in one copy (H1).
        copies_to_host: 1,
        // For that copy.
        synchronizations: 1,
        // Each env's gather of the control split uploads its order.
        copies_to_device: envs,
        // A pattern of alphas that an env has not evaluated before may need a larger arena.
        allocations: envs,
        launches: 0,
    }
}

/// What a decision may do on a device, however many envs there are: that of a policy on so many ranks here, which is
/// the most.
pub(crate) fn decide(ranks: u64) -> Counts {
    Counts {
        // Choices, log-probabilities, entropies and values of all envs, in one copy (H1).
        copies_to_host: 1,
        // For that copy.
        synchronizations: 1,
        // To each rank's policy what its envs look like, and what is legal in them.
        copies_to_device: ranks,
        allocations: 0,
        launches: 0,
    }
}

/// What the snapshots of so many envs may do on a device.
pub(crate) fn snapshot(envs: u64) -> Counts {
    // Parameters, statistics and counters of a module that was fossilized; all other memory is used again.
    Counts { allocations: 3 * envs, ..Counts::default() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Instant;

    use meristem_device::{HotScope, Policy};
    use meristem_grow::BlueprintSet;

    use crate::config::{Layer, TrainConfig};
    use crate::processes::world::World;
    use crate::record::observer::Silent;
    use crate::run::Run;
    use crate::run::files::{Begin, Place};
    use crate::settings::{ControllerKind, Limit, Preset};
    use crate::setup::Names;

    /// An act, its operation, and the file of the call site.
    type Site = (String, String, String);

    fn permitted() -> BTreeSet<Site> {
        let table: toml::Table = include_str!("../../permitted.toml").parse().unwrap();
        let place = |entry: &toml::Value| {
            let text = |key: &str| entry[key].as_str().unwrap().to_string();
            assert!(!text("reason").is_empty(), "{entry}");
            (text("act"), text("operation"), text("file"))
        };
        table["step"].as_array().unwrap().iter().map(place).collect()
    }

    /// Two rounds in which modules grow, blend and are judged, seen by a scope that only counts.
    fn seen() -> BTreeSet<Site> {
        let folder = tempfile::tempdir().unwrap();
        let flags = Layer {
            preset: Some(Preset::Quick),
            run_dir: Some(Some(folder.path().join("run"))),
            envs: Some(2),
            // The last batch of an epoch is smaller.
            batch: Some(48),
            max_batches: Some(Limit::Count(2)),
            control_split: Some(Some(0.02)),
            plateau_gain: Some(100.0),
            controller: Some(ControllerKind::Heuristic),
            steps: Some(12),
            rounds: Some(2),
            ..Layer::default()
        };
        let config = TrainConfig::resolve(Layer::default(), flags).unwrap();
        let (config, names) = Names::of_new(&config).unwrap();
        let (mut world, mut place) = (World::alone(), Place::default());
        place.make(&config, &world).unwrap();
        let blueprints = BlueprintSet::standard();
        let run = Run::prepare(&config, names, blueprints, (&place, &mut world)).unwrap();
        let devices = run.devices().to_vec();
        let scopes: Vec<HotScope> =
            devices.iter().map(|device| device.hot_scope("run", Policy::Off)).collect();
        let begin = Begin::New(Instant::now());
        let summary = run.finish(&mut world, begin, (&mut Silent, place)).unwrap();
        assert!(summary.envs.iter().any(|env| env.history.germinated > 0));
        let sites = scopes.into_iter().flat_map(|scope| scope.finish().sites);
        let place = |site: meristem_device::ActSite| {
            (site.act.to_string(), site.operation.to_string(), site.site.file().replace('\\', "/"))
        };
        sites.map(place).collect()
    }

    #[test]
    fn a_run_does_what_the_table_permits_and_all_of_it() {
        let (permitted, seen) = (permitted(), seen());
        let new: Vec<_> = seen.difference(&permitted).collect();
        let gone: Vec<_> = permitted.difference(&seen).collect();
        assert!(new.is_empty(), "not in permitted.toml: {new:#?}");
        assert!(gone.is_empty(), "in permitted.toml, but no run does it: {gone:#?}");
    }
}

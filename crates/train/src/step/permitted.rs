//! Copies, waits and allocations that the hot path of a step may make.
//!
//! `permitted.toml`, next to this crate's manifest, lists all waits of the program, and all sites
//! at which a run may copy, wait or allocate, with reasons. `cargo xtask tidy` checks the waits, a
//! test of `run` the sites: new ones must be added, unused ones removed.

use meristem_device::Counts;

/// Name of the scope around the inner loop: gather and training step, batch after batch.
pub(crate) const TRAIN_STEP: &str = "train_step";

/// Name of the scope around evaluation on the control split and the step's read-back.
pub(crate) const CONTROL_STEP: &str = "control_step";

/// Name of the scope around the decision about all envs, the actions and their rewards.
pub(crate) const DECIDE: &str = "decide";

/// Name of the scope around the snapshots of a step.
pub(crate) const SNAPSHOT: &str = "snapshot";

/// Limits of the inner loop on a device: nothing is permitted, because the permutation was copied
/// and plans and buffers were created before.
pub(crate) fn train_step(_envs: u64) -> Counts {
    Counts::default()
}

/// Limits of a control step on a device with `envs` envs and `workers` workers.
pub(crate) fn control_step(envs: u64, workers: u64) -> Counts {
    Counts {
        // The metrics of all envs, in one copy.
        copies_to_host: 1,
        // The wait for that copy.
        synchronizations: 1,
        // Order of the control split.
        copies_to_device: 1,
        // A larger arena for each worker, for a pattern of alphas that an env has not evaluated
        // before.
        allocations: envs * workers,
        launches: 0,
    }
}

/// Limits of a decision on a device, for any number of envs. They suit a policy on `ranks` ranks,
/// which needs more than any other controller. `taught`: another controller decides, and the policy
/// learns from it.
pub(crate) fn decide(ranks: u64, taught: bool) -> Counts {
    // The choices of the other controller, and their masks.
    let demonstration = if taught { 2 } else { 0 };
    Counts {
        // Choices, log-probabilities, entropies and values of all envs, in one copy.
        copies_to_host: 1,
        // The wait for that copy.
        synchronizations: 1,
        // Observations and legal actions of its envs, for each rank's policy.
        copies_to_device: ranks * (1 + demonstration),
        allocations: 0,
        launches: 0,
    }
}

/// Limits of the snapshots of `envs` envs on a device.
pub(crate) fn snapshot(envs: u64) -> Counts {
    // Parameters, statistics and counters of a fossilized module; all other memory is reused.
    Counts { allocations: 3 * envs, ..Counts::default() }
}

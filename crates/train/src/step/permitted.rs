//! Permitted copies, waits and allocations on the hot path of a step (V2, H1, H4).
//!
//! The whole program's permitted waits, and the sites at which a run may copy, wait or allocate,
//! are the table `permitted.toml` beside this crate's manifest, each with its reason. `cargo xtask
//! tidy` holds the first half, a test of `run` the second: what is new must be entered, what is
//! gone must be taken out.

use meristem_device::Counts;

/// Name of the scope around the inner loop: gather and training step, batch after batch.
pub(crate) const TRAIN_STEP: &str = "train_step";

/// Name of the scope around evaluation on the control split and the step's read-back.
pub(crate) const CONTROL_STEP: &str = "control_step";

/// Name of the scope around the decision about all envs, the deeds and their rewards.
pub(crate) const DECIDE: &str = "decide";

/// Name of the scope around the snapshots of a step.
pub(crate) const SNAPSHOT: &str = "snapshot";

/// Limits of the inner loop on a device: nothing is permitted. The permutation was copied before
/// it, plans and buffers were made before it.
pub(crate) fn train_step(_envs: u64) -> Counts {
    Counts::default()
}

/// Limits of a control step on a device with so many envs.
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

/// Limits of a decision on a device, however many envs there are: those of a policy on so many
/// ranks here, which is the most.
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

/// Limits of the snapshots of so many envs on a device.
pub(crate) fn snapshot(envs: u64) -> Counts {
    // Parameters, statistics and counters of a module that was fossilized; all other memory is used again.
    Counts { allocations: 3 * envs, ..Counts::default() }
}

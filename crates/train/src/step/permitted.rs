//! Copies, waits and allocations that the hot path of a step may make.
//!
//! `permitted.toml`, next to this crate's manifest, lists all waits in the crates above `device`,
//! and all sites at which a run may copy, wait or allocate, with reasons. `cargo xtask tidy` checks
//! the waits, a test of `run` the sites: new ones must be added, unused ones removed.

use meristem_device::Counts;

use crate::resources::{PassBatches, ScopedDevice};

/// Name of the scope around the inner loop: gather and training step, batch after batch.
pub(crate) const TRAIN_STEP: &str = "train_step";

/// Name of the scope around the passes that recompute running statistics.
pub(crate) const STATISTICS: &str = "statistics";

/// Name of the scope around evaluation on the control split and the step's read-back.
pub(crate) const CONTROL_STEP: &str = "control_step";

/// Name of the scope around the decision about all envs, the actions and their rewards.
pub(crate) const DECIDE: &str = "decide";

/// Name of the scope around the snapshots of a step.
pub(crate) const SNAPSHOT: &str = "snapshot";

/// Shapes of batches that every pass over a split may have: full batches, and a smaller last one.
const SHAPES_MIN: u64 = 2;

/// Copies of address tables in a pass. The gather of each batch copies a table, because it reads
/// other samples than the gather before. All envs together have a CUDA graph for each shape of a
/// batch, and so have all twins; a CUDA graph has two tables, which are copied once.
fn address_tables(device: &ScopedDevice, pass: PassBatches) -> u64 {
    let graphs = 2 * pass.shapes.max(SHAPES_MIN);
    if device.has_graphs { pass.gathered + 2 * graphs } else { 0 }
}

/// Waits for host memory of streamed images for a CUDA device while `loads` batches are loaded from
/// their file. An env has a fixed number of host buffers. If all are on their way to the device,
/// the CPU waits for the oldest: at most once for each batch that it loads.
fn staging_waits(device: &ScopedDevice, loads: u64) -> u64 {
    if device.has_graphs { loads } else { 0 }
}

/// Limits of the inner loop on a device. Before the loop the permutation and each env's first batch
/// were copied to the device, and plans and buffers were created. So the loop copies only the
/// streamed images of each env's later batches, and address tables.
pub(crate) fn train_step(device: &ScopedDevice, pass: PassBatches) -> Counts {
    let uploads = device.envs * pass.uploaded.saturating_sub(1);
    let copies_to_device = uploads + address_tables(device, pass);
    // An upper bound: two batches of each env were loaded from their file before the loop.
    let synchronizations = staging_waits(device, uploads);
    Counts { copies_to_device, synchronizations, ..Counts::default() }
}

/// Limits of the passes that recompute running statistics on a device: copies of the
/// permutation, of streamed images of each env, and of address tables.
pub(crate) fn statistics(device: &ScopedDevice, pass: PassBatches) -> Counts {
    let uploads = device.envs * pass.uploaded;
    let copies_to_device = 1 + uploads + address_tables(device, pass);
    // The pass ends before the epoch does, so one more batch of each env is loaded than copied.
    let loads = if pass.uploaded > 0 { uploads + device.envs } else { 0 };
    let synchronizations = staging_waits(device, loads);
    Counts { copies_to_device, synchronizations, ..Counts::default() }
}

/// Sum of two sets of counts.
pub(crate) fn sum(a: Counts, b: Counts) -> Counts {
    Counts {
        copies_to_host: a.copies_to_host + b.copies_to_host,
        copies_to_device: a.copies_to_device + b.copies_to_device,
        synchronizations: a.synchronizations + b.synchronizations,
        allocations: a.allocations + b.allocations,
        launches: a.launches + b.launches,
    }
}

/// Additional copies, waits and allocations for `calls` calls of a loss that a user's function
/// computes, from arrays on the device or on the host.
pub(crate) fn own_loss(calls: u64, is_on_device: bool) -> Counts {
    // One copy: the losses of the samples. Four waits: for that copy, for each of the two arrays
    // that the function gets, and for the copy of the arrays that it returns.
    let (copies, waits) = if is_on_device { (1, 4) } else { (0, 0) };
    Counts {
        // Outputs and targets, each with its wait.
        copies_to_host: (2 + copies) * calls,
        synchronizations: (2 + waits) * calls,
        // The gradient of the outputs.
        copies_to_device: calls,
        // Outputs, gradient, losses, and room for the activations or a pattern of alphas of a
        // network that has grown.
        allocations: (4 + copies) * calls,
        launches: 0,
    }
}

/// Limits of a control step on a device, for `workers` workers. Envs with the same samples and
/// batch size share the images.
pub(crate) fn control_step(device: &ScopedDevice, workers: u64, pass: PassBatches) -> Counts {
    Counts {
        // The metrics of all envs, in one copy.
        copies_to_host: 1,
        // The wait for that copy.
        synchronizations: 1 + staging_waits(device, pass.uploaded),
        // Orders of the control splits, streamed images, and address tables.
        copies_to_device: pass.gathers.max(1) + pass.uploaded + address_tables(device, pass),
        // A larger arena for each worker, for a pattern of alphas that an env has not evaluated
        // before.
        allocations: device.envs * workers,
        launches: 0,
    }
}

/// Limits of a decision on a device, for any number of envs. They suit a policy on `ranks` ranks,
/// which needs more than any other controller. `taught`: another controller decides, and the policy
/// learns from it.
pub(crate) fn decide(device: &ScopedDevice, ranks: u64, taught: bool) -> Counts {
    // The choices of the other controller, and their masks.
    let demonstration = if taught { 2 } else { 0 };
    // A policy's forward pass is a CUDA graph, which has two tables. It is built again in the first
    // decision after the policy has learned, when other plans have taken the place of its plan.
    let (tables, graphs) = if device.has_graphs { (2, 1) } else { (0, 0) };
    Counts {
        // Choices, log-probabilities, entropies and values of all envs, in one copy.
        copies_to_host: 1,
        // The wait for that copy.
        synchronizations: 1,
        // Observations and legal actions of its envs, and addresses, for each rank's policy.
        copies_to_device: ranks * (1 + demonstration + tables),
        allocations: ranks * graphs,
        launches: 0,
    }
}

/// Limits of the snapshots of a device's envs.
pub(crate) fn snapshot(device: &ScopedDevice) -> Counts {
    // Parameters, statistics and counters of a fossilized module; all other memory is reused.
    Counts { allocations: 3 * device.envs, ..Counts::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: ScopedDevice = ScopedDevice { envs: 3, has_graphs: false };
    const GPU: ScopedDevice = ScopedDevice { envs: 3, has_graphs: true };

    fn pass(uploaded: u64) -> PassBatches {
        PassBatches { gathers: 1, gathered: 9, uploaded, shapes: 2 }
    }

    /// Only streamed images for a GPU may have to wait for host memory: the batches that are loaded
    /// within the scope, of 3 envs in training, and of all envs together on the control split.
    #[test]
    fn waits_for_host_memory_are_permitted_for_streamed_images_on_a_gpu() {
        let waits = |device: &ScopedDevice, pass: PassBatches| {
            let control = control_step(device, 1, pass).synchronizations;
            // One of these is the wait for the metrics.
            let [train, statistics] = [train_step(device, pass), statistics(device, pass)];
            [train.synchronizations, statistics.synchronizations, control - 1]
        };
        assert_eq!([waits(&CPU, pass(10)), waits(&CPU, pass(0))], [[0; 3]; 2]);
        assert_eq!(waits(&GPU, pass(0)), [0; 3]);
        assert_eq!(waits(&GPU, pass(1)), [0, 3 * 2, 1]);
        assert_eq!(waits(&GPU, pass(10)), [3 * 9, 3 * 11, 10]);
        // Images are copied to both kinds of devices, those of the first batch before the loop.
        let copies = |device, pass| train_step(device, pass).copies_to_device;
        assert_eq!([copies(&CPU, pass(10)), copies(&CPU, pass(0))], [3 * 9, 0]);
        assert_eq!(copies(&GPU, pass(10)) - copies(&GPU, pass(0)), 3 * 9);
    }
}

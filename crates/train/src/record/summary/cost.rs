//! Costs of a run: memory, the inner loop, counterfactual evaluations.

use std::collections::BTreeMap;

use meristem_device::{Counts, Device};
use serde::{Deserialize, Serialize};

use crate::record::events::CounterfactualCost;

/// Memory in bytes, summed over all processes of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemorySummary {
    /// Memory in tensors at the end, over all devices.
    pub current: usize,
    /// Sum of the devices' peaks of memory in tensors.
    pub peak: usize,
    /// Sum of the devices' peaks of memory taken from the system for tensors, including rounding
    /// and free blocks.
    pub reserved_peak: usize,
    /// Sum of the processes' peak resident sizes, where the system reports them (Linux). Memory
    /// that was never written is not resident, so that this may be less than the memory in tensors.
    pub process_peak: Option<usize>,
    /// Memory by owner, with the name of every owner of [`meristem_device::Owner::ALL`].
    pub owners: BTreeMap<String, OwnerMemory>,
}

/// Memory of one owner, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerMemory {
    /// Memory in its tensors at the end.
    pub current: usize,
    /// Peak of memory in its tensors. Owners may peak at different times.
    pub peak: usize,
}

impl MemorySummary {
    /// Memory of the devices and of this process so far.
    pub fn from_devices(devices: &[Device]) -> Self {
        let mut memory = Self { process_peak: process_peak(), ..Self::default() };
        for report in devices.iter().map(Device::memory) {
            memory.current += report.current;
            memory.peak += report.peak;
            memory.reserved_peak += report.reserved_peak;
            for owner in report.owners {
                let total = memory.owners.entry(owner.owner.name().into()).or_default();
                total.current += owner.current;
                total.peak += owner.peak;
            }
        }
        memory
    }

    /// The sum of two summaries.
    pub(crate) fn with(mut self, other: Self) -> Self {
        self.current += other.current;
        self.peak += other.peak;
        self.reserved_peak += other.reserved_peak;
        self.process_peak = self.process_peak.zip(other.process_peak).map(|(a, b)| a + b);
        for (owner, of_other) in other.owners {
            let total = self.owners.entry(owner).or_default();
            total.current += of_other.current;
            total.peak += of_other.peak;
        }
        self
    }
}

/// Peak resident size of this process: `VmHWM` in `/proc/self/status`.
fn process_peak() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Counts of the inner loop per training step, which is one batch of one env or twin. The first
/// epoch of each process is excluded, because it allocates memory that later epochs reuse; so a run
/// of one step counts nothing. All counts are zero unless there is a bug, with these exceptions:
///
/// - copies of streamed images to a device, and on CUDA waits for their host buffers;
/// - on CUDA, copies of the addresses of each batch's samples;
/// - copies and waits for exchanges between replicas on several devices or in several processes;
/// - the copies, waits and allocations of a loss that the program computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HotPath {
    /// Number of training steps measured.
    pub training_steps: u64,
    /// Copies from a device to the host.
    pub copies_to_host: f64,
    /// Copies from the host to a device.
    pub copies_to_device: f64,
    /// Waits of the host for a device.
    pub synchronizations: f64,
    /// Requests for device memory.
    pub allocations: f64,
}

/// Cost of the counterfactual evaluations of all envs and steps. All configurations of an env are
/// evaluated in a single pass, or, with a loss that the program computes, in a pass for each
/// distinct one. The cost is compared with one full pass per requested configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CounterfactualTotals {
    /// Number of requested configurations.
    pub configurations: u64,
    /// Number of distinct configurations, which were evaluated.
    pub evaluated: u64,
    /// Floating-point operations of these passes.
    pub flops: u64,
    /// Floating-point operations of one full pass for each requested configuration.
    pub flops_separate: u64,
}

impl CounterfactualTotals {
    /// Adds a step of one env.
    pub(crate) fn add(&mut self, cost: &CounterfactualCost) {
        self.configurations += cost.configurations as u64;
        self.evaluated += cost.evaluated as u64;
        self.flops += cost.images * cost.flops;
        self.flops_separate += cost.images * cost.flops_separate;
    }

    /// Adds the totals of other envs or steps.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.configurations += other.configurations;
        self.evaluated += other.evaluated;
        self.flops += other.flops;
        self.flops_separate += other.flops_separate;
    }

    /// Ratio of the cost to the cost of separate passes; `None` if nothing was evaluated.
    pub fn share(&self) -> Option<f64> {
        (self.flops_separate > 0).then(|| self.flops as f64 / self.flops_separate as f64)
    }
}

/// Cost of a loss that the program computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OwnLossTotals {
    /// Calls of the program's function.
    pub calls: u64,
    /// Samples of these calls.
    pub samples: u64,
    /// Seconds in these calls, and in copying gradients in host memory to the device; without
    /// copying outputs and targets from the device.
    pub seconds: f64,
}

impl OwnLossTotals {
    /// Adds the totals of other envs or steps.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.calls += other.calls;
        self.samples += other.samples;
        self.seconds += other.seconds;
    }
}

/// Running totals from which a [`HotPath`] is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct HotTotals {
    training_steps: u64,
    copies_to_host: u64,
    copies_to_device: u64,
    synchronizations: u64,
    allocations: u64,
}

impl HotTotals {
    /// Adds an epoch, with its counts on each device.
    pub(crate) fn add(&mut self, training_steps: u64, spent: impl Iterator<Item = Counts>) {
        self.training_steps += training_steps;
        for spent in spent {
            self.copies_to_host += spent.copies_to_host;
            self.copies_to_device += spent.copies_to_device;
            self.synchronizations += spent.synchronizations;
            self.allocations += spent.allocations;
        }
    }

    /// Adds the totals of other envs or steps.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.training_steps += other.training_steps;
        self.copies_to_host += other.copies_to_host;
        self.copies_to_device += other.copies_to_device;
        self.synchronizations += other.synchronizations;
        self.allocations += other.allocations;
    }

    /// The counts per training step.
    pub(crate) fn per_step(&self) -> HotPath {
        let per_step = |count: u64| count as f64 / self.training_steps.max(1) as f64;
        HotPath {
            training_steps: self.training_steps,
            copies_to_host: per_step(self.copies_to_host),
            copies_to_device: per_step(self.copies_to_device),
            synchronizations: per_step(self.synchronizations),
            allocations: per_step(self.allocations),
        }
    }
}

//! Running statistics of batch norm, recomputed with fixed weights.
//!
//! A training step leaves running averages over weights that have changed since. Recomputed
//! statistics begin at zero, take some batches as training does, `r ← (1 − m)·r + m·batch`, and are
//! divided by the weight that those batches have together, `1 − (1 − m)^batches`: the bias
//! correction of Adam (Kingma and Ba 2015). So a few batches suffice, and nothing is left of the
//! averages before.

use meristem_device::{DType, Fill, Tensor};

use super::pass::BatchLaunch;
use super::{LaunchSteps, Network};
use crate::error::Result;
use crate::graph::{BATCH_NORM_MOMENTUM, GroupId};
use crate::ops::ElementwiseOp;
use crate::plan::{Phase, PlanMode, PlanStep, Space, SpaceSpan};

/// Weight of this number of observed batches in statistics that began at zero.
pub fn observed_weight(batches: usize) -> f64 {
    let rest = 1.0 - f64::from(BATCH_NORM_MOMENTUM);
    1.0 - rest.powi(i32::try_from(batches).unwrap_or(i32::MAX))
}

impl Network {
    /// Sets the running statistics to zero: the beginning of a recomputation by
    /// [`Network::observe`], which [`Network::finish_statistics`] ends. One launch; waits for
    /// nothing.
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn begin_statistics(&self) -> Result<()> {
        let averages: Vec<_> = self.averages().map(|(_, averages)| averages).collect();
        if averages.is_empty() {
            return Ok(());
        }
        Ok(self.stream.fill("begin_statistics", &averages, Fill::Zero)?)
    }

    /// The forward pass of a training step alone, but without dropout, as in an evaluation: each
    /// batch norm adds the batch's statistics, with the parameters as they are, to its running
    /// ones. Ends a step that [`Network::differentiate`] began. One launch; waits for nothing.
    ///
    /// # Errors
    /// As [`Network::train_step`].
    #[track_caller]
    pub fn observe(&mut self, inputs: &Tensor) -> Result<()> {
        let pass = self.observation(inputs)?;
        self.launch_batch(pass, (&[inputs], None))
    }

    /// Divides the running statistics, which [`Network::begin_statistics`] set to zero, by this
    /// weight: [`observed_weight`] of the batches observed since. One launch; waits for nothing.
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn finish_statistics(&self, weight: f64) -> Result<()> {
        let factor = (1.0 / weight) as f32;
        let multiply = |(group, averages): (usize, &Tensor)| {
            let len = averages.numel();
            let span = SpaceSpan::new(Space::RunningStats(GroupId(group)), DType::F32, 0, len);
            PlanStep::new(ElementwiseOp::Multiply { len, factor }, &[], &[span])
        };
        let steps: Vec<_> = self.averages().map(multiply).collect();
        if steps.is_empty() { Ok(()) } else { self.launch_steps("finish_statistics", steps) }
    }

    /// Running statistics (f32) and counters (i64) of each group that has any, as views of the
    /// network's tensors. Replicas with different samples have different statistics; training does
    /// not read them.
    pub fn statistics(&self) -> impl Iterator<Item = (&Tensor, &Tensor)> {
        let both = self.groups.iter().map(|group| (&group.running_stats, &group.counters));
        // Counters without statistics count an optimiser's steps, or batches for dropout.
        both.filter(|(state, _)| state.numel() > 0)
    }

    /// Whether the network has running statistics, which [`Network::observe`] would recompute.
    pub fn has_statistics(&self) -> bool {
        self.averages().next().is_some()
    }

    /// The launch of an observation of this batch. Checks the batch, and compiles the plan and
    /// enlarges the arena if necessary.
    pub(super) fn observation(&mut self, inputs: &Tensor) -> Result<BatchLaunch> {
        let batch = self.check_inputs("observe", inputs)?;
        self.observation_of(batch)
    }

    /// The launch of an observation of `batch` samples.
    pub(super) fn observation_of(&mut self, batch: usize) -> Result<BatchLaunch> {
        let plan = self.plan(batch, PlanMode::Train)?;
        let run = LaunchSteps::from_plan(&plan, Phase::Forward..=Phase::Forward);
        Ok(BatchLaunch { operation: "observe", run, config: 0, drops: false })
    }

    /// Running means and variances of each group that has some, with the group's place.
    fn averages(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        let all = self.groups.iter().map(|group| &group.running_stats).enumerate();
        all.filter(|(_, averages)| averages.numel() > 0)
    }
}

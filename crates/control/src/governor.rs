//! Rules that detect failed training of an env (`docs/growth.md`, Governor).
//! `train::step::governor` performs the rollback.

use serde::{Deserialize, Serialize};

/// Constants of the rules.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GovernorConfig {
    /// Distance from the loss of guessing, as a share of that loss, within which a loss counts as
    /// guessing: .065.
    #[serde(rename = "collapse_width")]
    pub collapse_distance: f64,
    /// Share of the loss of guessing that the mean loss must have fallen below before a collapse
    /// counts: .6.
    pub learned_share: f64,
    /// Smallest loss of a spike: 12.
    pub spike_loss: f64,
    /// Standard deviations by which a spike exceeds the running mean: 6.
    pub spike_sigmas: f64,
    /// Factor by which a spike exceeds the running mean: 3.
    pub spike_factor: f64,
    /// Consecutive loss spikes that count as a failure: 3.
    pub spike_patience: u32,
    /// Steps between snapshots: 5.
    pub snapshot_steps: u32,
    /// Failures without a snapshot in between that end the run: 3.
    pub failures_max: u32,
    /// Change of the reward of the transition that caused a rollback: −10.
    pub penalty: f64,
}

impl Default for GovernorConfig {
    fn default() -> Self {
        Self {
            collapse_distance: 0.065,
            learned_share: 0.6,
            spike_loss: 12.0,
            spike_sigmas: 6.0,
            spike_factor: 3.0,
            spike_patience: 3,
            snapshot_steps: 5,
            failures_max: 3,
            penalty: -10.0,
        }
    }
}

impl GovernorConfig {
    /// Whether a snapshot is due after this step (counted from 0). `fossilized`: a module was
    /// fossilized in this step. Call [`LossMonitor::check`] first: a snapshot by the interval alone
    /// is taken only if [`LossMonitor::is_calm`].
    pub fn snapshot_due(&self, step: u32, fossilized: bool) -> bool {
        fossilized || step.is_multiple_of(self.snapshot_steps.max(1))
    }
}

/// Reason for a rollback.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainingFailure {
    /// A loss, or a weight, is NaN or infinite.
    NotFinite,
    /// The loss returned to the loss of guessing after the env had learned.
    Collapse,
    /// The loss was far above its running mean in several consecutive steps.
    Spike,
}

impl TrainingFailure {
    /// The reason in words, for events.
    pub fn describe(self) -> &'static str {
        match self {
            TrainingFailure::NotFinite => "a loss or weight is not finite",
            TrainingFailure::Collapse => "the loss rose back to the level of guessing",
            TrainingFailure::Spike => "the loss was far above its history for several steps",
        }
    }
}

/// Weight of the newest loss in the running mean and variance.
const NEWEST: f64 = 0.2;

/// Running statistics of one env's loss, spikes excluded: exponentially weighted mean and variance
/// (West 1979).
///
/// A rollback resets them. It may remove modules, and the loss of the host without these modules is
/// unknown: with the old statistics the env could seem to have collapsed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LossMonitor {
    mean: Option<f64>,
    variance: f64,
    learned: bool,
    spikes: u32,
}

impl LossMonitor {
    /// Checks the loss of a step and returns the failure that it reveals. A loss that is neither a
    /// failure nor a spike is added to the statistics. `guessing` is the loss of guessing: the loss
    /// of the best constant prediction, such as ln(classes).
    pub fn check(
        &mut self,
        config: &GovernorConfig,
        loss: f64,
        guessing: f64,
    ) -> Option<TrainingFailure> {
        if !loss.is_finite() {
            return Some(TrainingFailure::NotFinite);
        }
        if self.learned && (loss - guessing).abs() < config.collapse_distance * guessing {
            return Some(TrainingFailure::Collapse);
        }
        if self.is_spike(config, loss) {
            self.spikes += 1;
            return (self.spikes >= config.spike_patience).then_some(TrainingFailure::Spike);
        }
        self.spikes = 0;
        self.take(loss);
        self.learned |= self.mean.is_some_and(|mean| mean < config.learned_share * guessing);
        None
    }

    /// Resets the statistics after a rollback.
    pub fn rolled_back(&mut self) {
        *self = Self::default();
    }

    /// Whether a snapshot that is due by the interval may be taken: the statistics have a loss, and
    /// the last loss was no spike, because a spike may be the first of several.
    pub fn is_calm(&self) -> bool {
        self.mean.is_some() && self.spikes == 0
    }

    fn is_spike(&self, config: &GovernorConfig, loss: f64) -> bool {
        let Some(mean) = self.mean else { return false };
        loss > config.spike_loss
            && loss > mean + config.spike_sigmas * self.variance.sqrt()
            && loss > config.spike_factor * mean
    }

    fn take(&mut self, loss: f64) {
        let mean = self.mean.unwrap_or(loss);
        let delta = loss - mean;
        self.mean = Some(mean + NEWEST * delta);
        self.variance = (1.0 - NEWEST) * (self.variance + NEWEST * delta * delta);
    }
}

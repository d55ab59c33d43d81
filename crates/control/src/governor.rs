//! Rules that detect a failed training of an env (`docs/growth.md`, Governor). The training loop
//! has the rollback (`train::step::governor`).

use serde::{Deserialize, Serialize};

/// Constants of the rules.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GovernorConfig {
    /// Share of ln(classes) that the loss of guessing may differ by: .065.
    pub collapse_width: f64,
    /// Share of ln(classes) below which the running average must have been for a collapse: .6.
    pub learned_share: f64,
    /// Loss that a spike exceeds: 12.
    pub spike_loss: f64,
    /// Standard deviations above the running mean that a spike also exceeds: 6.
    pub spike_sigmas: f64,
    /// Multiple of the running mean that a spike also exceeds: 3.
    pub spike_factor: f64,
    /// Consecutive loss spikes that count as a failure: 3.
    pub spike_patience: u32,
    /// Steps between snapshots: 5.
    pub snapshot_steps: u32,
    /// Failures without a snapshot in between that end the run: 3.
    pub failures_max: u32,
    /// Added by a rollback to the reward of the transition that caused it: −10.
    pub penalty: f64,
}

impl Default for GovernorConfig {
    fn default() -> Self {
        Self {
            collapse_width: 0.065,
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
    /// Whether a snapshot is due after this step (counted from 0); `fossilized` says whether a
    /// module was fossilized in it. Check the vitals first: a failed env is never stored
    /// ([`Vitals::is_calm`]).
    pub fn snapshot_due(&self, step: u32, fossilized: bool) -> bool {
        fossilized || step.is_multiple_of(self.snapshot_steps.max(1))
    }
}

/// Reason for a rollback.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// A loss, or a weight, is NaN or infinite.
    NotFinite,
    /// The env had learned, and its loss is now the loss of guessing.
    Collapse,
    /// The loss was far above its running mean for several steps in a row.
    Spike,
}

impl Failure {
    /// The reason in words, for events.
    pub fn describe(self) -> &'static str {
        match self {
            Failure::NotFinite => "a loss or weight is not finite",
            Failure::Collapse => "the loss fell back to the level of guessing",
            Failure::Spike => "the loss was far above its history for several steps",
        }
    }
}

/// Weight of the newest loss in the running mean and variance.
const NEWEST: f64 = 0.2;

/// Running statistics of one env's loss: exponentially weighted mean and variance (West 1979),
/// without the spikes. They start over after a rollback: the accuracy of the host without its
/// removed modules is not known, and a host that relied on them would otherwise seem to have
/// collapsed again.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vitals {
    classes: usize,
    mean: Option<f64>,
    variance: f64,
    learned: bool,
    spikes: u32,
}

impl Vitals {
    /// Statistics of an env with `classes` classes and no losses yet.
    pub fn new(classes: usize) -> Self {
        Self { classes, mean: None, variance: 0.0, learned: false, spikes: 0 }
    }

    /// Adds the loss of a step and says whether the env has failed.
    pub fn check(&mut self, config: &GovernorConfig, loss: f64) -> Option<Failure> {
        if !loss.is_finite() {
            return Some(Failure::NotFinite);
        }
        let guessing = (self.classes.max(2) as f64).ln();
        if self.learned && (loss - guessing).abs() < config.collapse_width * guessing {
            return Some(Failure::Collapse);
        }
        if self.is_spike(config, loss) {
            self.spikes += 1;
            return (self.spikes >= config.spike_patience).then_some(Failure::Spike);
        }
        self.spikes = 0;
        self.take(loss);
        self.learned |= self.mean.is_some_and(|mean| mean < config.learned_share * guessing);
        None
    }

    /// Starts over after a rollback of the env.
    pub fn rolled_back(&mut self) {
        *self = Self::new(self.classes);
    }

    /// Whether the env may be stored as it is: at least one loss was added since the statistics
    /// started, and the last one was no spike, since a spike may be the first of several.
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

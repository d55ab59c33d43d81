//! When an env's training has gone wrong beyond repair (`docs/growth.md`, Governor). The rules only: what a
//! rollback does is the training loop's business (`train::governor`).

use serde::{Deserialize, Serialize};

/// Constants of the rules. In files every key is optional and unknown ones are errors.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GovernorConfig {
    /// A loss this close to ln(classes), as a share of it, is that of guessing: .065.
    pub collapse_width: f64,
    /// A collapse takes a running average that was below this share of ln(classes): .6.
    pub learned_share: f64,
    /// A spike is a loss above this: 12.
    pub spike_loss: f64,
    /// And so many standard deviations above the running mean: 6.
    pub spike_sigmas: f64,
    /// And so many times the running mean: 3.
    pub spike_factor: f64,
    /// So many times running: 3.
    pub spike_patience: u32,
    /// Steps between snapshots: 5.
    pub snapshot_steps: u32,
    /// So many failures with no snapshot between them end the run: 3.
    pub failures_max: u32,
    /// What a rollback adds to the reward of the transition that caused it: −10.
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
    /// Whether a snapshot is due after a step (from 0) in which a module was or was not fossilized. Vitals
    /// are checked first: an env that has gone wrong is never kept ([`Vitals::is_calm`]).
    pub fn snapshot_due(&self, step: u32, fossilized: bool) -> bool {
        fossilized || step.is_multiple_of(self.snapshot_steps.max(1))
    }
}

/// Why an env is rolled back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// A loss, or a weight, is NaN or infinite.
    NotFinite,
    /// The env has learned and now guesses.
    Collapse,
    /// The loss was far above everything before, several steps running.
    Spike,
}

impl Failure {
    /// In words, for events.
    pub fn describe(self) -> &'static str {
        match self {
            Failure::NotFinite => "a loss or weight is not finite",
            Failure::Collapse => "the loss fell back to that of guessing",
            Failure::Spike => "the loss was far above its history for several steps",
        }
    }
}

/// Weight of the newest loss in the running mean and variance.
const NEWEST: f64 = 0.2;

/// Running statistics of one env's loss: exponentially weighted mean and variance (West 1979), which spikes
/// do not enter. After a rollback they begin anew: what the host can do without the modules that are gone is
/// not known, and a host that leaned on them would else seem to have collapsed again.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vitals {
    classes: usize,
    mean: Option<f64>,
    variance: f64,
    learned: bool,
    spikes: u32,
}

impl Vitals {
    /// Of an env that has seen nothing, with so many classes.
    pub fn new(classes: usize) -> Self {
        Self { classes, mean: None, variance: 0.0, learned: false, spikes: 0 }
    }

    /// Takes in the loss of a step and says whether the env has failed.
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

    /// The env was rolled back: everything begins anew.
    pub fn rolled_back(&mut self) {
        *self = Self::new(self.classes);
    }

    /// Whether the env as it is may be kept: a loss was taken in since all began, and the last was no spike,
    /// which may be the first of several.
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

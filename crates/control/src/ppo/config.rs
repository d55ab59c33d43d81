//! Settings of PPO.

use meristem_nn::graph::AdamConfig;
use serde::Serialize;

use super::targets::Targets;
use crate::gae::Discounts;
use crate::heads::{Floors, HEADS};
use crate::policy::{ADAM, LossConfig};

/// Settings of PPO; `docs/control.md` has the defaults.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PpoConfig {
    /// Width of the hidden layers: 128; 512 in the full preset.
    pub hidden: usize,
    /// Passes over a round's transitions: 4.
    pub epochs: usize,
    /// Parts of the envs of a rank in each pass, with an optimiser step each: 1.
    pub minibatches: usize,
    /// Adam's learning rate: 3e-4.
    pub lr: f32,
    /// Adam's ε: 1e-5.
    pub adam_eps: f32,
    /// Largest L2 norm of the whole gradient: 5.
    pub clip_norm: f32,
    /// γ: .995.
    pub gamma: f64,
    /// λ of the advantages: .98.
    pub lambda: f64,
    /// Whether the end of an episode is a truncation, not a termination: true. V of the observation
    /// after the last step then replaces the rewards to come. The observation contains the step, so
    /// a policy can learn either (Pardo et al., ICML 2018).
    pub bootstrap: bool,
    /// Largest distance of a probability ratio from 1 before it is clipped: .2.
    pub clip: f32,
    /// Weight of the value loss: .5.
    pub value_weight: f32,
    /// Weight of the entropy bonus: .05. Each head has a factor on it.
    pub entropy_weight: f32,
    /// Normalised mean entropy of a head below which it is pushed up: .3.
    pub entropy_floor: f32,
    /// Probability floors in the first round, per head: .02.
    pub floors: Floors,
    /// Rounds over which the floors fall linearly to 0: 10. With 0 rounds the floors are constant.
    pub floor_rounds: usize,
    /// Target KL divergence: .015. An update stops at a KL divergence above 1.5 times the target.
    pub target_kl: f64,
    /// Smallest divisor in the normalisation of advantages: .1.
    pub advantage_std_floor: f64,
    /// Consecutive skipped updates that end the run: 3.
    pub skips_max: usize,
}

impl Default for PpoConfig {
    fn default() -> Self {
        let LossConfig { clip, value, entropy, entropy_floor, .. } = LossConfig::default();
        Self {
            hidden: 128,
            epochs: 4,
            minibatches: 1,
            lr: ADAM.lr,
            adam_eps: ADAM.eps,
            clip_norm: ADAM.clip_norm,
            gamma: 0.995,
            lambda: 0.98,
            bootstrap: true,
            clip,
            value_weight: value,
            entropy_weight: entropy,
            entropy_floor,
            floors: [0.02; HEADS.len()],
            floor_rounds: 10,
            target_kl: 0.015,
            advantage_std_floor: 0.1,
            skips_max: 3,
        }
    }
}

impl PpoConfig {
    /// KL above which an update stops.
    pub(super) fn kl_limit(&self) -> f64 {
        1.5 * self.target_kl
    }

    /// Probability floors of a round, counted from 0.
    pub(super) fn floors(&self, round: u64) -> Floors {
        let left = match self.floor_rounds {
            0 => 1.0,
            rounds => (1.0 - round as f64 / rounds as f64).max(0.0),
        };
        self.floors.map(|floor| (left * f64::from(floor)) as f32)
    }

    pub(super) fn targets(&self) -> Targets {
        Targets {
            discounts: Discounts { gamma: self.gamma, lambda: self.lambda },
            advantage_std_floor: self.advantage_std_floor,
            by_minibatch: self.minibatches > 1,
        }
    }

    pub(super) fn adam(&self) -> AdamConfig {
        AdamConfig { lr: self.lr, eps: self.adam_eps, clip_norm: self.clip_norm, ..ADAM }
    }

    pub(super) fn loss(&self) -> LossConfig {
        LossConfig {
            clip: self.clip,
            value: self.value_weight,
            entropy: self.entropy_weight,
            entropy_floor: self.entropy_floor,
            ..LossConfig::default()
        }
    }
}

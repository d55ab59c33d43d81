//! Update rules of parameter groups.

use crate::kernels::optim::{AdamConfig, SgdConfig};

/// Numbers of an optimiser in device memory, see [`Optimiser::hyperparameters`].
pub(crate) const HYPERPARAMETERS: usize = 5;

/// The optimiser of a group.
///
/// Only its [kind](Optimiser::kind) is part of a plan. Its numbers are in device memory: networks
/// with other learning rates share plans and launches, and a schedule needs no new plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimiser {
    /// SGD with momentum.
    Sgd(SgdConfig),
    /// Adam.
    Adam(AdamConfig),
}

/// The update rule of an optimiser.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OptimiserKind {
    /// SGD with momentum.
    Sgd,
    /// Adam.
    Adam,
}

impl OptimiserKind {
    /// Numbers of optimiser state per parameter: 1 for the momentum, 2 for the two averages.
    pub fn moments(self) -> usize {
        match self {
            OptimiserKind::Sgd => 1,
            OptimiserKind::Adam => 2,
        }
    }
}

impl Optimiser {
    /// The update rule.
    pub fn kind(&self) -> OptimiserKind {
        match self {
            Optimiser::Sgd(_) => OptimiserKind::Sgd,
            Optimiser::Adam(_) => OptimiserKind::Adam,
        }
    }

    /// Clip norm and learning rate; then momentum, weight decay and 0 of SGD, or β₁, β₂ and ε of
    /// Adam. The inverses are `SgdConfig::from_hyperparameters` and
    /// `AdamConfig::from_hyperparameters`.
    pub fn hyperparameters(&self) -> [f64; HYPERPARAMETERS] {
        match *self {
            Optimiser::Sgd(SgdConfig { lr, momentum, weight_decay, clip_norm }) => {
                [clip_norm, lr, momentum, weight_decay, 0.0].map(f64::from)
            }
            Optimiser::Adam(AdamConfig { lr, betas: [first, second], eps, clip_norm }) => {
                [clip_norm.into(), lr.into(), first, second, eps.into()]
            }
        }
    }
}

impl SgdConfig {
    /// The configuration from [`Optimiser::hyperparameters`], which are exact: each began as f32.
    pub(crate) fn from_hyperparameters(values: &[f64]) -> Self {
        let number = |i: usize| values[i] as f32;
        let [clip_norm, lr, momentum, weight_decay] = [0, 1, 2, 3].map(number);
        Self { lr, momentum, weight_decay, clip_norm }
    }
}

impl AdamConfig {
    /// The configuration from [`Optimiser::hyperparameters`], which are exact.
    pub(crate) fn from_hyperparameters(values: &[f64]) -> Self {
        let number = |i: usize| values[i] as f32;
        let [clip_norm, lr, eps] = [0, 1, 4].map(number);
        Self { lr, betas: [values[2], values[3]], eps, clip_norm }
    }
}

impl From<SgdConfig> for Optimiser {
    fn from(sgd: SgdConfig) -> Self {
        Optimiser::Sgd(sgd)
    }
}

impl From<AdamConfig> for Optimiser {
    fn from(adam: AdamConfig) -> Self {
        Optimiser::Adam(adam)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hyperparameters_are_exact() {
        let sgd = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 5e-4, clip_norm: f32::MAX };
        let adam = AdamConfig { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-8, clip_norm: 0.3 };
        let [of_sgd, of_adam] = [sgd.into(), adam.into()].map(|o: Optimiser| o.hyperparameters());
        assert_eq!(SgdConfig::from_hyperparameters(&of_sgd), sgd);
        assert_eq!(AdamConfig::from_hyperparameters(&of_adam), adam);
    }
}

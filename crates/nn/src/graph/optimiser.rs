//! Update rules of parameter groups.

use super::ParamKind;
use crate::kernels::optim::{AdamConfig, LionConfig, MuonConfig, SgdConfig};

/// Length of [`Optimiser::hyperparameters`], the numbers of one optimiser in device memory.
pub(crate) const HYPERPARAMETERS: usize = 8;

/// The optimiser of a group.
///
/// Only its [kind](Optimiser::kind) is part of a plan. Its numbers are in device memory: networks
/// with other learning rates share plans and launches, and a schedule needs no new plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimiser {
    /// SGD with momentum.
    Sgd(SgdConfig),
    /// SGD with Nesterov's momentum.
    Nesterov(SgdConfig),
    /// Adam; weight decay is added to the gradient.
    Adam(AdamConfig),
    /// AdamW: Adam with decoupled weight decay.
    AdamW(AdamConfig),
    /// Lion.
    Lion(LionConfig),
    /// Muon for matrices, AdamW for other parameters.
    Muon(MuonConfig),
}

/// The update rule of an optimiser.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OptimiserKind {
    /// SGD with momentum.
    Sgd,
    /// SGD with Nesterov's momentum.
    Nesterov,
    /// Adam.
    Adam,
    /// AdamW.
    AdamW,
    /// Lion.
    Lion,
    /// Muon for matrices, AdamW for other parameters.
    Muon,
}

impl OptimiserKind {
    /// Numbers of optimiser state per parameter: 1 for a momentum or an average, 2 for Adam's
    /// averages. Muon uses the second only for parameters of AdamW, but has memory for it for all.
    pub fn moments(self) -> usize {
        match self {
            OptimiserKind::Sgd | OptimiserKind::Nesterov | OptimiserKind::Lion => 1,
            OptimiserKind::Adam | OptimiserKind::AdamW | OptimiserKind::Muon => 2,
        }
    }

    /// Whether it counts the steps of each parameter, for the corrections of Adam's averages.
    ///
    /// The count belongs to the parameter and not to the network. Averages begin at zero when a
    /// parameter is new, and after its first k steps the first has the weight `1 − β₁ᵏ` and the
    /// second `1 − β₂ᵏ`, whatever the age of the network. Divided by these weights, the first step
    /// of a constant gradient is `lr·sign(g)`. With the network's count the divisors would be too
    /// large: in a network of 1000 steps the first step would be 2.5 times as long, in an older one
    /// up to `(1 − β₁)/√(1 − β₂)` times, 3.2 with the usual β.
    pub fn counts_steps(self) -> bool {
        matches!(self, OptimiserKind::Adam | OptimiserKind::AdamW | OptimiserKind::Muon)
    }

    /// Names of the state of a parameter of this kind, each after the parameter's name; a count of
    /// steps, `.step`, is not among them.
    pub(crate) fn suffixes(self, of: ParamKind) -> &'static [&'static str] {
        match self {
            OptimiserKind::Sgd | OptimiserKind::Nesterov => &[""],
            OptimiserKind::Lion => &[".exp_avg"],
            OptimiserKind::Muon if of.is_matrix() => &[".momentum_buffer"],
            OptimiserKind::Adam | OptimiserKind::AdamW | OptimiserKind::Muon => {
                &[".exp_avg", ".exp_avg_sq"]
            }
        }
    }

    /// Whether the steps of a parameter of this kind are counted.
    pub(crate) fn counts_steps_of(self, of: ParamKind) -> bool {
        self.counts_steps() && !(self == OptimiserKind::Muon && of.is_matrix())
    }
}

impl Optimiser {
    /// The update rule.
    pub fn kind(&self) -> OptimiserKind {
        match self {
            Optimiser::Sgd(_) => OptimiserKind::Sgd,
            Optimiser::Nesterov(_) => OptimiserKind::Nesterov,
            Optimiser::Adam(_) => OptimiserKind::Adam,
            Optimiser::AdamW(_) => OptimiserKind::AdamW,
            Optimiser::Lion(_) => OptimiserKind::Lion,
            Optimiser::Muon(_) => OptimiserKind::Muon,
        }
    }

    /// Its numbers, 0 where it has none: clip norm; learning rate; momentum of SGD, or β₁; weight
    /// decay of SGD, or β₂; ε; weight decay of the others; momentum of Muon; learning rate of
    /// Muon's AdamW. The inverse is `FromHyperparameters`.
    pub fn hyperparameters(&self) -> [f64; HYPERPARAMETERS] {
        let none = 0.0;
        match *self {
            Optimiser::Sgd(sgd) | Optimiser::Nesterov(sgd) => {
                let SgdConfig { lr, momentum, weight_decay, clip_norm } = sgd;
                let [clip, lr, momentum, decay] =
                    [clip_norm, lr, momentum, weight_decay].map(f64::from);
                [clip, lr, momentum, decay, none, none, none, none]
            }
            Optimiser::Adam(adam) | Optimiser::AdamW(adam) => adam_hyperparameters(&adam),
            Optimiser::Lion(LionConfig { lr, betas: [first, second], weight_decay, clip_norm }) => {
                let [clip, lr, decay] = [clip_norm, lr, weight_decay].map(f64::from);
                [clip, lr, first, second, none, decay, none, none]
            }
            Optimiser::Muon(MuonConfig { lr, momentum, others }) => {
                let [clip, rate, first, second, eps, decay, ..] = adam_hyperparameters(&others);
                [clip, lr.into(), first, second, eps, decay, momentum.into(), rate]
            }
        }
    }
}

/// A number that began as f32, which is exact.
fn single(values: &[f64], at: usize) -> f32 {
    values[at] as f32
}

/// See [`Optimiser::hyperparameters`].
fn adam_hyperparameters(adam: &AdamConfig) -> [f64; HYPERPARAMETERS] {
    let AdamConfig { lr, betas: [first, second], eps, weight_decay, clip_norm } = *adam;
    let [clip, lr, eps, decay] = [clip_norm, lr, eps, weight_decay].map(f64::from);
    [clip, lr, first, second, eps, decay, 0.0, 0.0]
}

/// The configuration of an optimiser, from its numbers in device memory.
pub(crate) trait FromHyperparameters {
    /// The configuration from [`Optimiser::hyperparameters`], which are exact.
    fn from_hyperparameters(values: &[f64]) -> Self;
}

impl FromHyperparameters for SgdConfig {
    fn from_hyperparameters(values: &[f64]) -> Self {
        let [clip_norm, lr, momentum, weight_decay] = [0, 1, 2, 3].map(|at| single(values, at));
        Self { lr, momentum, weight_decay, clip_norm }
    }
}

impl FromHyperparameters for AdamConfig {
    fn from_hyperparameters(values: &[f64]) -> Self {
        let [clip_norm, lr, eps, weight_decay] = [0, 1, 4, 5].map(|at| single(values, at));
        Self { lr, betas: [values[2], values[3]], eps, weight_decay, clip_norm }
    }
}

impl FromHyperparameters for LionConfig {
    fn from_hyperparameters(values: &[f64]) -> Self {
        let [clip_norm, lr, weight_decay] = [0, 1, 5].map(|at| single(values, at));
        Self { lr, betas: [values[2], values[3]], weight_decay, clip_norm }
    }
}

impl FromHyperparameters for MuonConfig {
    fn from_hyperparameters(values: &[f64]) -> Self {
        let [lr, momentum, rate] = [1, 6, 7].map(|at| single(values, at));
        let others = AdamConfig { lr: rate, ..AdamConfig::from_hyperparameters(values) };
        Self { lr, momentum, others }
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

impl From<LionConfig> for Optimiser {
    fn from(lion: LionConfig) -> Self {
        Optimiser::Lion(lion)
    }
}

impl From<MuonConfig> for Optimiser {
    fn from(muon: MuonConfig) -> Self {
        Optimiser::Muon(muon)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hyperparameters_are_exact() {
        let sgd = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 5e-4, clip_norm: f32::MAX };
        let adam = AdamConfig {
            lr: 1e-3,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.01,
            clip_norm: 0.3,
        };
        let lion =
            LionConfig { lr: 1e-4, betas: [0.9, 0.99], weight_decay: 0.1, clip_norm: f32::MAX };
        let muon = MuonConfig { lr: 0.02, momentum: 0.95, others: adam };
        assert_eq!(SgdConfig::from_hyperparameters(&Optimiser::Sgd(sgd).hyperparameters()), sgd);
        assert_eq!(
            AdamConfig::from_hyperparameters(&Optimiser::AdamW(adam).hyperparameters()),
            adam
        );
        assert_eq!(
            LionConfig::from_hyperparameters(&Optimiser::Lion(lion).hyperparameters()),
            lion
        );
        assert_eq!(
            MuonConfig::from_hyperparameters(&Optimiser::Muon(muon).hyperparameters()),
            muon
        );
    }
}

//! Update rules of parameter groups.

use crate::kernels::optim::{AdamConfig, SgdConfig};

/// The optimiser of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimiser {
    /// SGD with momentum.
    Sgd(SgdConfig),
    /// Adam.
    Adam(AdamConfig),
}

impl Optimiser {
    /// Largest L2 norm of the group's gradient.
    pub fn clip_norm(&self) -> f32 {
        match self {
            Optimiser::Sgd(sgd) => sgd.clip_norm,
            Optimiser::Adam(adam) => adam.clip_norm,
        }
    }

    /// Numbers of optimiser state per parameter: 1 for the momentum, 2 for the two averages.
    pub fn moments(&self) -> usize {
        match self {
            Optimiser::Sgd(_) => 1,
            Optimiser::Adam(_) => 2,
        }
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

//! How a group of parameters is updated.

/// SGD with momentum and weight decay, as PyTorch's `torch.optim.SGD` (dampening 0, no Nesterov).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdConfig {
    /// Learning rate.
    pub lr: f32,
    /// Momentum.
    pub momentum: f32,
    /// Weight decay, added to the gradient.
    pub weight_decay: f32,
    /// Largest L2 norm of the group's gradient; more is scaled down (`clip_grad_norm_`).
    pub clip_norm: f32,
}

/// Adam, as PyTorch's `torch.optim.Adam` (no weight decay, no AMSGrad).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamConfig {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the averages of the gradient and of its square.
    pub betas: [f64; 2],
    /// Added to the root of the averaged square.
    pub eps: f32,
    /// Largest L2 norm of the group's gradient; more is scaled down (`clip_grad_norm_`).
    pub clip_norm: f32,
}

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

    /// How many numbers it remembers per parameter: the momentum, or the two averages.
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

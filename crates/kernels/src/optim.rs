//! Gradient clipping and update rules of optimisers: stochastic gradient descent, Adam and AdamW as
//! PyTorch defines them, and Lion. [`muon`](super::muon) has the update of matrices.

use super::Isa;
use super::macros::isa_kernels;

/// SGD with momentum and weight decay, as PyTorch's `torch.optim.SGD` (dampening 0), with or
/// without `nesterov`.
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

/// Adam or AdamW, as PyTorch's `torch.optim.Adam` and `torch.optim.AdamW` (no AMSGrad).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamConfig {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the averages of the gradient and of its square.
    pub betas: [f64; 2],
    /// Added to the root of the averaged square.
    pub eps: f32,
    /// Weight decay: Adam adds `weight_decay·p` to the gradient, AdamW multiplies the parameter by
    /// `1 − lr·weight_decay`.
    pub weight_decay: f32,
    /// Largest L2 norm of the group's gradient; more is scaled down (`clip_grad_norm_`).
    pub clip_norm: f32,
}

/// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionConfig {
    /// Learning rate: the length of every element's step.
    pub lr: f32,
    /// β₁, the weight of the average in the step's direction, and β₂, the decay of the average.
    pub betas: [f64; 2],
    /// Weight decay: the parameter is multiplied by `1 − lr·weight_decay`.
    pub weight_decay: f32,
    /// Largest L2 norm of the group's gradient; more is scaled down (`clip_grad_norm_`).
    pub clip_norm: f32,
}

/// Muon for matrices and kernels of convolutions, and AdamW for all other parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MuonConfig {
    /// Learning rate of matrices.
    pub lr: f32,
    /// Momentum of matrices.
    pub momentum: f32,
    /// AdamW of the other parameters; weight decay and clip norm are those of all parameters.
    pub others: AdamConfig,
}

/// Factor that brings a gradient of L2 norm `norm` down to at most `max_norm`:
/// `min(1, max_norm/(norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_`. NaN for a NaN norm.
pub fn clip_coefficient(norm: f64, max_norm: f32) -> f32 {
    // f32, because PyTorch's norm is an f32 tensor.
    let coefficient = max_norm / (norm as f32 + 1e-6);
    if coefficient > 1.0 { 1.0 } else { coefficient }
}

/// One step of `torch.optim.Adam` or `torch.optim.AdamW` (no AMSGrad).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamStep {
    /// Decay β₂ of the average of the gradient's square.
    pub decay: f32,
    /// Weights of a gradient in the two averages, `1 − β`.
    pub shares: [f32; 2],
    /// Added to the root of the averaged square.
    pub eps: f32,
    /// Factor of the gradient, from [`clip_coefficient`].
    pub clip: f32,
    /// Learning rate over the first average's bias correction, `lr/(1 − β₁ᵗ)`.
    pub rate: f32,
    /// Root of the second average's bias correction, `√(1 − β₂ᵗ)`.
    pub root: f32,
    /// Factor of the parameter that is added to the gradient: Adam's weight decay.
    pub penalty: f32,
    /// Factor of the parameter before the step, from AdamW's weight decay ([`decayed`]).
    pub keep: f32,
}

/// Factor of a parameter with decoupled weight decay, `1 − lr·weight_decay`, computed in f64.
pub fn decayed(lr: f32, weight_decay: f32) -> f32 {
    (1.0 - f64::from(lr) * f64::from(weight_decay)) as f32
}

impl AdamStep {
    /// The same step of AdamW.
    pub fn decoupled(adam: &AdamConfig, clip: f32, steps: i64) -> Self {
        let keep = decayed(adam.lr, adam.weight_decay);
        Self { penalty: 0.0, keep, ..Self::new(adam, clip, steps) }
    }

    /// The step of Adam number `steps`, counted from 1. The corrections are computed in f64, as in
    /// PyTorch.
    pub fn new(adam: &AdamConfig, clip: f32, steps: i64) -> Self {
        let [first, second] = adam.betas.map(|beta| 1.0 - beta.powf(steps as f64));
        Self {
            decay: adam.betas[1] as f32,
            shares: adam.betas.map(|beta| (1.0 - beta) as f32),
            eps: adam.eps,
            clip,
            rate: (f64::from(adam.lr) / first) as f32,
            root: second.sqrt() as f32,
            penalty: adam.weight_decay,
            keep: 1.0,
        }
    }
}

isa_kernels! {
    /// `g = clip·grad + penalty·p; m = β₁m + (1 − β₁)g; v = β₂v + (1 − β₂)g²;
    /// p = keep·p − rate·m/(√v/root + eps)` (Kingma and Ba, "Adam", 2015; Loshchilov and Hutter,
    /// "Decoupled Weight Decay Regularization", 2019; ε added as PyTorch does).
    pub fn adam_step(isa: Isa, step: &AdamStep, param: &mut [f32], grad: &[f32],
                     average: &mut [f32], square: &mut [f32]) {
        let AdamStep { decay, shares: [share1, share2], eps, clip, rate, root, penalty, keep } =
            *step;
        for (((p, &g), m), v) in param.iter_mut().zip(grad).zip(average).zip(square) {
            let g = clip * g + penalty * *p;
            *m += share1 * (g - *m);
            *v = decay * *v + share2 * g * g;
            *p = keep * *p - rate * (*m / (v.sqrt() / root + eps));
        }
    }

    /// `g = clip·grad; p = keep·p − lr·sign(β₁m + (1 − β₁)g); m = β₂m + (1 − β₂)g`, as Lion's
    /// published program. The sign of 0 is 0, and that of NaN is NaN.
    pub fn lion_step(isa: Isa, lion: &LionConfig, clip: f32, param: &mut [f32], grad: &[f32],
                     average: &mut [f32]) {
        let [first, second] = [lion.betas[0] as f32, lion.betas[1] as f32];
        let [share1, share2] = [(1.0 - lion.betas[0]) as f32, (1.0 - lion.betas[1]) as f32];
        let (lr, keep) = (lion.lr, decayed(lion.lr, lion.weight_decay));
        for ((p, &g), m) in param.iter_mut().zip(grad).zip(average) {
            let g = clip * g;
            let direction = first * *m + share1 * g;
            let sign = if direction == 0.0 { direction } else { 1.0f32.copysign(direction) };
            let sign = if direction.is_nan() { direction } else { sign };
            *p = keep * *p - lr * sign;
            *m = second * *m + share2 * g;
        }
    }

    /// Sum of squares, in f64 throughout; 16 partial sums, so the order is the same everywhere.
    pub fn grad_norm_sq(isa: Isa, grad: &[f32]) -> f64 {
        const LANES: usize = 16;
        let mut part = [0f64; LANES];
        let chunks = grad.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for l in 0..LANES {
                let g = f64::from(chunk[l]);
                part[l] += g * g;
            }
        }
        for (part, &g) in part.iter_mut().zip(rest) {
            *part += f64::from(g) * f64::from(g);
        }
        part.iter().sum()
    }

    /// One step of `torch.optim.SGD` (dampening 0, no Nesterov):
    /// `g = clip·grad + decay·p; b = momentum·b + g; p -= lr·b`. With a momentum of zeros PyTorch's
    /// first step is no special case.
    pub fn sgd_step(isa: Isa, sgd: &SgdConfig, clip: f32, param: &mut [f32], grad: &[f32],
                    momentum: &mut [f32]) {
        let SgdConfig { lr, momentum: mu, weight_decay, .. } = *sgd;
        for ((p, &g), b) in param.iter_mut().zip(grad).zip(momentum) {
            *b = mu * *b + (clip * g + weight_decay * *p);
            *p -= lr * *b;
        }
    }

    /// One step of `torch.optim.SGD` with `nesterov=True` (dampening 0):
    /// `g = clip·grad + decay·p; b = momentum·b + g; p -= lr·(g + momentum·b)`.
    pub fn nesterov_step(isa: Isa, sgd: &SgdConfig, clip: f32, param: &mut [f32], grad: &[f32],
                         momentum: &mut [f32]) {
        let SgdConfig { lr, momentum: mu, weight_decay, .. } = *sgd;
        for ((p, &g), b) in param.iter_mut().zip(grad).zip(momentum) {
            let g = clip * g + weight_decay * *p;
            *b = mu * *b + g;
            *p -= lr * (g + mu * *b);
        }
    }
}

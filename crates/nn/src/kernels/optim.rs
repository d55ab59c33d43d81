//! Gradient clipping and stochastic gradient descent, as PyTorch defines them.

use super::macros::isa_kernels;
use super::{Isa, check_len};

/// One step of `torch.optim.SGD` (dampening 0, no Nesterov).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdStep {
    /// Learning rate.
    pub lr: f32,
    /// Momentum.
    pub momentum: f32,
    /// Weight decay, added to the clipped gradient.
    pub weight_decay: f32,
    /// Factor of the gradient, from [`clip_coefficient`].
    pub clip: f32,
    /// First step of these parameters: the momentum buffer becomes the gradient.
    pub first: bool,
}

/// Factor that brings a gradient of L2 norm `norm` down to at most `max_norm`:
/// `min(1, max_norm/(norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_`. NaN for a NaN norm.
pub fn clip_coefficient(norm: f64, max_norm: f32) -> f32 {
    // f32 as in PyTorch, whose norm is an f32 tensor.
    let coefficient = max_norm / (norm as f32 + 1e-6);
    if coefficient > 1.0 { 1.0 } else { coefficient }
}

isa_kernels! {
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

    /// `g = clip·grad + decay·p; b = momentum·b + g (first step: b = g); p -= lr·b`.
    pub fn sgd_step(isa: Isa, step: &SgdStep, param: &mut [f32], grad: &[f32],
                    momentum: &mut [f32]) {
        check_len("sgd_step: grad", grad, param.len());
        check_len("sgd_step: momentum", momentum, param.len());
        let SgdStep { lr, momentum: mu, weight_decay, clip, first } = *step;
        let it = param.iter_mut().zip(grad).zip(momentum);
        if first {
            it.for_each(|((p, &g), b)| {
                *b = clip * g + weight_decay * *p;
                *p -= lr * *b;
            });
        } else {
            it.for_each(|((p, &g), b)| {
                *b = mu * *b + (clip * g + weight_decay * *p);
                *p -= lr * *b;
            });
        }
    }
}

//! Batch norm over `[N][H][W][C]`, as PyTorch's `batch_norm`: normalised with the biased variance,
//! running variance unbiased.
//!
//! The forward pass is one sweep over the raw input (normalise, ReLU, pool); the backward pass two
//! (sums, then gradient), which read the raw input again instead of a stored normalised one.

use crate::kernels::macros::isa_kernels;
use crate::kernels::{GradOut, ImageShape, Isa, check_len, check_scratch};

/// What follows the normalisation in the fused kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// Nothing.
    None,
    /// `max(z, 0)`.
    Relu,
}

/// Per-channel statistics of a batch, written by the kernels that gather them.
#[derive(Debug)]
pub struct BatchStats<'a> {
    /// Mean `[C]`.
    pub mean: &'a mut [f32],
    /// Biased variance `[C]`.
    pub var: &'a mut [f32],
}

/// What [`batch_norm_act_forward`] reads.
#[derive(Clone, Copy, Debug)]
pub struct BatchNormForward<'a> {
    /// Raw input `[N][H][W][C]`.
    pub x: &'a [f32],
    /// Mean `[C]`: of the batch in training, running in evaluation.
    pub mean: &'a [f32],
    /// Variance `[C]`: biased of the batch in training, running in evaluation.
    pub var: &'a [f32],
    /// Scale γ `[C]`.
    pub gamma: &'a [f32],
    /// Shift β `[C]`.
    pub beta: &'a [f32],
    /// Added to the variance.
    pub eps: f32,
    /// What follows.
    pub act: Activation,
    /// Whether 2 × 2 max pooling with stride 2 follows; an odd last row or column is dropped.
    pub pool: bool,
}

/// What [`batch_norm_act_backward`] reads.
#[derive(Clone, Copy, Debug)]
pub struct BatchNormBackward<'a> {
    /// What the forward pass read, with the *batch* statistics.
    pub forward: BatchNormForward<'a>,
    /// Gradient of the output, pooled size if pooled.
    pub dout: &'a [f32],
    /// The codes of the forward pass; read only if pooled, else empty.
    pub codes: &'a [u8],
}

/// Where the gradients of batch norm go.
#[derive(Debug)]
pub struct BatchNormGrads<'a> {
    /// With respect to the raw input.
    pub dx: GradOut<'a>,
    /// With respect to γ; added to.
    pub dgamma: &'a mut [f32],
    /// With respect to β; added to.
    pub dbeta: &'a mut [f32],
}

/// Running statistics, updated by [`update_running`].
#[derive(Debug)]
pub struct Running<'a> {
    /// Running mean `[C]`.
    pub mean: &'a mut [f32],
    /// Running unbiased variance `[C]`.
    pub var: &'a mut [f32],
    /// `num_batches_tracked`.
    pub batches: &'a mut f32,
}

/// Code of a pooled output whose ReLU blocks the gradient; 0 to 3 name the window's maximum.
pub const BLOCKED: u8 = 4;

/// Scratch of [`batch_stats`] in f32, for `c` channels.
pub const fn stats_scratch_len(c: usize) -> usize {
    8 * c + 64
}

/// Scratch of [`batch_norm_act_forward`] and [`batch_norm_act_backward`] in f32.
pub const fn scratch_len(c: usize) -> usize {
    16 * c + 64
}

/// Shape of the output of the fused kernel.
pub const fn output(shape: &ImageShape, pool: bool) -> ImageShape {
    match pool {
        true => ImageShape { h: shape.h / 2, w: shape.w / 2, ..*shape },
        false => *shape,
    }
}

/// `running = (1 − momentum)·running + momentum·batch`, the variance unbiased by
/// `count/(count − 1)`, and one more batch; `count` = N·H·W. A count of 1 has no unbiased
/// variance: the plan refuses such a training batch, as PyTorch does.
pub fn update_running(
    momentum: f32,
    count: usize,
    mean: &[f32],
    var: &[f32],
    running: Running<'_>,
) {
    check_len("update_running: var", var, mean.len());
    check_len("update_running: running mean", running.mean, mean.len());
    check_len("update_running: running var", running.var, mean.len());
    let unbiased = (count as f64 / (count as f64 - 1.0)) as f32;
    for (r, &m) in running.mean.iter_mut().zip(mean) {
        *r = (1.0 - momentum) * *r + momentum * m;
    }
    for (r, &v) in running.var.iter_mut().zip(var) {
        *r = (1.0 - momentum) * *r + momentum * (v * unbiased);
    }
    *running.batches += 1.0;
}

isa_kernels! {
    /// Mean and biased variance of each channel over N, H and W. Sums are taken of the distance
    /// from the first image's mean, so that a mean far from 0 cancels harmlessly, and in f64
    /// across images.
    pub fn batch_stats(isa: Isa, shape: &ImageShape, x: &[f32], to: BatchStats<'_>,
                       scratch: &mut [f32]) {
        check_len("batch_stats: x", x, shape.len());
        check_len("batch_stats: mean", to.mean, shape.c);
        check_len("batch_stats: var", to.var, shape.c);
        check_scratch("batch_stats", scratch, stats_scratch_len(shape.c));
        let count = (shape.batch * shape.pixels()) as f64;
        for c in 0..shape.c {
            let values = || x[c..].iter().step_by(shape.c).map(|&v| f64::from(v));
            let mean = values().sum::<f64>() / count;
            to.mean[c] = mean as f32;
            to.var[c] = (values().map(|v| (v - mean) * (v - mean)).sum::<f64>() / count) as f32;
        }
    }

    /// `out = pool(act((x − mean)·γ/√(var + eps) + β))` in one pass. `codes`, needed for the
    /// backward pass of a pooled output and otherwise `None`, gets one byte per output: which of
    /// the window's four inputs (row-major, first of equals, last NaN) was the maximum, or
    /// [`BLOCKED`].
    pub fn batch_norm_act_forward(isa: Isa, shape: &ImageShape, of: &BatchNormForward<'_>,
                                  out: &mut [f32], codes: Option<&mut [u8]>,
                                  scratch: &mut [f32]) {
        of.check(shape);
        let mut codes = codes;
        let o = output(shape, of.pool);
        check_len("batch_norm_act_forward: out", out, o.len());
        if let Some(codes) = &codes {
            check_len("batch_norm_act_forward: codes", codes, o.len());
        }
        check_scratch("batch_norm_act_forward", scratch, scratch_len(shape.c));
        let relu = of.act == Activation::Relu;
        for (i, out) in out.iter_mut().enumerate() {
            let c = i % o.c;
            let scale = of.gamma[c] / (of.var[c] + of.eps).sqrt();
            let z = |i: usize| (of.x[i] - of.mean[c]) * scale + of.beta[c];
            let (mut best, mut code) = (z(of.window(shape, i, 0)), 0);
            if of.pool {
                for k in 1..4 {
                    let v = z(of.window(shape, i, k));
                    if v > best || v.is_nan() {
                        (best, code) = (v, k as u8);
                    }
                }
            }
            if relu && best <= 0.0 {
                (best, code) = (0.0, BLOCKED);
            }
            *out = best;
            if let Some(codes) = &mut codes {
                codes[i] = code;
            }
        }
    }

    /// Gradients of [`batch_norm_act_forward`] in training: with `dz` the gradient routed back
    /// through pool and activation, `x̂ = (x − mean)/√(var + eps)` and M = N·H·W,
    /// `dβ = Σ dz`, `dγ = Σ dz·x̂`, `dx = γ/√(var + eps)·(dz − dβ/M − x̂·dγ/M)`.
    pub fn batch_norm_act_backward(isa: Isa, shape: &ImageShape, of: &BatchNormBackward<'_>,
                                   to: BatchNormGrads<'_>, scratch: &mut [f32]) {
        let f = &of.forward;
        f.check(shape);
        let o = output(shape, f.pool);
        check_len("batch_norm_act_backward: dout", of.dout, o.len());
        check_len("batch_norm_act_backward: dx", to.dx.values, shape.len());
        check_len("batch_norm_act_backward: dgamma", to.dgamma, shape.c);
        check_len("batch_norm_act_backward: dbeta", to.dbeta, shape.c);
        check_scratch("batch_norm_act_backward", scratch, scratch_len(shape.c));
        if f.pool {
            check_len("batch_norm_act_backward: codes", of.codes, o.len());
        }
        let relu = f.act == Activation::Relu;
        let count = (shape.batch * shape.pixels()) as f64;
        for c in 0..shape.c {
            let invstd = 1.0 / (f.var[c] + f.eps).sqrt();
            let hat = |i: usize| (f.x[i] - f.mean[c]) * invstd;
            // Output index i to the input it routes to, with its gradient.
            let routed = |i: usize| {
                let code = match f.pool {
                    true => of.codes[i],
                    false => {
                        let z = (f.x[i] - f.mean[c]) * (f.gamma[c] * invstd) + f.beta[c];
                        if relu && z <= 0.0 { BLOCKED } else { 0 }
                    }
                };
                (code != BLOCKED).then(|| (f.window(shape, i, usize::from(code)), of.dout[i]))
            };
            let (mut db, mut dg) = (0f64, 0f64);
            for (i, d) in (c..o.len()).step_by(o.c).filter_map(routed) {
                db += f64::from(d);
                dg += f64::from(d) * f64::from(hat(i));
            }
            to.dbeta[c] += db as f32;
            to.dgamma[c] += dg as f32;
            let scale = f.gamma[c] * invstd;
            let (mb, mg) = ((db / count) as f32, (dg / count) as f32);
            for i in (c..shape.len()).step_by(shape.c) {
                let d = -scale * (mb + hat(i) * mg);
                to.dx.values[i] = if to.dx.accumulate { to.dx.values[i] + d } else { d };
            }
            for (i, d) in (c..o.len()).step_by(o.c).filter_map(routed) {
                to.dx.values[i] += scale * d;
            }
        }
    }
}

impl BatchNormForward<'_> {
    #[track_caller]
    fn check(&self, shape: &ImageShape) {
        check_len("batch norm: x", self.x, shape.len());
        check_len("batch norm: mean", self.mean, shape.c);
        check_len("batch norm: var", self.var, shape.c);
        check_len("batch norm: gamma", self.gamma, shape.c);
        check_len("batch norm: beta", self.beta, shape.c);
    }

    /// Input index of window position `k` (0 to 3) of output index `i`.
    fn window(&self, shape: &ImageShape, i: usize, k: usize) -> usize {
        if !self.pool {
            return i;
        }
        let o = output(shape, true);
        let (pixel, c) = (i / o.c, i % o.c);
        let (x, y, n) = (pixel % o.w, pixel / o.w % o.h, pixel / o.pixels());
        ((n * shape.h + 2 * y + k / 2) * shape.w + 2 * x + k % 2) * shape.c + c
    }
}

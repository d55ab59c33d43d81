//! Group norm over `[N][H][W][C]`, as PyTorch's `group_norm`.

use crate::kernels::macros::isa_kernels;
use crate::kernels::{GradOut, ImageShape, Isa, check_len, check_scratch};

/// What [`group_norm_forward`] reads.
#[derive(Clone, Copy, Debug)]
pub struct GroupNormForward<'a> {
    /// Input `[N][H][W][C]`.
    pub x: &'a [f32],
    /// Scale γ `[C]`.
    pub gamma: &'a [f32],
    /// Shift β `[C]`.
    pub beta: &'a [f32],
    /// Channel groups; divides C.
    pub groups: usize,
    /// Added to the variance.
    pub eps: f32,
}

/// Statistics that the backward pass needs, written by the forward pass.
#[derive(Debug)]
pub struct GroupNormSaved<'a> {
    /// Mean `[N][groups]`.
    pub mean: &'a mut [f32],
    /// `1/√(var + eps)` `[N][groups]`.
    pub invstd: &'a mut [f32],
}

/// What [`group_norm_backward`] reads.
#[derive(Clone, Copy, Debug)]
pub struct GroupNormBackward<'a> {
    /// Input of the forward pass.
    pub x: &'a [f32],
    /// Scale γ `[C]`.
    pub gamma: &'a [f32],
    /// Channel groups.
    pub groups: usize,
    /// Saved mean `[N][groups]`.
    pub mean: &'a [f32],
    /// Saved `1/√(var + eps)` `[N][groups]`.
    pub invstd: &'a [f32],
    /// Gradient of the output.
    pub dout: &'a [f32],
}

/// Where the gradients of group norm go.
#[derive(Debug)]
pub struct GroupNormGrads<'a> {
    /// With respect to the input, if wanted.
    pub dx: Option<GradOut<'a>>,
    /// With respect to γ; added to.
    pub dgamma: &'a mut [f32],
    /// With respect to β; added to.
    pub dbeta: &'a mut [f32],
}

/// Scratch of both passes in f32, for `c` channels.
pub const fn scratch_len(c: usize) -> usize {
    16 * c + 64
}

isa_kernels! {
    /// `out = (x − mean)·γ/√(var + eps) + β`, mean and biased variance per sample and group.
    pub fn group_norm_forward(isa: Isa, shape: &ImageShape, of: &GroupNormForward<'_>,
                              out: &mut [f32], saved: GroupNormSaved<'_>, scratch: &mut [f32]) {
        let groups = of.groups;
        assert!(groups > 0 && shape.c % groups == 0, "group_norm: {groups} groups, {shape:?}");
        check_len("group_norm_forward: x", of.x, shape.len());
        check_len("group_norm_forward: gamma", of.gamma, shape.c);
        check_len("group_norm_forward: beta", of.beta, shape.c);
        check_len("group_norm_forward: out", out, shape.len());
        check_len("group_norm_forward: mean", saved.mean, shape.batch * groups);
        check_len("group_norm_forward: invstd", saved.invstd, shape.batch * groups);
        check_scratch("group_norm_forward", scratch, scratch_len(shape.c));
        let (c, each) = (shape.c, shape.c / groups);
        let count = (shape.pixels() * each) as f64;
        for n in 0..shape.batch {
            let at = n * shape.pixels() * c;
            let x = &of.x[at..at + shape.pixels() * c];
            let out = &mut out[at..at + shape.pixels() * c];
            for g in 0..groups {
                let values = || x.chunks_exact(c).flat_map(|p| &p[g * each..(g + 1) * each])
                    .map(|&v| f64::from(v));
                let mean = values().sum::<f64>() / count;
                let var = values().map(|v| (v - mean) * (v - mean)).sum::<f64>() / count;
                saved.mean[n * groups + g] = mean as f32;
                saved.invstd[n * groups + g] = (1.0 / (var + f64::from(of.eps)).sqrt()) as f32;
            }
            for (i, (out, &x)) in out.iter_mut().zip(x).enumerate() {
                let s = n * groups + i % c / each;
                *out = (x - saved.mean[s]) * (of.gamma[i % c] * saved.invstd[s]) + of.beta[i % c];
            }
        }
    }

    /// Gradients of [`group_norm_forward`].
    pub fn group_norm_backward(isa: Isa, shape: &ImageShape, of: &GroupNormBackward<'_>,
                               to: GroupNormGrads<'_>, scratch: &mut [f32]) {
        let groups = of.groups;
        assert!(groups > 0 && shape.c % groups == 0, "group_norm: {groups} groups, {shape:?}");
        check_len("group_norm_backward: x", of.x, shape.len());
        check_len("group_norm_backward: gamma", of.gamma, shape.c);
        check_len("group_norm_backward: mean", of.mean, shape.batch * groups);
        check_len("group_norm_backward: invstd", of.invstd, shape.batch * groups);
        check_len("group_norm_backward: dout", of.dout, shape.len());
        check_len("group_norm_backward: dgamma", to.dgamma, shape.c);
        check_len("group_norm_backward: dbeta", to.dbeta, shape.c);
        check_scratch("group_norm_backward", scratch, scratch_len(shape.c));
        let (c, each) = (shape.c, shape.c / groups);
        let count = (shape.pixels() * each) as f32;
        let mut dx = to.dx;
        for n in 0..shape.batch {
            for g in 0..groups {
                let s = n * groups + g;
                let hat = |i: usize| (of.x[i] - of.mean[s]) * of.invstd[s];
                let at = n * shape.pixels() * c;
                let (mut sum, mut dot) = (0f64, 0f64);
                for ch in g * each..(g + 1) * each {
                    let (mut db, mut dg) = (0f64, 0f64);
                    for i in (at + ch..at + shape.pixels() * c).step_by(c) {
                        db += f64::from(of.dout[i]);
                        dg += f64::from(of.dout[i]) * f64::from(hat(i));
                    }
                    to.dbeta[ch] += db as f32;
                    to.dgamma[ch] += dg as f32;
                    sum += db * f64::from(of.gamma[ch]);
                    dot += dg * f64::from(of.gamma[ch]);
                }
                let Some(dx) = &mut dx else { continue };
                for ch in g * each..(g + 1) * each {
                    for i in (at + ch..at + shape.pixels() * c).step_by(c) {
                        let d = of.invstd[s] * (of.dout[i] * of.gamma[ch]
                            - sum as f32 / count - hat(i) * (dot as f32 / count));
                        dx.values[i] = if dx.accumulate { dx.values[i] + d } else { d };
                    }
                }
            }
        }
    }
}

//! Group norm over `[N][H][W][C]`, as PyTorch's `group_norm`.

use super::channels;
use super::image::{Affine, NormBackward, NormForward, NormGradient, Reduce};
use crate::lanes::for_channels;
use crate::{BatchShape, GradOut, Isa, split_f64};

/// Inputs of [`group_norm_forward`].
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

/// Inputs of [`group_norm_backward`].
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

/// Destinations of the gradients of group norm.
#[derive(Debug)]
pub struct GroupNormGrads<'a> {
    /// Gradient with respect to the input, optional.
    pub dx: GradOut<'a>,
    /// Gradient with respect to γ; added to.
    pub dgamma: &'a mut [f32],
    /// Gradient with respect to β; added to.
    pub dbeta: &'a mut [f32],
}

/// Scratch of both passes in f32, for `c` channels.
pub const fn scratch_len(c: usize) -> usize {
    16 * c + 64
}

/// Number of pixels that estimate the mean of a group of an image. With p pixels in the image, the
/// sum of squares about the estimate is at most (p/`ESTIMATE_PIXELS` + 1) times the sum of squares
/// about the mean.
const ESTIMATE_PIXELS: usize = 256;

/// `out = (x − mean)·γ/√(var + eps) + β`, mean and biased variance per sample and group, by sums
/// about the mean of the first 256 pixels.
pub fn group_norm_forward(
    isa: Isa,
    shape: &BatchShape,
    of: &GroupNormForward<'_>,
    out: &mut [f32],
    saved: GroupNormSaved<'_>,
    scratch: &mut [f32],
) {
    check_groups(shape, of.groups);
    if shape.is_empty() {
        return;
    }
    let (c, each) = (shape.c, shape.c / of.groups);
    let (values, rest) = split_f64(scratch, 2 * c);
    let (mean, rest) = rest.split_at_mut(c);
    let scale = &mut rest[..c];
    let share = 1.0 / (shape.pixels() * each) as f64;
    let images =
        of.x.chunks_exact(shape.pixels() * c).zip(out.chunks_exact_mut(shape.pixels() * c));
    let saved =
        saved.mean.chunks_exact_mut(of.groups).zip(saved.invstd.chunks_exact_mut(of.groups));
    for ((x, out), (saved_mean, saved_invstd)) in images.zip(saved) {
        mean.fill(0.0);
        values.fill(0.0);
        let (sums, squares) = values.split_at_mut(c);
        let pixels = ESTIMATE_PIXELS.min(shape.pixels());
        channels::add_shifted(isa, &x[..pixels * c], mean, sums, squares);
        for (mean, sums) in mean.chunks_exact_mut(each).zip(sums.chunks_exact(each)) {
            mean.fill((sums.iter().sum::<f64>() / (pixels * each) as f64) as f32);
        }
        values.fill(0.0);
        let (sums, squares) = values.split_at_mut(c);
        channels::add_shifted(isa, x, mean, sums, squares);
        for (g, (saved_mean, saved_invstd)) in saved_mean.iter_mut().zip(saved_invstd).enumerate() {
            let here = g * each..(g + 1) * each;
            let off = sums[here.clone()].iter().sum::<f64>() * share;
            let var = squares[here.clone()].iter().sum::<f64>() * share - off * off;
            // Rounding may leave a constant group slightly below 0; NaN stays.
            let var = if var < 0.0 { 0.0 } else { var };
            *saved_mean = (f64::from(mean[g * each]) + off) as f32;
            *saved_invstd = (1.0 / (var + f64::from(of.eps)).sqrt()) as f32;
            mean[here.clone()].fill(*saved_mean);
            for (scale, gamma) in scale[here.clone()].iter_mut().zip(&of.gamma[here]) {
                *scale = gamma * *saved_invstd;
            }
        }
        let affine = Affine { mean, scale, beta: of.beta, floor: f32::NEG_INFINITY };
        for_channels(isa, c, &mut NormForward { affine, x, out });
    }
}

/// Gradients of [`group_norm_forward`]: with `x̂ = (x − mean)·invstd` and m elements in a group,
/// `dβ = Σ dout`, `dγ = Σ dout·x̂` (sums over N, H, W), and per sample and group
/// `dx = invstd·(γ·dout − (Σ γ·dout + x̂·Σ γ·dout·x̂)/m)`.
pub fn group_norm_backward(
    isa: Isa,
    shape: &BatchShape,
    of: &GroupNormBackward<'_>,
    to: GroupNormGrads<'_>,
    scratch: &mut [f32],
) {
    check_groups(shape, of.groups);
    if shape.is_empty() {
        return;
    }
    let image = shape.pixels() * shape.c;
    let (values, rest) = split_f64(scratch, 4 * shape.c);
    values.fill(0.0);
    let (sums, totals) = values.split_at_mut(2 * shape.c);
    for (n, (x, dout)) in of.x.chunks_exact(image).zip(of.dout.chunks_exact(image)).enumerate() {
        let gradient = sample_gradient(isa, shape, of, n, sums, rest);
        for c in 0..shape.c {
            let invstd = of.invstd[n * of.groups + c / (shape.c / of.groups)];
            totals[c] += sums[c];
            totals[shape.c + c] += sums[shape.c + c] * f64::from(invstd);
        }
        let Some(dx) = to.dx.values.get_mut(n * image..(n + 1) * image) else { continue };
        if to.dx.accumulate {
            for_channels(isa, shape.c, &mut NormBackward::<true> { gradient, x, dout, dx });
        } else {
            for_channels(isa, shape.c, &mut NormBackward::<false> { gradient, x, dout, dx });
        }
    }
    let (total_sums, total_dots) = totals.split_at(shape.c);
    to.dbeta.iter_mut().zip(total_sums).for_each(|(to, &v)| *to += v as f32);
    to.dgamma.iter_mut().zip(total_dots).for_each(|(to, &v)| *to += v as f32);
}

/// Sums of sample `n` (per channel, of `dout` and `dout·(x − mean)`), and from them the
/// coefficients of its input gradient, in `room`.
fn sample_gradient<'a>(
    isa: Isa,
    shape: &BatchShape,
    of: &GroupNormBackward<'_>,
    n: usize,
    sums: &mut [f64],
    room: &'a mut [f32],
) -> NormGradient<'a> {
    let (c, each, image) = (shape.c, shape.c / of.groups, shape.pixels() * shape.c);
    let (mean, room) = room.split_at_mut(c);
    let (scale, room) = room.split_at_mut(c);
    let (offset, room) = room.split_at_mut(c);
    let (slope, room) = room.split_at_mut(c);
    let beta = &mut room[..c];
    // Without an activation the value of beta does not matter to the gradient.
    beta.fill(0.0);
    for (g, mean) in mean.chunks_exact_mut(each).enumerate() {
        mean.fill(of.mean[n * of.groups + g]);
    }
    let affine = Affine { mean, scale: of.gamma, beta, floor: f32::NEG_INFINITY };
    let (x, dout) = (&of.x[n * image..(n + 1) * image], &of.dout[n * image..(n + 1) * image]);
    sums.fill(0.0);
    let (sums, dots) = sums.split_at_mut(c);
    for_channels(isa, c, &mut Reduce::<false> { affine, values: x, dout, sums, dots });
    let share = 1.0 / (shape.pixels() * each) as f64;
    for g in 0..of.groups {
        let here = g * each..(g + 1) * each;
        let invstd = f64::from(of.invstd[n * of.groups + g]);
        let weighted = |v: &[f64]| -> f64 {
            let gamma = of.gamma[here.clone()].iter().map(|&g| f64::from(g));
            v[here.clone()].iter().zip(gamma).map(|(v, g)| v * g).sum()
        };
        offset[here.clone()].fill((invstd * weighted(sums) * share) as f32);
        slope[here.clone()].fill((invstd.powi(3) * weighted(dots) * share) as f32);
        for (scale, &gamma) in scale[here.clone()].iter_mut().zip(&of.gamma[here.clone()]) {
            *scale = (f64::from(gamma) * invstd) as f32;
        }
    }
    NormGradient { affine: Affine { mean, scale, beta, floor: f32::NEG_INFINITY }, offset, slope }
}

#[track_caller]
fn check_groups(shape: &BatchShape, groups: usize) {
    assert!(
        groups > 0 && shape.c.is_multiple_of(groups),
        "group_norm: {groups} groups do not divide the channels of {shape:?}"
    );
}

//! Batch norm over `[N][H][W][C]`, as PyTorch's `batch_norm`: normalised with the biased variance,
//! running variance unbiased.
//!
//! After the statistics ([`batch_stats`]), the forward pass is one sweep over the raw input
//! (normalise, ReLU, pool); the backward pass two (sums, then gradient), which read the raw input
//! again instead of a stored normalised one.

use std::ops::Range;

pub use super::channels::RUN;
pub use super::image::BLOCKED;
use super::image::{
    Affine, BackwardPooled, ForwardPooled, NormBackward, NormForward, NormGradient, Reduce,
    ReducePooled,
};
pub use super::moments::ChannelMoments;
pub use super::moments::{StatsSums, stats_scratch_len};
use crate::lanes::for_channels;
use crate::parts::{self, PartScratch};
use crate::{BatchShape, GradOut, Isa, split_f64};

/// Activation after the normalisation in the fused kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// Nothing.
    None,
    /// `max(z, 0)`.
    Relu,
}

/// Destination of per-channel statistics, of a batch or running.
#[derive(Debug)]
pub struct BatchStats<'a> {
    /// Mean `[C]`.
    pub mean: &'a mut [f32],
    /// Variance `[C]`: biased of a batch, unbiased as running statistic.
    pub var: &'a mut [f32],
}

/// Inputs of [`batch_norm_act_forward`].
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
    /// Activation.
    pub act: Activation,
    /// Whether 2 × 2 max pooling with stride 2 follows; an odd last row or column is dropped.
    pub pool: bool,
}

/// Inputs of [`batch_norm_gradient_sums`] and [`batch_norm_input_gradient`].
#[derive(Clone, Copy, Debug)]
pub struct BatchNormBackward<'a> {
    /// Inputs of the forward pass, with the *batch* statistics.
    pub forward: BatchNormForward<'a>,
    /// Gradient of the output, pooled size if pooled.
    pub dout: &'a [f32],
    /// The codes of the forward pass; read only if pooled, else empty.
    pub codes: &'a [u8],
    /// The pooled output of the forward pass, or empty. The sums read it instead of the raw input,
    /// which is four times as large, if it is present, every |γ| is above 1e-30 and every |β| is
    /// at most 16·|γ|. The raw input and the codes are valid in any case.
    pub out: &'a [f32],
}

/// Memory for the [`ChannelMoments`] of all parts of a kernel, in f32; included in [`scratch_len`].
pub const fn moments_scratch_len(c: usize) -> usize {
    parts::MOST * 4 * c + 2
}

/// Scratch of this module's functions, in f32, for `c` channels.
pub const fn scratch_len(c: usize) -> usize {
    16 * c + 64 + moments_scratch_len(c)
}

/// Shape of the output of the fused kernel.
pub const fn output(shape: &BatchShape, pool: bool) -> BatchShape {
    if pool { BatchShape { h: shape.h / 2, w: shape.w / 2, ..*shape } } else { *shape }
}

/// `running = (1 − momentum)·running + momentum·batch`, the variance unbiased by
/// `count/(count − 1)`; `count` = N·H·W. A count of 1 has no unbiased variance: the plan refuses
/// such a training batch, as PyTorch does. The caller increments the counter of batches
/// (PyTorch's `num_batches_tracked`).
pub fn update_running(
    momentum: f32,
    count: usize,
    mean: &[f32],
    var: &[f32],
    running: BatchStats<'_>,
) {
    let unbiased = (count as f64 / (count as f64 - 1.0)) as f32;
    for (r, &m) in running.mean.iter_mut().zip(mean) {
        *r = (1.0 - momentum) * *r + momentum * m;
    }
    for (r, &v) in running.var.iter_mut().zip(var) {
        *r = (1.0 - momentum) * *r + momentum * (v * unbiased);
    }
}

/// Mean and biased variance of each channel over N, H and W. Sums of a part of the batch are taken
/// of the distance from the mean of its first image, so that a mean far from 0 cancels harmlessly,
/// and in f64 across blocks of [`RUN`] pixels.
pub fn batch_stats(
    isa: Isa,
    shape: &BatchShape,
    x: &[f32],
    to: BatchStats<'_>,
    scratch: &mut [f32],
) {
    let (c, image) = (shape.c, shape.pixels() * shape.c);
    let images = parts::touched(shape.batch, image);
    let (moments, own) = split_f64(scratch, 2 * c * parts::MOST);
    moments.fill(f64::NAN);
    let each = x.chunks((images * image).max(1)).zip(moments.chunks_exact_mut((2 * c).max(1)));
    let scratch = PartScratch { own, of_part: stats_scratch_len(c) };
    parts::each(each, scratch, |_, (x, to), scratch| {
        let mut sums = StatsSums::new(scratch, *shape);
        sums.add_each(isa, x);
        sums.finish(ChannelMoments(to));
    });
    combine(shape.batch, images, moments, to);
}

/// Statistics of a batch of `batch` images from the moments of its parts, of `images` images each
/// but the last (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
/// Sample Variances", 1979). NaN without images.
pub fn combine(batch: usize, images: usize, moments: &[f64], to: BatchStats<'_>) {
    let c = to.mean.len();
    let parts = moments.chunks_exact((2 * c).max(1)).zip((0..batch).step_by(images));
    let share = |first: usize| images.min(batch - first) as f64 / batch as f64;
    let sum = |of: &dyn Fn(&[f64]) -> f64| -> f64 {
        parts.clone().map(|(part, first)| share(first) * of(part)).sum()
    };
    if batch == 0 {
        to.mean.fill(f32::NAN);
        to.var.fill(f32::NAN);
        return;
    }
    for k in 0..c {
        let mean = sum(&|part| part[k]);
        let var = sum(&|part| part[c + k] + (part[k] - mean) * (part[k] - mean));
        (to.mean[k], to.var[k]) = (mean as f32, var as f32);
    }
}

/// `out = pool(act((x − mean)·γ/√(var + eps) + β))` in one pass. `codes`, needed for the backward
/// pass of a pooled output and otherwise empty, gets one byte per output: which of the window's
/// four inputs (row-major, first of equals, last NaN) was the maximum, or [`BLOCKED`].
pub fn batch_norm_act_forward(
    isa: Isa,
    shape: &BatchShape,
    of: &BatchNormForward<'_>,
    out: &mut [f32],
    codes: &mut [u8],
    scratch: &mut [f32],
) {
    let out_shape = output(shape, of.pool);
    if out_shape.is_empty() {
        return;
    }
    let scale = &mut scratch[..shape.c];
    of.scales(scale);
    let affine = of.affine(scale);
    let (image, out_image) = (shape.pixels() * shape.c, out_shape.pixels() * shape.c);
    let images = parts::touched(shape.batch, image);
    let each = of.x.chunks(images * image).zip(out.chunks_mut(images * out_image));
    let no_codes = std::iter::repeat_with(<&mut [u8]>::default);
    let codes = codes.chunks_mut(images * out_image).chain(no_codes);
    let (c, shape, pool) = (shape.c, *shape, of.pool);
    parts::each_backwards(of.x.len(), each.zip(codes), |((x, out), codes)| {
        let images = x.chunks_exact(image).zip(out.chunks_exact_mut(out_image));
        if !codes.is_empty() {
            for ((x, out), codes) in images.zip(codes.chunks_exact_mut(out_image)) {
                let mut kernel = ForwardPooled::<true> { affine, shape, x, out, codes };
                for_channels(isa, c, &mut kernel);
            }
            return;
        }
        for (x, out) in images {
            if pool {
                let mut kernel = ForwardPooled::<false> { affine, shape, x, out, codes: &mut [] };
                for_channels(isa, c, &mut kernel);
            } else {
                for_channels(isa, c, &mut NormForward { affine, x, out });
            }
        }
    });
}

/// Gradients of [`batch_norm_act_forward`] in training, except of the raw input: with `dz` the
/// gradient routed back through pool and activation, `x̂ = (x − mean)/√(var + eps)` and M = N·H·W,
/// adds `dγ = Σ dz·x̂` and `dβ = Σ dz` to `gradients`, which has dγ first, then dβ.
/// Writes the coefficients of [`batch_norm_input_gradient`], `[3][C]`.
pub fn batch_norm_gradient_sums(
    isa: Isa,
    shape: &BatchShape,
    of: &BatchNormBackward<'_>,
    gradients: [&mut [f32]; 2],
    coefficients: &mut [f32],
    scratch: &mut [f32],
) {
    if shape.is_empty() {
        return;
    }
    let (c, images) = (shape.c, gradient_part(shape));
    let ranges = (0..shape.batch).step_by(images);
    let (totals, _) = split_f64(scratch, 2 * c * ranges.len());
    totals.fill(0.0);
    let (scale, by_output) = (&mut coefficients[..c], of.inputs_follow_from_outputs());
    of.forward.scales(scale);
    let (scale, parts) = (&*scale, ranges.zip(totals.chunks_exact_mut(2 * c)));
    parts::each_backwards(shape.len(), parts, |(first, totals)| {
        let of = of.for_images(shape, first..(first + images).min(shape.batch));
        if by_output {
            add_sums_by_output(isa, &of, scale, totals);
        } else {
            add_gradient_sums(isa, shape, &of, scale, totals);
        }
    });
    let sums = GradientTotals { parts: totals, scaled: by_output };
    finish_gradient_sums(shape, &of.forward, sums, gradients, coefficients);
}

/// Number of images of a part of the batch: [`batch_norm_gradient_sums`] adds the terms of a part
/// in order.
pub fn gradient_part(shape: &BatchShape) -> usize {
    parts::touched(shape.batch, shape.pixels() * shape.c)
}

/// Adds the sums of `dz` and of `dz·(x − mean)` over these images, in order, to `totals` `[2][C]`.
/// `scale` is that of [`BatchNormForward::scales`].
pub fn add_gradient_sums(
    isa: Isa,
    shape: &BatchShape,
    of: &BatchNormBackward<'_>,
    scale: &[f32],
    totals: &mut [f64],
) {
    let (c, affine) = (shape.c, of.forward.affine(scale));
    let (sums, dots) = totals.split_at_mut(c);
    for Image { x, dout, codes } in of.images(shape) {
        let (sums, dots) = (&mut *sums, &mut *dots);
        if of.forward.pool {
            let (mean, shape) = (affine.mean, *shape);
            let mut kernel = ReducePooled { mean, shape, x, dout, codes, sums, dots };
            for_channels(isa, c, &mut kernel);
        } else {
            for_channels(isa, c, &mut Reduce::<false> { affine, values: x, dout, sums, dots });
        }
    }
}

/// Sums of the parts of a batch, from which the gradients follow.
#[derive(Debug)]
pub struct GradientTotals<'a> {
    /// `[parts][2][C]`: sums of `dz`, and of `dz·(x − mean)`.
    pub parts: &'a mut [f64],
    /// Whether the latter are `dz·(x − mean)·scale`.
    pub scaled: bool,
}

/// As [`add_gradient_sums`], from the outputs of all images; the second sums are scaled.
fn add_sums_by_output(isa: Isa, of: &BatchNormBackward<'_>, scale: &[f32], totals: &mut [f64]) {
    let (c, affine) = (scale.len(), of.forward.affine(scale));
    let (sums, dots) = totals.split_at_mut(c);
    let (values, dout) = (of.out, of.dout);
    for_channels(isa, c, &mut Reduce::<true> { affine, values, dout, sums, dots });
}

/// Adds to the gradients of γ and β, and writes the coefficients of
/// [`batch_norm_input_gradient`], `[3][C]`, from the sums of the batch's parts.
pub fn finish_gradient_sums(
    shape: &BatchShape,
    of: &BatchNormForward<'_>,
    totals: GradientTotals<'_>,
    [dgamma, dbeta]: [&mut [f32]; 2],
    coefficients: &mut [f32],
) {
    let c = shape.c;
    let (total, others) = totals.parts.split_at_mut(2 * c);
    for part in others.chunks_exact(2 * c) {
        total.iter_mut().zip(part).for_each(|(total, part)| *total += part);
    }
    let (sums, dots) = total.split_at_mut(c);
    let count = (shape.batch * shape.pixels()) as f64;
    let (scale, rest) = coefficients.split_at_mut(c);
    let (offset, slope) = rest.split_at_mut(c);
    of.scales(scale);
    if totals.scaled {
        dots.iter_mut().zip(&*scale).for_each(|(dot, &scale)| *dot /= f64::from(scale));
    }
    for k in 0..c {
        let var = f64::from(of.var[k]) + f64::from(of.eps);
        let (dot, scale) = (dots[k] / var.sqrt(), f64::from(scale[k]));
        dbeta[k] += sums[k] as f32;
        dgamma[k] += dot as f32;
        offset[k] = (scale * sums[k] / count) as f32;
        slope[k] = (scale * dot / var.sqrt() / count) as f32;
    }
}

/// Gradient of the raw input of [`batch_norm_act_forward`] in training, from the coefficients of
/// [`batch_norm_gradient_sums`]: `dx = γ/√(var + eps)·(dz − dβ/M − x̂·dγ/M)`. Variance, γ and `out`
/// of the inputs are not read. The images may be a part of the batch.
pub fn batch_norm_input_gradient(
    isa: Isa,
    shape: &BatchShape,
    of: &BatchNormBackward<'_>,
    coefficients: &[f32],
    dx: GradOut<'_>,
) {
    if shape.is_empty() {
        return;
    }
    let [scale, offset, slope] = std::array::from_fn(|i| &coefficients[i * shape.c..][..shape.c]);
    let gradient = NormGradient { affine: of.forward.affine(scale), offset, slope };
    input_gradient(isa, shape, of, gradient, dx);
}

/// Gradient of the raw input.
fn input_gradient(
    isa: Isa,
    shape: &BatchShape,
    of: &BatchNormBackward<'_>,
    gradient: NormGradient<'_>,
    to: GradOut<'_>,
) {
    let (c, shape, image) = (shape.c, *shape, shape.pixels() * shape.c);
    let batch = of.forward.x.len() / image;
    let images = parts::touched(batch, image);
    let each = to.values.chunks_mut(images * image).enumerate();
    parts::each_alone(each, |(part, dx)| {
        let of = of.for_images(&shape, part * images..((part + 1) * images).min(batch));
        for (dx, Image { x, dout, codes }) in dx.chunks_exact_mut(image).zip(of.images(&shape)) {
            match (of.forward.pool, to.accumulate) {
                (false, false) => {
                    for_channels(isa, c, &mut NormBackward::<false> { gradient, x, dout, dx });
                }
                (false, true) => {
                    for_channels(isa, c, &mut NormBackward::<true> { gradient, x, dout, dx });
                }
                (true, false) => {
                    let mut k = BackwardPooled::<false> { gradient, shape, x, dout, codes, dx };
                    for_channels(isa, c, &mut k);
                }
                (true, true) => {
                    let mut k = BackwardPooled::<true> { gradient, shape, x, dout, codes, dx };
                    for_channels(isa, c, &mut k);
                }
            }
        }
    });
}

/// One image of the backward pass.
struct Image<'a> {
    x: &'a [f32],
    dout: &'a [f32],
    codes: &'a [u8],
}

impl<'a> BatchNormForward<'a> {
    /// `γ/√(var + eps)`.
    pub fn scales(&self, scale: &mut [f32]) {
        for ((scale, &gamma), &var) in scale.iter_mut().zip(self.gamma).zip(self.var) {
            *scale = (f64::from(gamma) / (f64::from(var) + f64::from(self.eps)).sqrt()) as f32;
        }
    }

    fn affine(&self, scale: &'a [f32]) -> Affine<'a> {
        let floor = if self.act == Activation::Relu { 0.0 } else { f32::NEG_INFINITY };
        Affine { mean: self.mean, scale, beta: self.beta, floor }
    }
}

impl<'a> BatchNormBackward<'a> {
    /// Whether x̂ at the maxima can be computed from the pooled output z, as `(z − β)/γ`.
    /// The error is the rounding of z, 2^-24·|γ·x̂ + β|, over |γ|: with |β| at most 16·|γ| no more
    /// than 2^-24·(|x̂| + 16), where x̂ has a variance of 1.
    fn inputs_follow_from_outputs(&self) -> bool {
        let BatchNormForward { gamma, beta, pool, .. } = self.forward;
        let mut each = gamma.iter().zip(beta);
        pool && !self.out.is_empty()
            && each.all(|(g, b)| g.abs() > 1e-30 && b.abs() <= 16.0 * g.abs())
    }

    /// The inputs of some of the images.
    fn for_images(mut self, shape: &BatchShape, images: Range<usize>) -> Self {
        let [raw, out] = [*shape, output(shape, self.forward.pool)].map(|of| of.pixels() * of.c);
        let range = |len: usize| images.start * len..images.end * len;
        self.forward.x = &self.forward.x[range(raw)];
        self.dout = &self.dout[range(out)];
        if self.forward.pool {
            self.codes = &self.codes[range(out)];
        }
        if !self.out.is_empty() {
            self.out = &self.out[range(out)];
        }
        self
    }

    fn images(&self, shape: &BatchShape) -> impl Iterator<Item = Image<'a>> + use<'a> {
        let of = *self;
        let image = shape.pixels() * shape.c;
        let out_image = output(shape, of.forward.pool).pixels() * shape.c;
        of.forward.x.chunks_exact(image).enumerate().map(move |(n, x)| {
            let here = n * out_image..(n + 1) * out_image;
            let codes = if of.forward.pool { &of.codes[here.clone()] } else { &[] };
            Image { x, dout: &of.dout[here], codes }
        })
    }
}

//! Layer norm and RMS norm over the channels of each pixel of `[N][H][W][C]`, which are rows of C
//! elements: PyTorch's `layer_norm` and `rms_norm` over the last axis.
//!
//! All loops go along the channels in 16 lanes, so that every instruction set adds in the same
//! order. Sums of a row are f32 in each lane over up to 64 steps, and f64 beyond. The forward pass
//! reads a row three times, twice for an RMS norm. The backward pass reads a row of x and of dout
//! three times, once if dx is absent. After the first time a row is in the nearest cache.

use crate::macros::isa_kernels;
use crate::{BatchShape, GradOut, Isa, split_f64};

/// Inputs of [`layer_norm_forward`].
#[derive(Clone, Copy, Debug)]
pub struct LayerNormForward<'a> {
    /// Input `[N][H][W][C]`.
    pub x: &'a [f32],
    /// Scale γ `[C]`.
    pub gamma: &'a [f32],
    /// Shift β `[C]`; absent for an RMS norm.
    pub beta: &'a [f32],
    /// Added to the variance, or to the mean square of an RMS norm.
    pub eps: f32,
}

/// Statistics that the backward pass needs, written by the forward pass.
#[derive(Debug)]
pub struct LayerNormSaved<'a> {
    /// Mean `[N][H][W]`; absent for an RMS norm.
    pub mean: &'a mut [f32],
    /// `1/√(var + eps)`, or `1/√(mean square + eps)` of an RMS norm, `[N][H][W]`.
    pub invstd: &'a mut [f32],
}

/// Inputs of [`layer_norm_backward`].
#[derive(Clone, Copy, Debug)]
pub struct LayerNormBackward<'a> {
    /// Input of the forward pass.
    pub x: &'a [f32],
    /// Scale γ `[C]`.
    pub gamma: &'a [f32],
    /// Saved mean `[N][H][W]`; absent for an RMS norm.
    pub mean: &'a [f32],
    /// Saved inverse deviation `[N][H][W]`.
    pub invstd: &'a [f32],
    /// Gradient of the output.
    pub dout: &'a [f32],
}

/// Destinations of the gradients of a layer norm.
#[derive(Debug)]
pub struct LayerNormGrads<'a> {
    /// Gradient with respect to the input, optional.
    pub dx: GradOut<'a>,
    /// Gradient with respect to γ; added to.
    pub dgamma: &'a mut [f32],
    /// Gradient with respect to β; added to, absent for an RMS norm.
    pub dbeta: &'a mut [f32],
}

/// Scratch of the backward pass in f32, for `c` channels.
pub const fn scratch_len(c: usize) -> usize {
    6 * c + 8
}

const LANES: usize = 16;
/// Elements that are summed in f32, in 16 sums.
const BLOCK: usize = 64 * LANES;
/// Number of rows whose terms of a parameter's gradient are summed in f32.
const RUN: usize = 64;

/// Two sums over a row.
type Sums = [f64; 2];

/// Sum of the lanes, as a tree.
#[inline(always)]
fn tree(part: [f32; LANES]) -> f64 {
    let mut wide = part.map(f64::from);
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            wide[l] += wide[l + half];
        }
    }
    wide[0]
}

/// Two sums over the elements of three rows of one length.
#[inline(always)]
fn row_sums([a, b, c]: [&[f32]; 3], f: impl Fn(f32, f32, f32) -> [f32; 2]) -> Sums {
    let mut sums = [0.0; 2];
    for ((a, b), c) in a.chunks(BLOCK).zip(b.chunks(BLOCK)).zip(c.chunks(BLOCK)) {
        let (mut first, mut second) = ([0f32; LANES], [0f32; LANES]);
        let whole = a.len() - a.len() % LANES;
        for i in (0..whole).step_by(LANES) {
            let (a, b, c) = (&a[i..i + LANES], &b[i..i + LANES], &c[i..i + LANES]);
            for l in 0..LANES {
                let [p, q] = f(a[l], b[l], c[l]);
                first[l] += p;
                second[l] += q;
            }
        }
        let rest = a[whole..].iter().zip(&b[whole..]).zip(&c[whole..]);
        for (l, ((a, b), c)) in rest.enumerate() {
            let [p, q] = f(*a, *b, *c);
            first[l] += p;
            second[l] += q;
        }
        sums[0] += tree(first);
        sums[1] += tree(second);
    }
    sums
}

/// Mean and inverse deviation of a row; the mean of an RMS norm is 0.
#[inline(always)]
fn moments<const CENTRED: bool>(x: &[f32], eps: f32) -> [f32; 2] {
    let share = 1.0 / x.len() as f64;
    let centre =
        if CENTRED { (row_sums([x; 3], |x, _, _| [x, 0.0])[0] * share) as f32 } else { 0.0 };
    let [sum, squares] = row_sums([x; 3], |x, _, _| [x - centre, (x - centre) * (x - centre)]);
    // Distance of the mean from its estimate.
    let off = if CENTRED { sum * share } else { 0.0 };
    let var = squares * share - off * off;
    // Rounding may leave a constant row slightly below 0; NaN stays.
    let var = if var < 0.0 { 0.0 } else { var };
    [(f64::from(centre) + off) as f32, (1.0 / (var + f64::from(eps)).sqrt()) as f32]
}

#[inline(always)]
fn forward<const CENTRED: bool>(
    of: &LayerNormForward<'_>,
    out: &mut [f32],
    saved: LayerNormSaved<'_>,
) {
    let c = of.gamma.len();
    let rows = of.x.chunks_exact(c).zip(out.chunks_exact_mut(c)).zip(saved.invstd);
    for (row, ((x, out), invstd)) in rows.enumerate() {
        let [mean, inverse] = moments::<CENTRED>(x, of.eps);
        *invstd = inverse;
        if CENTRED {
            saved.mean[row] = mean;
            for (((out, x), gamma), beta) in out.iter_mut().zip(x).zip(of.gamma).zip(of.beta) {
                *out = (x - mean) * inverse * gamma + beta;
            }
        } else {
            for ((out, x), gamma) in out.iter_mut().zip(x).zip(of.gamma) {
                *out = x * inverse * gamma;
            }
        }
    }
}

/// Coefficients of a row's gradient: with `x̂ = (x − mean)·invstd`,
/// `dx = invstd·(γ·dout − (offset + x̂·slope))`.
#[derive(Clone, Copy)]
struct RowGradient {
    mean: f32,
    invstd: f32,
    offset: f32,
    slope: f32,
}

/// Adds a row's terms to the gradients of γ and β.
#[inline(always)]
fn add_terms(of: RowGradient, [x, dout]: [&[f32]; 2], [dgamma, dbeta]: [&mut [f32]; 2]) {
    let to = dgamma.iter_mut().zip(dbeta);
    for ((dgamma, dbeta), (x, dout)) in to.zip(x.iter().zip(dout)) {
        *dgamma += dout * ((x - of.mean) * of.invstd);
        *dbeta += dout;
    }
}

/// Writes a row's gradient, or adds it.
#[inline(always)]
fn row_gradient(of: RowGradient, [x, gamma, dout]: [&[f32]; 3], dx: GradOut<'_>) {
    let at = |x: f32, gamma: f32, dout: f32| {
        let hat = (x - of.mean) * of.invstd;
        of.invstd * (gamma * dout - (of.offset + hat * of.slope))
    };
    let terms = x.iter().zip(gamma).zip(dout);
    if dx.accumulate {
        for (dx, ((x, gamma), dout)) in dx.values.iter_mut().zip(terms) {
            *dx += at(*x, *gamma, *dout);
        }
    } else {
        for (dx, ((x, gamma), dout)) in dx.values.iter_mut().zip(terms) {
            *dx = at(*x, *gamma, *dout);
        }
    }
}

#[inline(always)]
fn backward<const CENTRED: bool>(
    of: &LayerNormBackward<'_>,
    to: LayerNormGrads<'_>,
    scratch: &mut [f32],
) {
    let c = of.gamma.len();
    let share = 1.0 / c as f64;
    let (totals, part) = split_f64(scratch, 2 * c);
    totals.fill(0.0);
    let part = &mut part[..2 * c];
    for run in (0..of.invstd.len()).step_by(RUN) {
        part.fill(0.0);
        let (dgamma, dbeta) = part.split_at_mut(c);
        for row in run..of.invstd.len().min(run + RUN) {
            let here = row * c..(row + 1) * c;
            let (x, dout) = (&of.x[here.clone()], &of.dout[here.clone()]);
            let (mean, invstd) = (if CENTRED { of.mean[row] } else { 0.0 }, of.invstd[row]);
            let mut gradient = RowGradient { mean, invstd, offset: 0.0, slope: 0.0 };
            add_terms(gradient, [x, dout], [&mut *dgamma, &mut *dbeta]);
            let Some(dx) = to.dx.values.get_mut(here) else { continue };
            let [sum, dot] = row_sums([x, of.gamma, dout], |x, gamma, dout| {
                let scaled = gamma * dout;
                [scaled, scaled * ((x - mean) * invstd)]
            });
            gradient.offset = if CENTRED { (sum * share) as f32 } else { 0.0 };
            gradient.slope = (dot * share) as f32;
            let dx = GradOut { values: dx, accumulate: to.dx.accumulate };
            row_gradient(gradient, [x, of.gamma, dout], dx);
        }
        totals.iter_mut().zip(&*part).for_each(|(total, part)| *total += f64::from(*part));
    }
    let (dgamma, dbeta) = totals.split_at(c);
    to.dgamma.iter_mut().zip(dgamma).for_each(|(to, total)| *to += *total as f32);
    to.dbeta.iter_mut().zip(dbeta).for_each(|(to, total)| *to += *total as f32);
}

isa_kernels! {
    /// `out = (x − mean)·γ/√(var + eps) + β`, mean and biased variance over the channels of each
    /// pixel; without β the RMS norm, `out = x·γ/√(mean of x² + eps)`.
    pub fn layer_norm_forward(
        isa: Isa,
        shape: &BatchShape,
        of: &LayerNormForward<'_>,
        out: &mut [f32],
        saved: LayerNormSaved<'_>,
    ) {
        if shape.is_empty() {
            return;
        }
        if of.beta.is_empty() {
            forward::<false>(of, out, saved);
        } else {
            forward::<true>(of, out, saved);
        }
    }

    /// Gradients of [`layer_norm_forward`]: with `x̂ = (x − mean)·invstd`, `dβ = Σ dout` and
    /// `dγ = Σ dout·x̂` over the pixels, and for each pixel with sums over its channels
    /// `dx = invstd·(γ·dout − (Σ γ·dout + x̂·Σ γ·dout·x̂)/C)`, without the first sum for an RMS
    /// norm.
    pub fn layer_norm_backward(
        isa: Isa,
        shape: &BatchShape,
        of: &LayerNormBackward<'_>,
        to: LayerNormGrads<'_>,
        scratch: &mut [f32],
    ) {
        if shape.is_empty() {
            return;
        }
        if of.mean.is_empty() {
            backward::<false>(of, to, scratch);
        } else {
            backward::<true>(of, to, scratch);
        }
    }
}

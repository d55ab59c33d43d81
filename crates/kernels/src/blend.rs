//! Mixing a module into its host (`docs/growth.md`, Alpha), and the `norm` blueprint's own mix.
//!
//! Letters: `h` host, `m` module, `x` the module's input, `g` gate (one value per sample),
//! `a` alpha.

use super::elementwise::{emit, emit2};
use super::macros::isa_kernels;
use super::{GradOut, Isa, math};

/// Formula that mixes a module's output into its host (`docs/growth.md`, Alpha).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlendMode {
    /// `h + a(m − h)`.
    Add,
    /// `h·(1 + a·tanh(m − x))`.
    Multiply,
    /// `h + a·g·(m − h)`, g one scalar per sample.
    Gate,
}

/// Inputs of a blend. All but the gate have the same length.
#[derive(Clone, Copy, Debug)]
pub struct BlendInputs<'a> {
    /// Host value.
    pub h: &'a [f32],
    /// Module value.
    pub m: &'a [f32],
    /// Module input; read by [`BlendMode::Multiply`] only.
    pub x: &'a [f32],
    /// One value per sample; its length is the number of samples. Read by [`BlendMode::Gate`] only,
    /// else empty.
    pub gate: &'a [f32],
    /// Alpha.
    pub alpha: f32,
}

/// Destinations of the gradients of a blend.
#[derive(Debug, Default)]
pub struct BlendGrads<'a> {
    /// Gradient with respect to the host.
    pub h: GradOut<'a>,
    /// Gradient with respect to the module.
    pub m: GradOut<'a>,
    /// Gradient with respect to the module's input; written by [`BlendMode::Multiply`] only
    /// (elsewhere it is zero, and an overwritten destination is filled with zeros).
    pub x: GradOut<'a>,
    /// Gradient with respect to the gate, one value per sample; [`BlendMode::Gate`] only.
    pub gate: GradOut<'a>,
}

#[inline(always)]
fn emit3(out: GradOut<'_>, [a, b, c]: [&[f32]; 3], f: impl Fn(f32, f32, f32) -> f32) {
    for (((d, &a), &b), &c) in out.values.iter_mut().zip(a).zip(b).zip(c) {
        *d = if out.accumulate { *d + f(a, b, c) } else { f(a, b, c) };
    }
}

/// `Σ f(a, b, c)`: 16 f32 partial sums over blocks of 1024 elements, blocks added in f64.
#[inline(always)]
fn sum3([a, b, c]: [&[f32]; 3], f: impl Fn(f32, f32, f32) -> f32) -> f64 {
    const LANES: usize = 16;
    const BLOCK: usize = 1024;
    let mut total = 0f64;
    for ((a, b), c) in a.chunks(BLOCK).zip(b.chunks(BLOCK)).zip(c.chunks(BLOCK)) {
        let mut part = [0f32; LANES];
        let whole = a.len() - a.len() % LANES;
        for i in (0..whole).step_by(LANES) {
            let (a, b, c) = (&a[i..i + LANES], &b[i..i + LANES], &c[i..i + LANES]);
            for l in 0..LANES {
                part[l] += f(a[l], b[l], c[l]);
            }
        }
        for i in whole..a.len() {
            part[i - whole] += f(a[i], b[i], c[i]);
        }
        total += part.iter().map(|&p| f64::from(p)).sum::<f64>();
    }
    total
}

isa_kernels! {
    /// Blends host and module into `out`, by `mode`: `h + a(m − h)`, `h·(1 + a·tanh(m − x))` or `h
    /// + a·g·(m − h)`. With an alpha of zero the result is `h`, bit for bit, for any value of the
    /// module and the gate: the formulas alone would turn −0 into 0, and pass on a NaN or an
    /// infinity.
    pub fn forward(isa: Isa, mode: BlendMode, of: &BlendInputs<'_>, out: &mut [f32]) {
        let BlendInputs { h, m, x, gate, alpha: a } = *of;
        match mode {
            _ if a == 0.0 => out.copy_from_slice(h),
            BlendMode::Add => emit2(GradOut::overwrite(out), h, m, |h, m| h + a * (m - h)),
            BlendMode::Multiply => {
                let out = GradOut::overwrite(out);
                emit3(out, [h, m, x], |h, m, x| h * (1.0 + a * math::tanh(m - x)));
            }
            BlendMode::Gate if h.is_empty() => {}
            BlendMode::Gate => {
                let each = h.len() / gate.len();
                let samples = out.chunks_exact_mut(each).zip(gate);
                let inputs = h.chunks_exact(each).zip(m.chunks_exact(each));
                for ((out, &g), (h, m)) in samples.zip(inputs) {
                    let ag = a * g;
                    emit2(GradOut::overwrite(out), h, m, |h, m| h + ag * (m - h));
                }
            }
        }
    }

    /// Gradients of [`forward`] from `dout`.
    pub fn backward(isa: Isa, mode: BlendMode, of: &BlendInputs<'_>, dout: &[f32],
                    to: BlendGrads<'_>) {
        match mode {
            BlendMode::Add => add_backward(of, dout, to),
            BlendMode::Multiply => multiply_backward(of, dout, to),
            BlendMode::Gate if dout.is_empty() => {}
            BlendMode::Gate => gate_backward(of, dout, to),
        }
    }
}

#[inline(always)]
fn add_backward(of: &BlendInputs<'_>, dout: &[f32], to: BlendGrads<'_>) {
    let a = of.alpha;
    emit(to.h, dout, |d| (1.0 - a) * d);
    emit(to.m, dout, |d| a * d);
    zero(to.x);
}

#[inline(always)]
fn multiply_backward(of: &BlendInputs<'_>, dout: &[f32], to: BlendGrads<'_>) {
    let BlendInputs { h, m, x, alpha: a, .. } = *of;
    emit3(to.h, [dout, m, x], |d, m, x| d * (1.0 + a * math::tanh(m - x)));
    // d tanh(m − x) = 1 − tanh², with opposite signs for m and x.
    let slope = |d: f32, h: f32, t: f32| d * h * a * (1.0 - t * t);
    for (grad, sign) in [(to.m, 1.0f32), (to.x, -1.0)] {
        let slope = |d, h, m: f32, x: f32| sign * slope(d, h, math::tanh(m - x));
        for ((((g, &d), &h), &m), &x) in grad.values.iter_mut().zip(dout).zip(h).zip(m).zip(x) {
            *g = if grad.accumulate { *g + slope(d, h, m, x) } else { slope(d, h, m, x) };
        }
    }
}

#[inline(always)]
fn gate_backward(of: &BlendInputs<'_>, dout: &[f32], to: BlendGrads<'_>) {
    let BlendInputs { h, m, gate, alpha: a, .. } = *of;
    let each = h.len() / gate.len();
    for (grad, module) in [(to.h, false), (to.m, true)] {
        let GradOut { values, accumulate } = grad;
        let samples = values.chunks_exact_mut(each).zip(dout.chunks_exact(each));
        for ((values, dout), &g) in samples.zip(gate) {
            let factor = if module { a * g } else { 1.0 - a * g };
            emit(GradOut { values, accumulate }, dout, |d| factor * d);
        }
    }
    for (n, value) in to.gate.values.iter_mut().enumerate() {
        let at = n * each..(n + 1) * each;
        let operands = [&dout[at.clone()], &m[at.clone()], &h[at]];
        let sum = (f64::from(a) * sum3(operands, |d, m, h| d * (m - h))) as f32;
        *value = if to.gate.accumulate { *value + sum } else { sum };
    }
    zero(to.x);
}

#[inline(always)]
fn zero(grad: GradOut<'_>) {
    if !grad.accumulate {
        grad.values.fill(0.0);
    }
}

isa_kernels! {
    /// `out = x + tanh(s)·(y − x)`, the mix of the `norm` blueprint.
    pub fn tanh_mix(isa: Isa, x: &[f32], y: &[f32], s: f32, out: &mut [f32]) {
        let t = s.tanh();
        emit2(GradOut::overwrite(out), x, y, |x, y| x + t * (y - x));
    }
}

/// Destinations of the gradients of [`tanh_mix`].
#[derive(Debug, Default)]
pub struct TanhMixGrads<'a> {
    /// Gradient with respect to the identity branch.
    pub x: GradOut<'a>,
    /// Gradient with respect to the other branch.
    pub y: GradOut<'a>,
    /// Gradient with respect to the scalar parameter; added to.
    pub s: &'a mut [f32],
}

isa_kernels! {
    /// Gradients of [`tanh_mix`] from `dout`.
    pub fn tanh_mix_backward(isa: Isa, x: &[f32], y: &[f32], s: f32, dout: &[f32],
                             to: TanhMixGrads<'_>) {
        let t = s.tanh();
        if let [ds] = to.s {
            let sum = sum3([dout, y, x], |d, y, x| d * (y - x));
            *ds += (f64::from(1.0 - t * t) * sum) as f32;
        }
        emit(to.x, dout, |d| (1.0 - t) * d);
        emit(to.y, dout, |d| t * d);
    }
}

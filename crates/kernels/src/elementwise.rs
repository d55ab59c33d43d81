//! Elementwise kernels: activations, sums, products, channel scaling.
//!
//! Memory-bound: plain Rust, vectorised by the compiler for each instruction set. The loops are
//! `for` loops: a closure that `for_each` calls may be compiled separately, for the baseline.

use super::macros::isa_kernels;
use super::{BatchShape, GradOut, Isa, functions, math};

/// Writes or adds `f(a, b)` elementwise.
#[inline(always)]
pub(crate) fn emit2(out: GradOut<'_>, a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) {
    for ((d, &a), &b) in out.values.iter_mut().zip(a).zip(b) {
        *d = if out.accumulate { *d + f(a, b) } else { f(a, b) };
    }
}

/// Writes or adds `f(a)` elementwise.
#[inline(always)]
pub(crate) fn emit(out: GradOut<'_>, a: &[f32], f: impl Fn(f32) -> f32) {
    for (d, &a) in out.values.iter_mut().zip(a) {
        *d = if out.accumulate { *d + f(a) } else { f(a) };
    }
}

/// Writes or adds `dy·f'`, f' a function of the saved value.
#[inline(always)]
fn emit_slope(dx: GradOut<'_>, saved: &[f32], dy: &[f32], slope: impl Fn(f32) -> f32) {
    for ((d, &saved), &dy) in dx.values.iter_mut().zip(saved).zip(dy) {
        let gradient = dy * slope(saved);
        *d = if dx.accumulate { *d + gradient } else { gradient };
    }
}

/// An elementwise function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UnaryFunction {
    /// `max(x, 0)`; NaN stays NaN, as in PyTorch.
    Relu,
    /// `1/(1 + e⁻ˣ)`.
    Sigmoid,
    /// `tanh x`.
    Tanh,
    /// `x` above 0, `slope · x` elsewhere.
    LeakyRelu {
        /// Slope below 0: finite, not negative.
        slope: f32,
    },
    /// `x` above 0, `eˣ − 1` elsewhere: PyTorch's `ELU` with α = 1.
    Elu,
    /// `x·Φ(x)`, Φ the standard normal distribution (`½·(1 + erf(x/√2))`).
    Gelu,
    /// `½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`: PyTorch's `GELU` with `approximate="tanh"`.
    GeluTanh,
    /// `x/(1 + e⁻ˣ)`, also known as swish.
    Silu,
    /// `ln(1 + eˣ)`, which is x above PyTorch's threshold of 20.
    Softplus,
    /// `x·min(max(x + 3, 0), 6)/6`.
    HardSwish,
}

impl UnaryFunction {
    /// The derivative just above 0.
    pub const fn slope_above_zero(self) -> f64 {
        match self {
            UnaryFunction::Relu
            | UnaryFunction::Tanh
            | UnaryFunction::LeakyRelu { .. }
            | UnaryFunction::Elu => 1.0,
            UnaryFunction::Gelu
            | UnaryFunction::GeluTanh
            | UnaryFunction::Silu
            | UnaryFunction::Softplus
            | UnaryFunction::HardSwish => 0.5,
            UnaryFunction::Sigmoid => 0.25,
        }
    }

    /// Whether the gradient is computed from x, which is then kept until backward. The derivative
    /// of every other function is a function of its value.
    pub const fn saves_input(self) -> bool {
        match self {
            // These functions are not monotonic: two different x have the same value.
            UnaryFunction::Gelu
            | UnaryFunction::GeluTanh
            | UnaryFunction::Silu
            | UnaryFunction::HardSwish => true,
            UnaryFunction::Relu
            | UnaryFunction::Sigmoid
            | UnaryFunction::Tanh
            | UnaryFunction::LeakyRelu { .. }
            | UnaryFunction::Elu
            | UnaryFunction::Softplus => false,
        }
    }
}

isa_kernels! {
    /// `y = f(x)`.
    pub fn apply(isa: Isa, function: UnaryFunction, x: &[f32], y: &mut [f32]) {
        let y = GradOut::overwrite(y);
        match function {
            UnaryFunction::Relu => emit(y, x, |x| if x <= 0.0 { 0.0 } else { x }),
            UnaryFunction::Sigmoid => emit(y, x, math::sigmoid),
            UnaryFunction::Tanh => emit(y, x, math::tanh),
            UnaryFunction::LeakyRelu { slope } => {
                emit(y, x, |x| functions::leaky_relu(x, slope));
            }
            UnaryFunction::Elu => emit(y, x, functions::elu),
            UnaryFunction::Gelu => emit(y, x, functions::gelu),
            UnaryFunction::GeluTanh => emit(y, x, functions::gelu_tanh),
            UnaryFunction::Silu => emit(y, x, functions::silu),
            UnaryFunction::Softplus => emit(y, x, functions::softplus),
            UnaryFunction::HardSwish => emit(y, x, functions::hard_swish),
        }
    }

    /// Gradient of [`apply`]: `dy·f'(x)`. `saved` is x if [`UnaryFunction::saves_input`], else the
    /// output y. ReLU's gradient is `dy` where `y > 0` or NaN, else 0.
    pub fn apply_backward(
        isa: Isa,
        function: UnaryFunction,
        saved: &[f32],
        dy: &[f32],
        dx: GradOut<'_>,
    ) {
        match function {
            UnaryFunction::Relu => emit2(dx, saved, dy, |y, dy| if y <= 0.0 { 0.0 } else { dy }),
            UnaryFunction::Sigmoid => emit2(dx, saved, dy, |y, dy| dy * ((1.0 - y) * y)),
            UnaryFunction::Tanh => emit2(dx, saved, dy, |y, dy| dy * (1.0 - y * y)),
            UnaryFunction::LeakyRelu { slope } => {
                emit_slope(dx, saved, dy, |y| functions::leaky_relu_slope(y, slope));
            }
            UnaryFunction::Elu => emit_slope(dx, saved, dy, functions::elu_slope),
            UnaryFunction::Gelu => emit_slope(dx, saved, dy, functions::gelu_slope),
            UnaryFunction::GeluTanh => emit_slope(dx, saved, dy, functions::gelu_tanh_slope),
            UnaryFunction::Silu => emit_slope(dx, saved, dy, functions::silu_slope),
            UnaryFunction::Softplus => emit_slope(dx, saved, dy, functions::softplus_slope),
            UnaryFunction::HardSwish => emit_slope(dx, saved, dy, functions::hard_swish_slope),
        }
    }

    /// `y = a + b`.
    pub fn add(isa: Isa, a: &[f32], b: &[f32], y: &mut [f32]) {
        emit2(GradOut::overwrite(y), a, b, |a, b| a + b);
    }

    /// `y = a · b`, or adds it to `y`: a product, and the gradient of a factor.
    pub fn product(isa: Isa, a: &[f32], b: &[f32], y: GradOut<'_>) {
        emit2(y, a, b, |a, b| a * b);
    }

    /// Copies `src` to `dst`, or adds it: the gradient of an identity.
    pub fn pass(isa: Isa, src: &[f32], dst: GradOut<'_>) {
        emit(dst, src, |x| x);
    }

    /// `y = factor · x · scale`, `x` and `y` `[N][H][W][C]`, `scale` `[N][C]`.
    pub fn scale_channels(isa: Isa, shape: &BatchShape, x: &[f32], scale: &[f32], factor: f32,
                          y: &mut [f32]) {
        if shape.is_empty() {
            return;
        }
        let image = shape.pixels() * shape.c;
        let images = x.chunks_exact(image).zip(y.chunks_exact_mut(image));
        for ((x, y), scale) in images.zip(scale.chunks_exact(shape.c)) {
            for (x, y) in x.chunks_exact(shape.c).zip(y.chunks_exact_mut(shape.c)) {
                emit2(GradOut::overwrite(y), x, scale, |x, s| factor * x * s);
            }
        }
    }
}

/// Inputs of [`scale_channels_backward`].
#[derive(Clone, Copy, Debug)]
pub struct ScaleChannels<'a> {
    /// Image `[N][H][W][C]`.
    pub x: &'a [f32],
    /// One value per sample and channel `[N][C]`.
    pub scale: &'a [f32],
    /// Constant factor.
    pub factor: f32,
}

isa_kernels! {
    /// Gradients of [`scale_channels`]: `dx = factor·dy·scale` and
    /// `dscale[n][c] = factor·Σ_hw dy·x` (f32 sums over 32 pixels, which are added in f64).
    pub fn scale_channels_backward(isa: Isa, shape: &BatchShape, of: &ScaleChannels<'_>, dy: &[f32],
                                   dx: GradOut<'_>, dscale: GradOut<'_>) {
        let ScaleChannels { x, scale, factor } = *of;
        if shape.is_empty() {
            return;
        }
        let (c, image) = (shape.c, shape.pixels() * shape.c);
        let pixels = dx.values.chunks_exact_mut(c).zip(dy.chunks_exact(c));
        for (i, (values, dy)) in pixels.enumerate() {
            let sample = i / shape.pixels();
            let scale = &scale[sample * c..(sample + 1) * c];
            let to = GradOut { values, accumulate: dx.accumulate };
            emit2(to, dy, scale, |dy, s| factor * dy * s);
        }
        let images = x.chunks_exact(image).zip(dy.chunks_exact(image));
        for ((x, dy), to) in images.zip(dscale.values.chunks_exact_mut(c)) {
            channel_dots(x, dy, to, factor, dscale.accumulate);
        }
    }
}

/// Channels whose sums are kept in registers at a time.
const LANES: usize = 16;

/// `to[c] (+)= factor·Σ_pixels a·b` for one image: f32 sums over 32 pixels, which are added in
/// f64.
#[inline(always)]
fn channel_dots(a: &[f32], b: &[f32], to: &mut [f32], factor: f32, accumulate: bool) {
    let c = to.len();
    for c0 in (0..c).step_by(LANES) {
        let n = LANES.min(c - c0);
        let mut total = [0f64; LANES];
        for (a, b) in a.chunks(32 * c).zip(b.chunks(32 * c)) {
            let mut part = [0f32; LANES];
            for (a, b) in a.chunks_exact(c).zip(b.chunks_exact(c)) {
                let (a, b) = (&a[c0..c0 + n], &b[c0..c0 + n]);
                for l in 0..n {
                    part[l] += a[l] * b[l];
                }
            }
            for l in 0..n {
                total[l] += f64::from(part[l]);
            }
        }
        for l in 0..n {
            let value = (f64::from(factor) * total[l]) as f32;
            to[c0 + l] = if accumulate { to[c0 + l] + value } else { value };
        }
    }
}

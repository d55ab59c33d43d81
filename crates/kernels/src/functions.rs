//! Activation functions of [`UnaryFunction`](super::elementwise::UnaryFunction) beyond ReLU,
//! sigmoid and tanh, and their derivatives, without branches.
//!
//! # Errors
//! The bounds are multiples of 2⁻²⁴, half an ulp of 1: the largest relative error of one rounding.
//! `kernels::math` states the bounds of the functions that are used. Tests compare with f64
//! (`tests/all/functions.rs`, which derives each bound).

use super::math::{self, Normal, Sigmoid};

/// `x` above 0, `slope · x` elsewhere.
#[inline(always)]
pub(crate) fn leaky_relu(x: f32, slope: f32) -> f32 {
    if x > 0.0 { x } else { slope * x }
}

/// Derivative of [`leaky_relu`] from its value, which has the sign of x, because `slope` is not
/// negative.
#[inline(always)]
pub(crate) fn leaky_relu_slope(y: f32, slope: f32) -> f32 {
    if y > 0.0 { 1.0 } else { slope }
}

/// `x` above 0, `eˣ − 1` elsewhere.
#[inline(always)]
pub(crate) fn elu(x: f32) -> f32 {
    if x > 0.0 { x } else { math::exp_m1(x) }
}

/// Derivative of [`elu`] from its value: `eˣ = y + 1` where x ≤ 0.
#[inline(always)]
pub(crate) fn elu_slope(y: f32) -> f32 {
    if y > 0.0 { 1.0 } else { y + 1.0 }
}

/// `x·Φ(x)`, Φ the standard normal distribution.
#[inline(always)]
pub(crate) fn gelu(x: f32) -> f32 {
    x * math::normal(x).cdf
}

/// `1/√(2π)`.
const PEAK: f32 = 0.398_942_3;

/// Derivative of [`gelu`]: `Φ(x) + x·φ(x)` with `φ(x) = e^(−x²/2)/√(2π)`.
#[inline(always)]
pub(crate) fn gelu_slope(x: f32) -> f32 {
    let Normal { cdf, bell } = math::normal(x);
    cdf + x * (PEAK * bell)
}

/// `2·√(2/π)`: [`gelu_tanh`]'s `½·(1 + tanh u)` is `σ(2u)`.
const INNER: f32 = 1.595_769_2;
/// `2·√(2/π)·0.044715`.
const CUBIC: f32 = 0.071_354_814;

/// `½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`, as `x·σ(2·√(2/π)·(x + 0.044715·x³))`.
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    x / (1.0 + math::exp(-(x * (INNER + CUBIC * (x * x)))))
}

/// Derivative of [`gelu_tanh`]: `σ(z) + x·σ'(z)·z'`, z the sigmoid's argument. x is clamped to ±10,
/// because z' overflows for large x; the derivative is 1 or 0 there.
#[inline(always)]
pub(crate) fn gelu_tanh_slope(x: f32) -> f32 {
    let x = if x > 10.0 { 10.0 } else { x };
    let x = if x < -10.0 { -10.0 } else { x };
    let square = x * x;
    let Sigmoid { value, slope } = math::sigmoid_with_slope(x * (INNER + CUBIC * square));
    value + x * (slope * (INNER + 3.0 * CUBIC * square))
}

/// `x·σ(x)`.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + math::exp(-x))
}

/// Derivative of [`silu`]: `σ(x) + x·σ'(x)`.
#[inline(always)]
pub(crate) fn silu_slope(x: f32) -> f32 {
    let Sigmoid { value, slope } = math::sigmoid_with_slope(x);
    value + x * slope
}

/// `ln(1 + eˣ)`, as `max(x, 0) + ln(1 + e^(−|x|))`. Above PyTorch's threshold of 20 the second
/// term is below 2.1e-9, less than half an ulp of x: the result is x, bit for bit.
#[inline(always)]
pub(crate) fn softplus(x: f32) -> f32 {
    let above = if x > 0.0 { x } else { 0.0 };
    above + math::ln_1p(math::exp(-x.abs()))
}

/// Derivative of [`softplus`] from its value: `σ(x) = 1 − e^(−y)`.
#[inline(always)]
pub(crate) fn softplus_slope(y: f32) -> f32 {
    -math::exp_m1(-y)
}

/// `x·min(max(x + 3, 0), 6)/6`.
#[inline(always)]
pub(crate) fn hard_swish(x: f32) -> f32 {
    let gate = x + 3.0;
    let gate = if gate < 0.0 { 0.0 } else { gate };
    x * (if gate > 6.0 { 6.0 } else { gate }) / 6.0
}

/// Derivative of [`hard_swish`]: 0 up to −3, 1 from 3 on, `x/3 + ½` between.
#[inline(always)]
pub(crate) fn hard_swish_slope(x: f32) -> f32 {
    let inner = x / 3.0 + 0.5;
    let inner = if x <= -3.0 { 0.0 } else { inner };
    if x >= 3.0 { 1.0 } else { inner }
}

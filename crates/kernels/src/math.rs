//! Transcendental functions in plain f32 arithmetic without branches, so that they vectorise.
//!
//! Coefficients of `exp` and `tanh` come from the Cephes library (`expf.c`, `tanhf.c`), others are
//! minimax fits by Remez's algorithm.

/// `1.5·2²³`: adding and subtracting it rounds a small f32 to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// An exponential in parts: `eˣ = 2ⁿ·(1 + m)`.
struct ExpParts {
    /// m, between 1/√2 − 1 and √2 − 1.
    m: f32,
    n: i32,
}

/// Parts of `eˣ`, for x where 2ⁿ is a normal number.
#[inline(always)]
fn exp_parts(x: f32) -> ExpParts {
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts (Cody and Waite; the first is 355/512), so that r keeps its low bits.
    let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let p = 1.987_569_1e-4f32;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    // The low bits of `shifted` hold n.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    ExpParts { m: p * (r * r) + r, n }
}

/// `2ᵉ`, for exponents of normal numbers.
#[inline(always)]
fn power_of_2(e: i32) -> f32 {
    f32::from_bits((e.wrapping_add(127) as u32) << 23)
}

/// `eˣ`, within 2 ulp where the result is a normal number; 0 below, infinity above, NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Comparisons, not `max`/`min`, which would swallow a NaN.
    let clamped = if x < -87.336_54 { -87.336_54 } else { x };
    let clamped = if clamped > 88.722_83 { 88.722_83 } else { clamped };
    let ExpParts { m, n } = exp_parts(clamped);
    // 2ⁿ is applied as two factors: n reaches 128.
    let half = n >> 1;
    let y = (m + 1.0) * power_of_2(half) * power_of_2(n.wrapping_sub(half));
    let y = if x < -87.336_54 { 0.0 } else { y };
    if x > 88.722_83 { f32::INFINITY } else { y }
}

/// `eˣ − 1` for x ≤ 0, within 2 ulp; NaN for NaN, and any value for x > 0.
///
/// `2ⁿ·m + (2ⁿ − 1)`, which for n = 0 is m itself, so that it keeps its relative precision near 0.
/// For n < 0 the error of m, below 3.5·2⁻²⁶, is at least halved, and the result is at most −0.29.
#[inline(always)]
pub(crate) fn exp_m1(x: f32) -> f32 {
    let ExpParts { m, n } = exp_parts(if x < -87.336_54 { -87.336_54 } else { x });
    let scale = power_of_2(n);
    m * scale + (scale - 1.0)
}

/// `ln(1 + u)` for 0 ≤ u ≤ 1, within 2 ulp; NaN for NaN.
///
/// `2·artanh s` with `s = u/(2 + u) ≤ 1/3`, as `2s + s³·q(s²)`; the fit is within 2⁻²⁷.
#[inline(always)]
pub(crate) fn ln_1p(u: f32) -> f32 {
    let s = u / (2.0 + u);
    let z = s * s;
    let q = 2.802_445_3e-1f32;
    let q = q * z + 2.799_914_2e-1;
    let q = q * z + 4.002_17e-1;
    let q = q * z + 6.666_641e-1;
    (s + s) + s * (z * q)
}

/// The standard normal distribution at a point.
pub(crate) struct Normal {
    /// `Φ(x) = ½·(1 + erf(x/√2))`, within `(12 + x²/2)·2⁻²⁴` of it, where it is a normal number.
    pub(crate) cdf: f32,
    /// `e^(−x²/2)`, within `(4 + x²/2)·2⁻²⁴` of it, where it is a normal number.
    pub(crate) bell: f32,
}

/// The standard normal distribution; NaN for NaN.
///
/// `Φ(−a) = e^(−a²/2)·t·p(t − ½)` with `t = 1/(1 + 0.35·a)` for a ≥ 0, and `Φ(a) = 1 − Φ(−a)`.
/// So the tail keeps its relative precision, which `½·(1 + erf)` loses. The fit is within 2⁻²⁴·⁹
/// for a ≤ 13.3; the tail beyond is below the normal numbers. The relative error of `p` with its
/// evaluation is at most 5.4·2⁻²⁴. The exponential adds at most 4·2⁻²⁴, and the rounding of its
/// argument at most `x²/2·2⁻²⁴`.
#[inline(always)]
pub(crate) fn normal(x: f32) -> Normal {
    let a = x.abs();
    let bell = exp(-0.5 * (x * x));
    let t = 1.0 / (1.0 + 0.35 * a);
    let u = t - 0.5;
    let p = -2.911_495_2e-2f32;
    let p = p * u + 2.735_831_6e-2;
    let p = p * u + 4.416_832_3e-2;
    let p = p * u + -5.613_488_7e-2;
    let p = p * u + -8.174_093e-2;
    let p = p * u + 8.187_068e-2;
    let p = p * u + 2.843_958e-1;
    let p = p * u + 3.429_916_2e-1;
    let p = p * u + 2.532_442_8e-1;
    let tail = p * t * bell;
    Normal { cdf: if x > 0.0 { 1.0 - tail } else { tail }, bell }
}

/// `tanh x`, within 3 ulp; NaN for NaN.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let a = x.abs();
    // Small arguments: odd polynomial, which keeps the relative precision near 0.
    let z = x * x;
    let p = -5.704_988_5e-3f32;
    let p = p * z + 2.063_909e-2;
    let p = p * z + -5.373_971_6e-2;
    let p = p * z + 1.333_144_2e-1;
    let p = p * z + -3.333_328e-1;
    let small = p * z * x + x;
    let large = 1.0 - 2.0 / (exp(2.0 * a) + 1.0);
    let large = if x < 0.0 { -large } else { large };
    if a < 0.625 { small } else { large }
}

/// `1/(1 + e⁻ˣ)`, within 4 ulp where the result is a normal number; NaN for NaN.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// A sigmoid with its derivative.
pub(crate) struct Sigmoid {
    /// `σ(x)`.
    pub(crate) value: f32,
    /// `σ(x)·(1 − σ(x))`, without the cancellation of `1 − σ` for large x.
    pub(crate) slope: f32,
}

/// `σ(x)` and its derivative from `e^(−|x|)`, within 7·2⁻²⁴ and 10·2⁻²⁴ of it where they are normal
/// numbers: 4 of the exponential, 2 of sum and quotient, twice in the derivative, and 1 for each
/// product; NaN for NaN.
#[inline(always)]
pub(crate) fn sigmoid_with_slope(x: f32) -> Sigmoid {
    let e = exp(-x.abs());
    let q = 1.0 / (1.0 + e);
    let below = e * q;
    Sigmoid { value: if x < 0.0 { below } else { q }, slope: below * q }
}

//! Transcendental functions in plain f32 arithmetic without branches, so that they vectorise.
//!
//! Coefficients of `exp` and `tanh` come from the Cephes library (`expf.c`, `tanhf.c`).

/// `1.5·2²³`: adding and subtracting it rounds a small f32 to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// `eˣ`, within 2 ulp where the result is a normal number; 0 below, infinity above, NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Comparisons, not `max`/`min`, which would swallow a NaN.
    let clamped = if x < -87.336_54 { -87.336_54 } else { x };
    let clamped = if clamped > 88.722_83 { 88.722_83 } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts (Cody and Waite; the first is 355/512), so that r keeps its low bits.
    let r = (clamped - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let p = 1.987_569_1e-4f32;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let mantissa = (p * (r * r) + r) + 1.0;
    // The low bits of `shifted` hold n. 2ⁿ is applied as two factors: n reaches 128.
    let exponent = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = exponent >> 1;
    let scale = |e: i32| f32::from_bits((e.wrapping_add(127) as u32) << 23);
    let y = mantissa * scale(half) * scale(exponent.wrapping_sub(half));
    let y = if x < -87.336_54 { 0.0 } else { y };
    if x > 88.722_83 { f32::INFINITY } else { y }
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

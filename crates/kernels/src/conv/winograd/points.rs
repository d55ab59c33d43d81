//! The transforms of one dimension: sums with small constants, which are written out.

use crate::simd::Simd;

/// Transforms between a row of T points and M outputs, T = M + 2, for a filter of 3 taps. With the
/// matrices `A`, `B` and `G` of each implementation, outputs are `Aᵀ[(G·g) ⊙ (Bᵀ·d)]`.
///
/// # Safety
/// The machine has the instructions of `S`, and the code is compiled for them: methods are
/// `#[inline(always)]`. This holds for all of them.
pub(super) trait Points<const M: usize, const T: usize> {
    /// `Bᵀ·d`: points of the input.
    unsafe fn input<S: Simd>(d: [S; T]) -> [S; T];

    /// `G·g`: points of the filter.
    unsafe fn filter<S: Simd>(g: [S; 3]) -> [S; T];

    /// `Aᵀ·m`: outputs.
    unsafe fn output<S: Simd>(m: [S; T]) -> [S; M];

    /// `A·y`: points of a gradient of the outputs.
    unsafe fn gradient<S: Simd>(y: [S; M]) -> [S; T];

    /// `Gᵀ·u`: the filter's gradient.
    unsafe fn filter_gradient<S: Simd>(u: [S; T]) -> [S; 3];
}

/// Two outputs from the points 0, 1, −1 and ∞:
/// ```text
///      1  0 −1  0         1   0   0
/// Bᵀ = 0  1  1  0    G =  ½   ½   ½    Aᵀ = 1  1  1  0
///      0 −1  1  0         ½  −½   ½         0  1 −1 −1
///      0  1  0 −1         0   0   1
/// ```
pub(super) struct TwoOutputs;

impl Points<2, 4> for TwoOutputs {
    #[inline(always)]
    unsafe fn input<S: Simd>([a, b, c, d]: [S; 4]) -> [S; 4] {
        // SAFETY: the caller's promise.
        unsafe { [a.sub(c), b.add(c), c.sub(b), b.sub(d)] }
    }

    #[inline(always)]
    unsafe fn filter<S: Simd>([a, b, c]: [S; 3]) -> [S; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            let (half, ends) = (S::splat(0.5), a.add(c));
            [a, ends.add(b).mul(half), ends.sub(b).mul(half), c]
        }
    }

    #[inline(always)]
    unsafe fn output<S: Simd>([a, b, c, d]: [S; 4]) -> [S; 2] {
        // SAFETY: the caller's promise.
        unsafe { [a.add(b).add(c), b.sub(c).sub(d)] }
    }

    #[inline(always)]
    unsafe fn gradient<S: Simd>([a, b]: [S; 2]) -> [S; 4] {
        // SAFETY: the caller's promise.
        unsafe { [a, a.add(b), a.sub(b), S::splat(0.0).sub(b)] }
    }

    #[inline(always)]
    unsafe fn filter_gradient<S: Simd>([a, b, c, d]: [S; 4]) -> [S; 3] {
        // SAFETY: the caller's promise.
        unsafe {
            let half = S::splat(0.5);
            let (sum, difference) = (b.add(c).mul(half), b.sub(c).mul(half));
            [a.add(sum), difference, sum.add(d)]
        }
    }
}

/// Four outputs from the points 0, 1, −1, 2, −2 and ∞:
/// ```text
///      4  0 −5  0  1  0         1/4    0    0
///      0 −4 −4  1  1  0        −1/6 −1/6 −1/6         1  1  1  1  1  0
/// Bᵀ = 0  4 −4 −1  1  0    G = −1/6  1/6 −1/6    Aᵀ = 0  1 −1  2 −2  0
///      0 −2 −1  2  1  0        1/24 1/12  1/6         0  1  1  4  4  0
///      0  2 −1 −2  1  0       1/24 −1/12  1/6         0  1 −1  8 −8  1
///      0  4  0 −5  0  1           0    0    1
/// ```
pub(super) struct FourOutputs;

impl Points<4, 6> for FourOutputs {
    #[inline(always)]
    unsafe fn input<S: Simd>([a, b, c, d, e, f]: [S; 6]) -> [S; 6] {
        // SAFETY: the caller's promise.
        unsafe {
            let (two, four, five) = (S::splat(2.0), S::splat(4.0), S::splat(-5.0));
            let minus_four = S::splat(-4.0);
            let (even, odd) = (c.mul_add(minus_four, e), b.mul_add(minus_four, d));
            let (near, far) = (e.sub(c), d.sub(b).mul(two));
            [
                a.mul_add(four, c.mul_add(five, e)),
                even.add(odd),
                even.sub(odd),
                near.add(far),
                near.sub(far),
                b.mul_add(four, d.mul_add(five, f)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn filter<S: Simd>([a, b, c]: [S; 3]) -> [S; 6] {
        // SAFETY: the caller's promise.
        unsafe {
            let (quarter, sixth, twelfth) =
                (S::splat(0.25), S::splat(1.0 / 6.0), S::splat(1.0 / 12.0));
            let minus_sixth = S::splat(-1.0 / 6.0);
            let ends = a.add(c).mul(minus_sixth);
            let far = a.mul_add(S::splat(1.0 / 24.0), c.mul(sixth));
            let (near_b, far_b) = (b.mul(sixth), b.mul(twelfth));
            [a.mul(quarter), ends.sub(near_b), ends.add(near_b), far.add(far_b), far.sub(far_b), c]
        }
    }

    #[inline(always)]
    unsafe fn output<S: Simd>([a, b, c, d, e, f]: [S; 6]) -> [S; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            let (two, four, eight) = (S::splat(2.0), S::splat(4.0), S::splat(8.0));
            let (p, q, r, s) = (b.add(c), b.sub(c), d.add(e), d.sub(e));
            [a.add(p).add(r), s.mul_add(two, q), r.mul_add(four, p), s.mul_add(eight, q).add(f)]
        }
    }

    #[inline(always)]
    unsafe fn gradient<S: Simd>([a, b, c, d]: [S; 4]) -> [S; 6] {
        // SAFETY: the caller's promise.
        unsafe {
            let (two, four, eight) = (S::splat(2.0), S::splat(4.0), S::splat(8.0));
            let (even, odd) = (a.add(c), b.add(d));
            let (far, far_odd) = (c.mul_add(four, a), d.mul_add(eight, b.mul(two)));
            [a, even.add(odd), even.sub(odd), far.add(far_odd), far.sub(far_odd), d]
        }
    }

    #[inline(always)]
    unsafe fn filter_gradient<S: Simd>([a, b, c, d, e, f]: [S; 6]) -> [S; 3] {
        // SAFETY: the caller's promise.
        unsafe {
            let (quarter, sixth, twelfth) =
                (S::splat(0.25), S::splat(1.0 / 6.0), S::splat(1.0 / 12.0));
            let minus_sixth = S::splat(-1.0 / 6.0);
            let near = b.add(c).mul(minus_sixth);
            let far = d.add(e);
            [
                a.mul_add(quarter, far.mul_add(S::splat(1.0 / 24.0), near)),
                c.sub(b).mul_add(sixth, d.sub(e).mul(twelfth)),
                far.mul_add(sixth, near).add(f),
            ]
        }
    }
}

//! Several registers as one, for kernels over more channels than a register holds.

use super::Simd;
use crate::macros::unroll;

/// `V` registers: the channels of one pixel, which are neighbours in memory.
#[derive(Clone, Copy)]
pub(crate) struct Several<S, const V: usize>([S; V]);

/// The registers made by `$value`, whose number in the vector is `$k`.
macro_rules! each {
    (|$k:ident| $value:expr) => {{
        let mut registers = [S::splat(0.0); V];
        unroll!(V, $k, {
            registers[$k] = $value;
        });
        Self(registers)
    }};
}

/// Number of elements in register `k` of the first `n` elements of the vector.
#[inline(always)]
fn within<S: Simd>(k: usize, n: usize) -> usize {
    n.saturating_sub(k * S::LANES).min(S::LANES)
}

// SAFETY: only the operations of `S`.
unsafe impl<S: Simd, const V: usize> Simd for Several<S, V> {
    const LANES: usize = V * S::LANES;

    #[inline(always)]
    unsafe fn splat(v: f32) -> Self {
        const { assert!(S::PIXELS == 1) };
        // SAFETY: the caller's promise.
        Self(unsafe { [S::splat(v); V] })
    }

    #[inline(always)]
    unsafe fn broadcast(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { [S::broadcast(p); V] })
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { each!(|k| S::load(p.add(k * S::LANES))) }
    }

    #[inline(always)]
    unsafe fn load_n(p: *const f32, n: usize) -> Self {
        // SAFETY: a register reads its part of the `n` elements; the rest is the caller's promise.
        unsafe { each!(|k| S::load_n(p.wrapping_add(k * S::LANES), within::<S>(k, n))) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            unroll!(V, k, {
                self.0[k].store(p.add(k * S::LANES));
            });
        }
    }

    #[inline(always)]
    unsafe fn store_n(self, p: *mut f32, n: usize) {
        // SAFETY: a register writes its part of the `n` elements; the rest is the caller's promise.
        unsafe {
            unroll!(V, k, {
                self.0[k].store_n(p.wrapping_add(k * S::LANES), within::<S>(k, n));
            });
        }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { each!(|k| self.0[k].mul_add(b.0[k], c.0[k])) }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { each!(|k| self.0[k].add(b.0[k])) }
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { each!(|k| self.0[k].sub(b.0[k])) }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { each!(|k| self.0[k].mul(b.0[k])) }
    }

    #[inline(always)]
    unsafe fn select_le(self, b: Self, a: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { each!(|k| self.0[k].select_le(b.0[k], a.0[k], c.0[k])) }
    }

    #[inline(always)]
    unsafe fn select_greater(self, b: Self, a: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { each!(|k| self.0[k].select_greater(b.0[k], a.0[k], c.0[k])) }
    }

    #[inline(always)]
    unsafe fn select_eq(self, b: Self, a: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { each!(|k| self.0[k].select_eq(b.0[k], a.0[k], c.0[k])) }
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8, n: usize) -> Self {
        // SAFETY: as `load_n`.
        unsafe { each!(|k| S::load_bytes(p.wrapping_add(k * S::LANES), within::<S>(k, n))) }
    }

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, n: usize) {
        // SAFETY: as `store_n`.
        unsafe {
            unroll!(V, k, {
                self.0[k].store_bytes(p.wrapping_add(k * S::LANES), within::<S>(k, n));
            });
        }
    }
}

//! Vectors in plain Rust: the readable reference.

use super::Simd;

/// Eight f32; arrays of this size still fit the registers of a baseline x86-64 or aarch64.
#[derive(Clone, Copy)]
pub(crate) struct Lanes8([f32; 8]);

// SAFETY: plain Rust, for every machine.
unsafe impl Simd for Lanes8 {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(v: f32) -> Self {
        Self([v; 8])
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { p.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_n(p: *const f32, n: usize) -> Self {
        let mut lanes = [0.0; 8];
        // SAFETY: the caller's promise; `lanes` has 8 elements, and n is at most that.
        unsafe { std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n.min(8)) };
        Self(lanes)
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn store_n(self, p: *mut f32, n: usize) {
        // SAFETY: the caller's promise; `self.0` has 8 elements, and n is at most that.
        unsafe { std::ptr::copy_nonoverlapping(self.0.as_ptr(), p, n.min(8)) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // Not `f32::mul_add`: without the instruction that is a slow library call.
        Self(std::array::from_fn(|l| self.0[l] * b.0[l] + c.0[l]))
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l] + b.0[l]))
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l] - b.0[l]))
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l] * b.0[l]))
    }

    #[inline(always)]
    unsafe fn select_le(self, b: Self, a: Self, c: Self) -> Self {
        Self(std::array::from_fn(|l| if self.0[l] <= b.0[l] { a.0[l] } else { c.0[l] }))
    }

    #[inline(always)]
    unsafe fn select_greater(self, b: Self, a: Self, c: Self) -> Self {
        let take = |l: usize| self.0[l] > b.0[l] || self.0[l].is_nan();
        Self(std::array::from_fn(|l| if take(l) { a.0[l] } else { c.0[l] }))
    }

    #[inline(always)]
    unsafe fn select_eq(self, b: Self, a: Self, c: Self) -> Self {
        Self(std::array::from_fn(|l| if self.0[l] == b.0[l] { a.0[l] } else { c.0[l] }))
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8, n: usize) -> Self {
        let mut bytes = [0u8; 8];
        // SAFETY: the caller's promise; `bytes` has 8 elements, and n is at most that.
        unsafe { std::ptr::copy_nonoverlapping(p, bytes.as_mut_ptr(), n.min(8)) };
        Self(bytes.map(f32::from))
    }

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, n: usize) {
        let bytes = self.0.map(|v| v as u8);
        // SAFETY: the caller's promise; `bytes` has 8 elements, and n is at most that.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), p, n.min(8)) }
    }
}

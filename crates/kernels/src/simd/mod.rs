//! Vectors of f32: the operations that the register-tile and normalisation kernels need of an
//! instruction set.
//!
//! The files of this folder are thin: one or two intrinsics for each method. Algorithms are written
//! once, elsewhere.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod portable;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) mod several;

/// A register of [`Simd::LANES`] f32.
///
/// # Safety
/// Methods of an implementation may use the instructions of its instruction set. They must be
/// called only on machines that have it, from code that is compiled for it.
pub(crate) unsafe trait Simd: Copy {
    /// Elements of a register; divides [`PAD`](super::PAD), except in `Several`, which has up to
    /// `4 · PAD`.
    const LANES: usize;

    /// Neighbouring pixels in a register, with the same number of channels each.
    const PIXELS: usize = 1;

    /// `i` itself, hidden from the compiler: otherwise it turns addresses that share one index into
    /// separate pointers, which it spills and moves one by one.
    #[inline(always)]
    fn opaque(i: usize) -> usize {
        i
    }

    /// All elements `v`.
    unsafe fn splat(v: f32) -> Self;

    /// All elements `*p`.
    ///
    /// # Safety
    /// `p` is readable.
    #[inline(always)]
    unsafe fn broadcast(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::splat(*p) }
    }

    /// Elements `p[0..LANES]`.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load(p: *const f32) -> Self;

    /// A value for each channel, `p[0..LANES / PIXELS]`, for all pixels.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn coefficients(p: *const f32) -> Self {
        const { assert!(Self::PIXELS == 1) };
        // SAFETY: the caller's promise.
        unsafe { Self::load(p) }
    }

    /// For pixel i of the register, `LANES / PIXELS` elements from `places[i] + offset` on; with
    /// one pixel `places[1]` is not read.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn load_apart(places: [*const f32; 2], offset: usize) -> Self {
        const { assert!(Self::PIXELS == 1) };
        // SAFETY: the caller's promise.
        unsafe { Self::load(places[0].add(offset)) }
    }

    /// Elements `p[0..n]`, the rest 0; `n <= LANES`.
    ///
    /// # Safety
    /// These `n` are readable.
    unsafe fn load_n(p: *const f32, n: usize) -> Self;

    /// Writes all elements to `p[0..LANES]`.
    ///
    /// # Safety
    /// They are writable.
    unsafe fn store(self, p: *mut f32);

    /// Writes the elements that [`Simd::load_apart`] reads.
    ///
    /// # Safety
    /// The places are writable and apart.
    #[inline(always)]
    unsafe fn store_apart(self, places: [*mut f32; 2], offset: usize) {
        const { assert!(Self::PIXELS == 1) };
        // SAFETY: the caller's promise.
        unsafe { self.store(places[0].add(offset)) }
    }

    /// Writes the first `n` elements to `p[0..n]`; `n <= LANES`.
    ///
    /// # Safety
    /// These `n` are writable.
    unsafe fn store_n(self, p: *mut f32, n: usize);

    /// `self·b + c`, rounded once where the instruction set can.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;

    /// `self + b`.
    unsafe fn add(self, b: Self) -> Self;

    /// `self − b`.
    unsafe fn sub(self, b: Self) -> Self;

    /// `self·b`.
    unsafe fn mul(self, b: Self) -> Self;

    /// `a` where `self <= b`, else `c`; a NaN compares false.
    unsafe fn select_le(self, b: Self, a: Self, c: Self) -> Self;

    /// `a` where `self > b` or `self` is NaN, else `c`, as in PyTorch's max pooling.
    unsafe fn select_greater(self, b: Self, a: Self, c: Self) -> Self;

    /// `a` where `self == b`, else `c`.
    unsafe fn select_eq(self, b: Self, a: Self, c: Self) -> Self;

    /// Elements `p[0..n]` as numbers, the rest 0; `n <= LANES`.
    ///
    /// # Safety
    /// These `n` are readable.
    unsafe fn load_bytes(p: *const u8, n: usize) -> Self;

    /// Writes the first `n` elements, whole numbers from 0 to 255, to `p[0..n]`; `n <= LANES`.
    ///
    /// # Safety
    /// These `n` are writable.
    unsafe fn store_bytes(self, p: *mut u8, n: usize);
}

/// Prefetches the cache lines of `values` for writing. Has no visible effect.
#[inline(always)]
pub(crate) fn fetch_to_write(values: &[f32]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for line in values.chunks(16) {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        // SAFETY: a hint, which neither reads nor writes; processors that lack it do nothing.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(line.as_ptr().cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = values;
}

/// Prefetches the cache line at `at`, which may lie outside of memory. Has no visible effect.
#[inline(always)]
pub(crate) fn fetch(at: *const f32) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, which neither reads nor faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

/// [`Simd::opaque`] of vectors in registers.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
fn opaque(mut i: usize) -> usize {
    // SAFETY: no instruction at all; the register holds `i` before and after.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) i, options(pure, nomem, nostack, preserves_flags));
    }
    i
}

//! AVX2 and FMA vectors.

use std::arch::x86_64::*;

use super::Simd;

/// Eight f32 in a `ymm` register.
#[derive(Clone, Copy)]
pub(crate) struct Ymm(__m256);

impl Ymm {
    #[inline(always)]
    pub(super) fn new(register: __m256) -> Self {
        Self(register)
    }
}

/// A window of 8 into this, starting at `8 − n`, is the mask of the first `n` lanes.
static MASKS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

#[inline(always)]
unsafe fn mask(n: usize) -> __m256i {
    // SAFETY: 8 − n is in 0..=8, so 8 elements lie within the 16; AVX2 is the caller's promise.
    unsafe { _mm256_loadu_si256(MASKS.as_ptr().add(8 - n.min(8)).cast()) }
}

// SAFETY: only instructions of AVX, AVX2 and FMA, which callers promise the machine has.
unsafe impl Simd for Ymm {
    const LANES: usize = 8;

    #[inline(always)]
    fn opaque(i: usize) -> usize {
        super::opaque(i)
    }

    #[inline(always)]
    unsafe fn splat(v: f32) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm256_set1_ps(v) })
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm256_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn load_n(p: *const f32, n: usize) -> Self {
        // SAFETY: masked lanes are not read; the rest is the caller's promise.
        Self(unsafe { _mm256_maskload_ps(p, mask(n)) })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(p, self.0) }
    }

    #[inline(always)]
    unsafe fn store_n(self, p: *mut f32, n: usize) {
        // SAFETY: masked lanes are not written; the rest is the caller's promise.
        unsafe { _mm256_maskstore_ps(p, mask(n), self.0) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm256_add_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm256_sub_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm256_mul_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn select_le(self, b: Self, a: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm256_blendv_ps(c.0, a.0, _mm256_cmp_ps::<_CMP_LE_OQ>(self.0, b.0)) })
    }

    #[inline(always)]
    unsafe fn select_greater(self, b: Self, a: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let greater = _mm256_cmp_ps::<_CMP_GT_OQ>(self.0, b.0);
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0);
            Self(_mm256_blendv_ps(c.0, a.0, _mm256_or_ps(greater, nan)))
        }
    }

    #[inline(always)]
    unsafe fn select_eq(self, b: Self, a: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm256_blendv_ps(c.0, a.0, _mm256_cmp_ps::<_CMP_EQ_OQ>(self.0, b.0)) })
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8, n: usize) -> Self {
        let mut bytes = [0u8; 8];
        // SAFETY: the caller's promise; `bytes` has 8 elements, and n is at most that.
        unsafe {
            match n {
                8 => bytes = p.cast::<[u8; 8]>().read_unaligned(),
                _ => std::ptr::copy_nonoverlapping(p, bytes.as_mut_ptr(), n.min(8)),
            }
            let bytes = _mm_cvtsi64_si128(i64::from_le_bytes(bytes));
            Self(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)))
        }
    }

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, n: usize) {
        // SAFETY: the caller's promise; 8 bytes are made, and n is at most that.
        unsafe {
            let wide = _mm256_cvttps_epi32(self.0);
            let halves = (_mm256_castsi256_si128(wide), _mm256_extracti128_si256::<1>(wide));
            let words = _mm_packus_epi32(halves.0, halves.1);
            let bytes = _mm_cvtsi128_si64(_mm_packus_epi16(words, words)).to_le_bytes();
            match n {
                8 => p.cast::<[u8; 8]>().write_unaligned(bytes),
                _ => std::ptr::copy_nonoverlapping(bytes.as_ptr(), p, n.min(8)),
            }
        }
    }
}

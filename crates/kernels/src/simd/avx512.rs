//! AVX-512 vectors.

use std::arch::x86_64::*;

use super::Simd;
use super::avx2::Ymm;

/// Sixteen f32 in a `zmm` register: channels of one pixel, or of `PIXELS` neighbouring pixels.
#[derive(Clone, Copy)]
pub(crate) struct Zmm<const PIXELS: usize = 1>(__m512);

impl Zmm {
    /// Elements `p[0] p[1] p[0] p[1] …`.
    ///
    /// # Safety
    /// Both are readable, and the machine has AVX-512.
    #[inline(always)]
    pub(crate) unsafe fn broadcast_pair(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm512_castpd_ps(_mm512_set1_pd(p.cast::<f64>().read_unaligned())) })
    }

    /// Elements `p[0] p[0] p[1] p[1] …` of the first `n`, at most 8, the rest 0.
    ///
    /// # Safety
    /// These `n` are readable, and the machine has AVX-512.
    #[inline(always)]
    pub(crate) unsafe fn load_twice(p: *const f32, n: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let order = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
            Self(_mm512_permutexvar_ps(order, Self::load_n(p, n.min(8)).0))
        }
    }

    /// The sum of elements 0 and 1, of elements 2 and 3, and so on.
    ///
    /// # Safety
    /// The machine has AVX-512 with DQ.
    #[inline(always)]
    pub(crate) unsafe fn add_neighbours(self) -> Ymm {
        // SAFETY: the caller's promise.
        unsafe {
            let order = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
            let apart = _mm512_permutexvar_ps(order, self.0);
            let (even, odd) = (_mm512_castps512_ps256(apart), _mm512_extractf32x8_ps::<1>(apart));
            Ymm::new(_mm256_add_ps(even, odd))
        }
    }
}

#[inline(always)]
fn mask(n: usize) -> __mmask16 {
    ((1u32 << n.min(16)) - 1) as __mmask16
}

// SAFETY: only instructions of AVX-512 F, VL, DQ and BW, which callers promise the machine has.
unsafe impl<const PIXELS: usize> Simd for Zmm<PIXELS> {
    const LANES: usize = 16;
    const PIXELS: usize = PIXELS;

    #[inline(always)]
    fn opaque(i: usize) -> usize {
        super::opaque(i)
    }

    #[inline(always)]
    unsafe fn splat(v: f32) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm512_set1_ps(v) })
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm512_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn coefficients(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            match PIXELS {
                2 => Self(_mm512_broadcast_f32x8(_mm256_loadu_ps(p))),
                _ => Self::load(p),
            }
        }
    }

    #[inline(always)]
    unsafe fn load_apart(places: [*const f32; 2], offset: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            match PIXELS {
                2 => {
                    let low = _mm256_loadu_ps(places[0].add(offset));
                    let high = _mm256_loadu_ps(places[1].add(offset));
                    Self(_mm512_insertf32x8::<1>(_mm512_castps256_ps512(low), high))
                }
                _ => Self::load(places[0].add(offset)),
            }
        }
    }

    #[inline(always)]
    unsafe fn load_n(p: *const f32, n: usize) -> Self {
        // SAFETY: masked lanes are not read; the rest is the caller's promise.
        Self(unsafe { _mm512_maskz_loadu_ps(mask(n), p) })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(p, self.0) }
    }

    #[inline(always)]
    unsafe fn store_apart(self, places: [*mut f32; 2], offset: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match PIXELS {
                2 => {
                    let [low, high] =
                        [_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0)];
                    _mm256_storeu_ps(places[0].add(offset), low);
                    _mm256_storeu_ps(places[1].add(offset), high);
                }
                _ => self.store(places[0].add(offset)),
            }
        }
    }

    #[inline(always)]
    unsafe fn store_n(self, p: *mut f32, n: usize) {
        // SAFETY: masked lanes are not written; the rest is the caller's promise.
        unsafe { _mm512_mask_storeu_ps(p, mask(n), self.0) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm512_add_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm512_sub_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm512_mul_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn select_le(self, b: Self, a: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            Self(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(self.0, b.0), c.0, a.0))
        }
    }

    #[inline(always)]
    unsafe fn select_greater(self, b: Self, a: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let greater = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, b.0);
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            Self(_mm512_mask_blend_ps(greater | nan, c.0, a.0))
        }
    }

    #[inline(always)]
    unsafe fn select_eq(self, b: Self, a: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            Self(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(self.0, b.0), c.0, a.0))
        }
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8, n: usize) -> Self {
        // SAFETY: masked lanes are not read; the rest is the caller's promise.
        unsafe {
            let bytes = _mm_maskz_loadu_epi8(mask(n), p.cast());
            Self(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)))
        }
    }

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, n: usize) {
        // SAFETY: masked lanes are not written; the rest is the caller's promise.
        unsafe {
            let bytes = _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(self.0));
            _mm_mask_storeu_epi8(p.cast(), mask(n), bytes);
        }
    }
}

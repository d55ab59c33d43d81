//! NEON vectors, of aarch64.

use std::arch::aarch64::*;
use std::arch::asm;

use super::Simd;

/// Four f32 in a `q` register, of which there are 32.
#[derive(Clone, Copy)]
pub(crate) struct Quad(float32x4_t);

// SAFETY: only instructions of NEON, which every aarch64 has.
unsafe impl Simd for Quad {
    const LANES: usize = 4;

    #[inline(always)]
    fn opaque(i: usize) -> usize {
        super::opaque(i)
    }

    #[inline(always)]
    unsafe fn splat(v: f32) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { vdupq_n_f32(v) })
    }

    /// A load of one element, hidden from the compiler: otherwise it fills all lanes with each load
    /// (`ld1r`), which occupies a unit of the multiply-adds. These read a lane as all lanes.
    #[inline(always)]
    unsafe fn broadcast(p: *const f32) -> Self {
        // SAFETY: the caller's promise; no instruction at all between the load and the splat.
        unsafe {
            let mut v = *p;
            asm!("/* {0:s} */", inout(vreg) v, options(pure, nomem, nostack, preserves_flags));
            Self::splat(v)
        }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { vld1q_f32(p) })
    }

    #[inline(always)]
    unsafe fn load_n(p: *const f32, n: usize) -> Self {
        // SAFETY: each case reads `n` elements, which is the caller's promise.
        unsafe {
            let zero = vdupq_n_f32(0.0);
            let two = |p| vcombine_f32(vld1_f32(p), vget_low_f32(zero));
            Self(match n {
                0 => zero,
                1 => vld1q_lane_f32::<0>(p, zero),
                2 => two(p),
                3 => vld1q_lane_f32::<2>(p.add(2), two(p)),
                _ => vld1q_f32(p),
            })
        }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { vst1q_f32(p, self.0) }
    }

    #[inline(always)]
    unsafe fn store_n(self, p: *mut f32, n: usize) {
        // SAFETY: each case writes `n` elements, which is the caller's promise.
        unsafe {
            match n {
                0 => {}
                1 => vst1q_lane_f32::<0>(p, self.0),
                2 => vst1_f32(p, vget_low_f32(self.0)),
                3 => {
                    vst1_f32(p, vget_low_f32(self.0));
                    vst1q_lane_f32::<2>(p.add(2), self.0);
                }
                _ => vst1q_f32(p, self.0),
            }
        }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { vfmaq_f32(c.0, self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { vaddq_f32(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { vsubq_f32(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { vmulq_f32(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn select_le(self, b: Self, a: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { vbslq_f32(vcleq_f32(self.0, b.0), a.0, c.0) })
    }

    #[inline(always)]
    unsafe fn select_greater(self, b: Self, a: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let (greater, number) = (vcgtq_f32(self.0, b.0), vceqq_f32(self.0, self.0));
            Self(vbslq_f32(vornq_u32(greater, number), a.0, c.0))
        }
    }

    #[inline(always)]
    unsafe fn select_eq(self, b: Self, a: Self, c: Self) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { vbslq_f32(vceqq_f32(self.0, b.0), a.0, c.0) })
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8, n: usize) -> Self {
        let mut bytes = [0u8; 4];
        // SAFETY: the caller's promise; `bytes` has 4 elements, and n is at most that.
        unsafe {
            match n {
                4 => bytes = p.cast::<[u8; 4]>().read_unaligned(),
                _ => std::ptr::copy_nonoverlapping(p, bytes.as_mut_ptr(), n.min(4)),
            }
            let bytes = vreinterpret_u8_u32(vdup_n_u32(u32::from_le_bytes(bytes)));
            Self(vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes)))))
        }
    }

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, n: usize) {
        // SAFETY: the caller's promise; 4 bytes are made, and n is at most that.
        unsafe {
            let words = vmovn_u32(vcvtq_u32_f32(self.0));
            let bytes = vmovn_u16(vcombine_u16(words, words));
            let bytes = vget_lane_u32::<0>(vreinterpret_u32_u8(bytes)).to_le_bytes();
            match n {
                4 => p.cast::<[u8; 4]>().write_unaligned(bytes),
                _ => std::ptr::copy_nonoverlapping(bytes.as_ptr(), p, n.min(4)),
            }
        }
    }
}

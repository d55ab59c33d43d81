//! Prefetching of memory that is read soon, in an order that the processor cannot predict.

/// Prefetches the cache line of `place` into the second-level cache. Has no other effect.
#[inline(always)]
pub fn fetch<T>(place: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint, which neither reads nor writes; every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(place).cast()) };
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    {
        let place = std::ptr::from_ref(place);
        // SAFETY: a hint, which neither reads nor writes; every aarch64 has it.
        unsafe {
            std::arch::asm!("prfm pldl2keep, [{0}]", in(reg) place,
                options(readonly, nostack, preserves_flags));
        }
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    let _ = place;
}

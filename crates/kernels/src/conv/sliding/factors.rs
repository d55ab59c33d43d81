//! Layout of factors and sums in registers.

use crate::simd::Simd;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2::Ymm, avx512::Zmm};

/// Arrangement of factors in a register. The lanes are output channels, each once for every input
/// channel that is multiplied at once.
///
/// # Safety
/// As for [`Simd`]: methods may use instructions that only some machines have.
pub(super) unsafe trait Factors {
    /// Input channels that are multiplied at once.
    const CHANNELS: usize;
    /// A register of factors, or of sums.
    type Register: Simd;
    /// A register of totals, a lane for each output channel.
    type Total: Simd;

    /// [`Factors::CHANNELS`] elements of the input, for all output channels.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn input(p: *const f32) -> Self::Register;

    /// The first `n` output channels' elements, for all input channels.
    ///
    /// # Safety
    /// They are readable.
    #[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
    unsafe fn gradient(p: *const f32, n: usize) -> Self::Register;

    /// Sums over the input channels.
    ///
    /// # Safety
    /// The machine has the instructions.
    unsafe fn total(sums: Self::Register) -> Self::Total;
}

/// One input channel at a time.
pub(super) struct One<S>(S);

// SAFETY: nothing but methods of `S`.
unsafe impl<S: Simd> Factors for One<S> {
    const CHANNELS: usize = 1;
    type Register = S;
    type Total = S;

    #[inline(always)]
    unsafe fn input(p: *const f32) -> S {
        // SAFETY: the caller's promise.
        unsafe { S::broadcast(p) }
    }

    #[inline(always)]
    unsafe fn gradient(p: *const f32, n: usize) -> S {
        // SAFETY: the caller's promise.
        unsafe { S::load_n(p, n) }
    }

    #[inline(always)]
    unsafe fn total(sums: S) -> S {
        sums
    }
}

/// Two input channels for each of eight output channels.
#[cfg(target_arch = "x86_64")]
pub(super) struct TwoChannels;

#[cfg(target_arch = "x86_64")]
// SAFETY: nothing but methods of `Zmm`.
unsafe impl Factors for TwoChannels {
    const CHANNELS: usize = 2;
    type Register = Zmm;
    type Total = Ymm;

    #[inline(always)]
    unsafe fn input(p: *const f32) -> Zmm {
        // SAFETY: the caller's promise.
        unsafe { Zmm::broadcast_pair(p) }
    }

    #[inline(always)]
    unsafe fn gradient(p: *const f32, n: usize) -> Zmm {
        // SAFETY: the caller's promise.
        unsafe { Zmm::load_twice(p, n) }
    }

    #[inline(always)]
    unsafe fn total(sums: Zmm) -> Ymm {
        // SAFETY: the caller's promise.
        unsafe { sums.add_neighbours() }
    }
}

//! Kernels that are independent per channel, run over blocks of channels as wide as a register.
//!
//! With AVX-512 and 8 channels a register holds two neighbouring pixels (`Zmm<2>`) wherever a
//! kernel takes pixels one after the other. With more channels than a register holds, kernels that
//! have registers to spare take several registers of a pixel at once ([`Several`]): one walk over
//! the image reads contiguous memory, where a walk for each register would skip from line to line.

use super::isa::Level;
#[cfg(target_arch = "aarch64")]
use super::simd::neon::Quad;
use super::simd::portable::Lanes8;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::simd::several::Several;
use super::simd::{Simd, fetch};
#[cfg(target_arch = "x86_64")]
use super::simd::{avx2::Ymm, avx512::Zmm};
use super::{Isa, PAD};

/// Most channels of a block.
pub(crate) const MOST: usize = 4 * PAD;

/// f32 elements of a cache line.
const LINE: usize = 16;

/// f32 elements from a loaded element to the one that is prefetched meanwhile: 4 KiB, because the
/// processor's own prefetching ends with a page.
const AHEAD: usize = 1024;

/// A kernel over all pixels of an image for one block of channels.
pub(crate) trait ChannelKernel {
    /// Most registers of AVX-512 that hold the channels of a pixel at once: 1, 2 or 4. With 4, AVX2
    /// has up to 8 registers of half the size; with 1 or 2 it has one. NEON has as many of a
    /// quarter of the size.
    const AT_ONCE: usize = 1;

    /// Pixels that are computed alike one after the other, so that a register may hold several; 1
    /// if the kernel takes pixels in another way.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    fn pixels(&self) -> usize {
        1
    }

    /// Computes the channels that `at` names.
    ///
    /// # Safety
    /// The machine has the instructions of `S`, and the code is compiled for them: implementations
    /// are `#[inline(always)]`.
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange);
}

/// Channels `first..first + count`; `count` is the number of a pixel's channels in a register if
/// `WHOLE`, else at most that number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChannelRange {
    pub(crate) first: usize,
    pub(crate) count: usize,
}

impl ChannelRange {
    /// The channels' values of `x` `[C]`, for all pixels of a register.
    ///
    /// # Safety
    /// As [`ChannelKernel::run`].
    #[inline(always)]
    pub(crate) unsafe fn coefficients<S: Simd, const WHOLE: bool>(self, x: &[f32]) -> S {
        let x = &x[self.first..self.first + self.count];
        // SAFETY: the slice has all elements that are read.
        unsafe { if WHOLE { S::coefficients(x.as_ptr()) } else { S::load_n(x.as_ptr(), x.len()) } }
    }

    /// The channels' elements of the pixel that starts at `pixel`, and of the next pixels that fit
    /// into a register.
    ///
    /// # Safety
    /// As [`ChannelKernel::run`].
    #[inline(always)]
    pub(crate) unsafe fn load<S: Simd, const WHOLE: bool>(self, x: &[f32], pixel: usize) -> S {
        let at = pixel + self.first;
        // SAFETY: the lengths of the slices were checked.
        unsafe {
            if WHOLE {
                S::load(x[at..at + S::LANES].as_ptr())
            } else {
                S::load_n(x[at..at + self.count].as_ptr(), self.count)
            }
        }
    }

    /// [`ChannelRange::load`] in a walk over all pixels of values that are in no near cache: what
    /// it reads [`AHEAD`] elements later is prefetched.
    ///
    /// # Safety
    /// As [`ChannelKernel::run`].
    #[inline(always)]
    pub(crate) unsafe fn load_far<S: Simd, const WHOLE: bool>(self, x: &[f32], pixel: usize) -> S {
        for line in (0..S::LANES).step_by(LINE) {
            fetch(x.as_ptr().wrapping_add(pixel + self.first + AHEAD + line));
        }
        // SAFETY: the caller's promise.
        unsafe { self.load::<S, WHOLE>(x, pixel) }
    }

    /// [`ChannelRange::load`] where the second pixel of a register, if it holds two, starts `apart`
    /// elements after the first.
    ///
    /// # Safety
    /// As [`ChannelKernel::run`].
    #[inline(always)]
    pub(crate) unsafe fn load_apart<S: Simd, const WHOLE: bool>(
        self,
        x: &[f32],
        pixel: usize,
        apart: usize,
    ) -> S {
        // SAFETY: the length of the slice was checked.
        unsafe {
            if S::PIXELS == 1 {
                return self.load::<S, WHOLE>(x, pixel);
            }
            let at = pixel + self.first;
            let x = x[at..at + apart + S::LANES / S::PIXELS].as_ptr();
            S::load_apart([x, x.add(apart)], 0)
        }
    }

    /// Writes the elements that [`ChannelRange::load`] reads.
    ///
    /// # Safety
    /// As [`ChannelKernel::run`].
    #[inline(always)]
    pub(crate) unsafe fn store<S: Simd, const WHOLE: bool>(
        self,
        value: S,
        x: &mut [f32],
        pixel: usize,
    ) {
        let at = pixel + self.first;
        // SAFETY: the lengths of the slices were checked.
        unsafe {
            if WHOLE {
                value.store(x[at..at + S::LANES].as_mut_ptr());
            } else {
                value.store_n(x[at..at + self.count].as_mut_ptr(), self.count);
            }
        }
    }

    /// Writes the elements that [`ChannelRange::load_apart`] reads; the pixels do not overlap.
    ///
    /// # Safety
    /// As [`ChannelKernel::run`].
    #[inline(always)]
    pub(crate) unsafe fn store_apart<S: Simd, const WHOLE: bool>(
        self,
        value: S,
        x: &mut [f32],
        pixel: usize,
        apart: usize,
    ) {
        // SAFETY: the length of the slice was checked.
        unsafe {
            if S::PIXELS == 1 {
                return self.store::<S, WHOLE>(value, x, pixel);
            }
            let at = pixel + self.first;
            let x = x[at..at + apart + S::LANES / S::PIXELS].as_mut_ptr();
            value.store_apart([x, x.add(apart)], 0);
        }
    }

    /// [`ChannelRange::load`] of bytes, as numbers.
    ///
    /// # Safety
    /// As [`ChannelKernel::run`].
    #[inline(always)]
    pub(crate) unsafe fn load_bytes<S: Simd, const WHOLE: bool>(self, x: &[u8], pixel: usize) -> S {
        let (at, n) = (pixel + self.first, if WHOLE { S::LANES } else { self.count });
        // SAFETY: the length of the slice was checked.
        unsafe { S::load_bytes(x[at..at + n].as_ptr(), n) }
    }

    /// [`ChannelRange::store`] of whole numbers as bytes.
    ///
    /// # Safety
    /// As [`ChannelKernel::run`].
    #[inline(always)]
    pub(crate) unsafe fn store_bytes<S: Simd, const WHOLE: bool>(
        self,
        value: S,
        x: &mut [u8],
        pixel: usize,
    ) {
        let (at, n) = (pixel + self.first, if WHOLE { S::LANES } else { self.count });
        // SAFETY: the length of the slice was checked.
        unsafe { value.store_bytes(x[at..at + n].as_mut_ptr(), n) }
    }

    /// Adds the block's f32 sums to the channels' f64 sums.
    ///
    /// # Safety
    /// As [`ChannelKernel::run`].
    #[inline(always)]
    pub(crate) unsafe fn flush<S: Simd>(self, value: S, sums: &mut [f64]) {
        let mut values = [0f32; MOST];
        // SAFETY: the caller's promise; no vector has more than MOST elements.
        unsafe { value.store(values.as_mut_ptr()) };
        let sums = &mut sums[self.first..self.first + self.count];
        for values in values.chunks(S::LANES / S::PIXELS).take(S::PIXELS) {
            sums.iter_mut().zip(values).for_each(|(sum, &value)| *sum += f64::from(value));
        }
    }
}

/// Runs `kernel` for all of `channels`.
pub(crate) fn for_channels<K: ChannelKernel>(isa: Isa, channels: usize, kernel: &mut K) {
    #[cfg(target_arch = "x86_64")]
    if isa.level() == Level::Avx512 && channels == 8 && kernel.pixels().is_multiple_of(2) {
        let at = ChannelRange { first: 0, count: channels };
        // SAFETY: an `Isa` of this level exists only on machines that have it.
        return unsafe { x86::avx512::<_, Zmm<2>>(kernel, at) };
    }
    let mut first = 0;
    while first < channels {
        let left = channels - first;
        let width = match isa.level() {
            Level::Avx512 if K::AT_ONCE >= 4 && left >= 64 => 64,
            Level::Avx512 if K::AT_ONCE >= 2 && left >= 32 => 32,
            Level::Avx512 if left > 8 => 16,
            // With 16 registers, coefficients of many channels are operands in the nearest cache.
            // That takes less time than lines of memory that a walk skips.
            Level::Avx2 if K::AT_ONCE >= 4 && left >= 64 => 64,
            Level::Avx2 if K::AT_ONCE >= 4 && left >= 32 => 32,
            Level::Avx2 if K::AT_ONCE >= 4 && left >= 16 => 16,
            Level::Neon if K::AT_ONCE >= 4 && left >= 16 => 16,
            Level::Neon if K::AT_ONCE < 2 || left <= 4 => 4,
            _ => 8,
        };
        let at = ChannelRange { first, count: left.min(width) };
        // SAFETY: an `Isa` of a level exists only on machines that have it, and the functions below
        // are compiled for it.
        unsafe {
            match (isa.level(), width) {
                #[cfg(target_arch = "x86_64")]
                (Level::Avx512, 64) => {
                    if const { K::AT_ONCE >= 4 } {
                        x86::avx512::<_, Several<Zmm, 4>>(kernel, at);
                    }
                }
                #[cfg(target_arch = "x86_64")]
                (Level::Avx512, 32) => {
                    if const { K::AT_ONCE >= 2 } {
                        x86::avx512::<_, Several<Zmm, 2>>(kernel, at);
                    }
                }
                #[cfg(target_arch = "x86_64")]
                (Level::Avx512, 16) => x86::avx512::<_, Zmm>(kernel, at),
                #[cfg(target_arch = "x86_64")]
                (Level::Avx512, _) => x86::avx512::<_, Ymm>(kernel, at),
                #[cfg(target_arch = "x86_64")]
                (Level::Avx2, 64) => {
                    if const { K::AT_ONCE >= 4 } {
                        x86::avx2::<_, Several<Ymm, 8>>(kernel, at);
                    }
                }
                #[cfg(target_arch = "x86_64")]
                (Level::Avx2, 32) => {
                    if const { K::AT_ONCE >= 4 } {
                        x86::avx2::<_, Several<Ymm, 4>>(kernel, at);
                    }
                }
                #[cfg(target_arch = "x86_64")]
                (Level::Avx2, 16) => {
                    if const { K::AT_ONCE >= 4 } {
                        x86::avx2::<_, Several<Ymm, 2>>(kernel, at);
                    }
                }
                #[cfg(target_arch = "x86_64")]
                (Level::Avx2, _) => x86::avx2::<_, Ymm>(kernel, at),
                #[cfg(target_arch = "aarch64")]
                (Level::Neon, 16) => {
                    if const { K::AT_ONCE >= 4 } {
                        run::<_, Several<Quad, 4>>(kernel, at);
                    }
                }
                #[cfg(target_arch = "aarch64")]
                (Level::Neon, 8) => {
                    if const { K::AT_ONCE >= 2 } {
                        run::<_, Several<Quad, 2>>(kernel, at);
                    }
                }
                #[cfg(target_arch = "aarch64")]
                (Level::Neon, _) => run::<_, Quad>(kernel, at),
                _ => run::<_, Lanes8>(kernel, at),
            }
        }
        first += width;
    }
}

/// # Safety
/// As [`ChannelKernel::run`].
#[inline(always)]
unsafe fn run<K: ChannelKernel, S: Simd>(kernel: &mut K, at: ChannelRange) {
    // SAFETY: the caller's promise.
    unsafe {
        if at.count == S::LANES / S::PIXELS {
            kernel.run::<S, true>(at)
        } else {
            kernel.run::<S, false>(at)
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{ChannelKernel, ChannelRange, Simd, run};

    /// # Safety
    /// As [`ChannelKernel::run`].
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2<K: ChannelKernel, S: Simd>(kernel: &mut K, at: ChannelRange) {
        // SAFETY: the caller's promise.
        unsafe { run::<K, S>(kernel, at) }
    }

    /// # Safety
    /// As [`ChannelKernel::run`].
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    pub(super) unsafe fn avx512<K: ChannelKernel, S: Simd>(kernel: &mut K, at: ChannelRange) {
        // SAFETY: the caller's promise.
        unsafe { run::<K, S>(kernel, at) }
    }
}

//! Sums per channel over `[pixels][C]`, shared by batch norm, group norm and bias gradients.

use crate::Isa;
use crate::lanes::{ChannelKernel, ChannelRange, MOST, for_channels};
use crate::simd::Simd;

/// Number of pixels that are summed in f32, a quarter in each of four sums; larger sums are f64.
/// The error stays below `RUN/4 + 2` roundings of the sum of magnitudes.
pub const RUN: usize = 256;

/// Independent sums, each of every fourth pixel: an addition need not wait for the one before.
const CHAINS: usize = 4;

/// Adds to `sums` and `squares` `[C]` the sums over the pixels of `x` `[pixels][C]` of `x − shift`
/// and of its square.
pub(crate) fn add_shifted(
    isa: Isa,
    x: &[f32],
    shift: &[f32],
    sums: &mut [f64],
    squares: &mut [f64],
) {
    for_channels(isa, shift.len(), &mut ShiftedSums { x, shift, sums, squares });
}

/// Adds to `to` `[C]` the sums over the pixels of `x` `[pixels][C]`.
pub(crate) fn add_channel_sums(isa: Isa, x: &[f32], to: &mut [f32]) {
    for_channels(isa, to.len(), &mut PlainSums { x, to });
}

struct ShiftedSums<'a> {
    x: &'a [f32],
    shift: &'a [f32],
    sums: &'a mut [f64],
    squares: &'a mut [f64],
}

impl ChannelKernel for ShiftedSums<'_> {
    const AT_ONCE: usize = 2;

    fn pixels(&self) -> usize {
        self.x.len() / self.shift.len().max(1)
    }

    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        let (c, step) = (self.shift.len(), self.shift.len() * S::PIXELS);
        // SAFETY: the caller's promise; loads check their bounds.
        unsafe {
            let shift = at.coefficients::<S, WHOLE>(self.shift);
            let zero = S::splat(0.0);
            for x in self.x.chunks(RUN * c) {
                let (mut sum, mut square) = ([zero; CHAINS], [zero; CHAINS]);
                let whole = x.len() - x.len() % (CHAINS * step);
                for pixel in (0..whole).step_by(CHAINS * step) {
                    for k in 0..CHAINS {
                        let d = at.load::<S, WHOLE>(x, pixel + k * step).sub(shift);
                        sum[k] = sum[k].add(d);
                        square[k] = d.mul_add(d, square[k]);
                    }
                }
                for pixel in (whole..x.len()).step_by(step) {
                    let d = at.load::<S, WHOLE>(x, pixel).sub(shift);
                    sum[0] = sum[0].add(d);
                    square[0] = d.mul_add(d, square[0]);
                }
                at.flush(total(sum), self.sums);
                at.flush(total(square), self.squares);
            }
        }
    }
}

struct PlainSums<'a> {
    x: &'a [f32],
    to: &'a mut [f32],
}

impl ChannelKernel for PlainSums<'_> {
    const AT_ONCE: usize = 4;

    fn pixels(&self) -> usize {
        self.x.len() / self.to.len().max(1)
    }

    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        let (c, step) = (self.to.len(), self.to.len() * S::PIXELS);
        let mut sums = [0f64; MOST];
        // SAFETY: the caller's promise; loads check their bounds.
        unsafe {
            let zero = S::splat(0.0);
            for x in self.x.chunks(RUN * c) {
                let mut sum = [zero; CHAINS];
                let whole = x.len() - x.len() % (CHAINS * step);
                for pixel in (0..whole).step_by(CHAINS * step) {
                    for k in 0..CHAINS {
                        sum[k] = sum[k].add(at.load::<S, WHOLE>(x, pixel + k * step));
                    }
                }
                for pixel in (whole..x.len()).step_by(step) {
                    sum[0] = sum[0].add(at.load::<S, WHOLE>(x, pixel));
                }
                ChannelRange { first: 0, ..at }.flush(total(sum), &mut sums);
            }
        }
        let here = &mut self.to[at.first..at.first + at.count];
        here.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum as f32);
    }
}

/// # Safety
/// As [`ChannelKernel::run`].
#[inline(always)]
unsafe fn total<S: Simd>([a, b, c, d]: [S; CHAINS]) -> S {
    // SAFETY: the caller's promise.
    unsafe { a.add(b).add(c.add(d)) }
}

//! Output pixels from windows: the forward pass, and the gradient of the input.

use super::factors::Factors;
use super::{COLUMNS, Sliding, runs};
use crate::macros::unroll_rows;
use crate::simd::{Simd, fetch_to_write};
use crate::tile::{TileStore, finish};

/// Least number of input channels with which the output is prefetched: with fewer channels the
/// products of a tile take no longer than the prefetch. If the output is in no cache (8→8 @32×32 in
/// a chain of training), prefetching saves a tenth of the time.
const FETCHING: usize = 8;

/// Neighbouring pixels of an output row.
pub(super) struct RowTile {
    /// First channel of the input pixel in the column of the first output pixel, in the first row
    /// of the window that is inside the image.
    a: *const f32,
    /// Stride between rows of the input.
    row: usize,
    /// Rows of the window that are in the image.
    rows: usize,
    /// Channels of the input.
    channels: usize,
    /// Weights of these rows.
    b: *const f32,
    /// Whether there are input pixels left and right of the tile.
    beside: [bool; 2],
    to: TileStore,
}

pub(super) type SlidingKernel = unsafe fn(&RowTile);

/// Destination of [`Sliding::run`].
pub(in super::super) struct SlidingOutput<'a> {
    /// `[N][rows][width][channels]`.
    pub(in super::super) values: &'a mut [f32],
    /// One value for each channel, if any.
    pub(in super::super) bias: Option<&'a [f32]>,
    /// Add to the values.
    pub(in super::super) accumulate: bool,
}

impl Sliding {
    /// Convolves whole images with [packed](Sliding::pack) weights.
    pub(in super::super) fn run(&self, x: &[f32], weights: &[f32], to: SlidingOutput<'_>) {
        let ([ci, co], [in_h, out_h]) = (self.channels, self.rows);
        let (row, image, out_image) =
            (self.width * ci, in_h * self.width * ci, out_h * self.width * co);
        assert_eq!(weights.len(), self.weight_len(), "sliding: weights");
        assert_eq!(x.len() / image * out_image, to.values.len(), "sliding: output");
        assert!(x.len().is_multiple_of(image), "sliding: whole images");
        assert!(to.bias.is_none_or(|bias| bias.len() >= co), "sliding: bias");
        let mut values = to.values;
        for (x, oy) in x.chunks_exact(image).flat_map(|x| (0..out_h).map(move |oy| (x, oy))) {
            let (y, rest) = values.split_at_mut(self.width * co);
            values = rest;
            let inside = self.window_rows(oy);
            let (x, w) = if inside.is_empty() {
                (&[][..], &[][..])
            } else {
                let top = inside.start.wrapping_add_signed(oy as isize + self.first);
                let rows = top * row..(top + inside.len()) * row;
                (&x[rows], &weights[inside.start * self.weight_len() / self.window..])
            };
            for pixels in runs(self.width, self.kernels.tiles.len()) {
                let written = pixels.start * co..pixels.end * co;
                if ci >= FETCHING {
                    // The row after the next.
                    let later = values.get(self.width * co..).unwrap_or_default();
                    fetch_to_write(later.get(written.clone()).unwrap_or_default());
                }
                let tile = RowTile {
                    a: x.as_ptr().wrapping_add(pixels.start * ci),
                    row,
                    rows: inside.len(),
                    channels: ci,
                    b: w.as_ptr(),
                    beside: [pixels.start > 0, pixels.end < self.width],
                    to: TileStore {
                        c: y[written].as_mut_ptr(),
                        c_step: co,
                        last: co,
                        bias: to.bias.map_or(std::ptr::null(), <[f32]>::as_ptr),
                        accumulate: to.accumulate,
                    },
                };
                // SAFETY: the kernel is compiled for `pixels.len()` pixels and an instruction set
                // that the machine has. `x` has the window's rows, and the pixels next to the tile
                // where `beside` is set; the weights are packed for these channels; `y` has the
                // pixels.
                unsafe { self.kernels.tiles[pixels.len() - 1](&tile) };
            }
        }
    }

    /// Rows of the window of output row `oy` that lie in the image.
    fn window_rows(&self, oy: usize) -> std::ops::Range<usize> {
        let top = oy as isize + self.first;
        let start = (-top).max(0) as usize;
        let end = (self.rows[0] as isize - top).max(0) as usize;
        start..end.min(self.window).max(start)
    }
}

/// The kernel: P pixels.
///
/// # Safety
/// The machine has the instructions of `F`, the code is compiled for them, and the tile's pointers
/// cover all elements that it addresses.
#[inline(always)]
pub(super) unsafe fn tile<F: Factors, const P: usize>(t: &RowTile) {
    // SAFETY: the caller's promise covers every address below.
    unsafe {
        let mut sums = [F::Register::splat(0.0); P];
        let (mut a, mut b) = (t.a, t.b);
        for _ in 0..t.rows {
            let mut at = a;
            for _ in 0..t.channels / F::CHANNELS {
                taps::<F, P, true>(t, at, b, &mut sums);
                at = at.add(F::CHANNELS);
                b = b.add(COLUMNS * F::Register::LANES);
            }
            if !t.channels.is_multiple_of(F::CHANNELS) {
                taps::<F, P, false>(t, at, b, &mut sums);
                b = b.add(COLUMNS * F::Register::LANES);
            }
            a = a.wrapping_add(t.row);
        }
        let mut totals = [[F::Total::splat(0.0)]; P];
        unroll_rows!(P, p, {
            totals[p] = [F::total(sums[p])];
        });
        finish(&t.to, &mut totals);
    }
}

/// Adds the products of a row of the window with the channels at `at`. With `WHOLE`, all channels
/// that are multiplied together are read; otherwise only the last channel, and the weights of the
/// missing channel are zero.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn taps<F: Factors, const P: usize, const WHOLE: bool>(
    t: &RowTile,
    mut at: *const f32,
    b: *const f32,
    sums: &mut [F::Register; P],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let left = F::Register::load(b);
        let middle = F::Register::load(b.add(F::Register::LANES));
        let right = F::Register::load(b.add(2 * F::Register::LANES));
        if t.beside[0] {
            sums[0] = input::<F, WHOLE>(at.sub(t.channels)).mul_add(left, sums[0]);
        }
        unroll_rows!(P, p, {
            let x = input::<F, WHOLE>(at);
            if p + 1 < P {
                sums[p + 1] = x.mul_add(left, sums[p + 1]);
            }
            sums[p] = x.mul_add(middle, sums[p]);
            if p > 0 {
                sums[p - 1] = x.mul_add(right, sums[p - 1]);
            }
            at = at.wrapping_add(t.channels);
        });
        if t.beside[1] {
            sums[P - 1] = input::<F, WHOLE>(at).mul_add(right, sums[P - 1]);
        }
    }
}

/// # Safety
/// As [`taps`].
#[inline(always)]
unsafe fn input<F: Factors, const WHOLE: bool>(at: *const f32) -> F::Register {
    // SAFETY: the caller's promise.
    unsafe { if WHOLE { F::input(at) } else { F::Register::broadcast(at) } }
}

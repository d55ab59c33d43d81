//! The gradient of the weights of a depthwise convolution, for windows of three columns.

use std::ops::Range;

use super::{AxisTaps, load};
use crate::conv::ConvShape;
use crate::lanes::{ChannelKernel, ChannelRange, for_channels};
use crate::macros::unroll;
use crate::simd::Simd;
use crate::{Isa, pad16};

/// Most rows of a window, and columns of each window, whose sums stay in registers.
const WINDOW: usize = 3;

/// Most rows that are added to sums in registers before these are written back. With AVX2 four are
/// faster than two (measured at 8 × 8 × 128 to 32 × 32 × 64); more were not tried.
const ROWS: usize = 4;

/// Whether [`weight_gradient`] computes a convolution.
pub(in super::super) const fn sums_in_registers(shape: &ConvShape) -> bool {
    shape.is_depthwise() && shape.kernel[0] <= WINDOW && shape.kernel[1] == WINDOW
}

/// Gradients of the weights for whole images, added to `dw` `[taps][pad16(channels)]`: sums over
/// each of the shape's [blocks](ConvShape::block), which are added in their order. `sums` is
/// scratch, as long as the weights.
pub(in super::super) fn weight_gradient(
    isa: Isa,
    shape: &ConvShape,
    x: &[f32],
    dy: &[f32],
    dw: &mut [f32],
    sums: &mut [f32],
) {
    assert!(sums_in_registers(shape), "depthwise: {shape:?}");
    let axes @ [rows, columns] = [0, 1].map(|axis| AxisTaps::forward(shape, axis));
    let (c, whole_columns, block) = (shape.in_c, columns.whole(), shape.block());
    let (row_len, image) = (columns.outputs * c, rows.size * columns.size * c);
    let to_image = rows.outputs * row_len;
    assert_eq!(x.len() / image * to_image, dy.len(), "depthwise: gradient");
    for (x, dy) in x.chunks(block * image).zip(dy.chunks(block * to_image)) {
        sums.fill(0.0);
        for (x, dy) in x.chunks_exact(image).zip(dy.chunks_exact(to_image)) {
            let mut row = 0;
            while row < rows.outputs {
                let same = |other: &usize| rows.inside(*other) == rows.inside(row);
                let count = (row..rows.outputs).take(ROWS).take_while(same).count();
                let dy = &dy[row * row_len..(row + count) * row_len];
                let (whole, sums) = (whole_columns.clone(), &mut *sums);
                let mut kernel = SumsOfRows { axes, whole, c, x, dy, row, count, sums };
                for_channels(isa, c, &mut kernel);
                row += count;
            }
        }
        dw.iter_mut().zip(&*sums).for_each(|(dw, sum)| *dw += sum);
    }
}

/// Products of rows of the output's gradient with their windows, of which the same rows of taps are
/// inside the image.
struct SumsOfRows<'a> {
    axes: [AxisTaps; 2],
    /// The outputs whose columns of taps are all inside the image.
    whole: Range<usize>,
    c: usize,
    /// The input's image.
    x: &'a [f32],
    /// The rows.
    dy: &'a [f32],
    row: usize,
    count: usize,
    /// `[taps][pad16(c)]`.
    sums: &'a mut [f32],
}

impl ChannelKernel for SumsOfRows<'_> {
    const AT_ONCE: usize = 2;

    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        let padded = pad16(self.c);
        let taps = self.axes[0].taps * WINDOW;
        assert!(at.first + S::LANES <= padded && at.first + at.count <= self.c, "depthwise");
        assert!(taps * padded <= self.sums.len(), "depthwise: sums");
        // SAFETY: the caller's promise, and the lengths: this one's, and those of the image and the
        // row, which `weight_gradient` divides the slices into.
        unsafe {
            match self.axes[0].inside(self.row).len() {
                0 => {}
                1 => self.add::<S, WHOLE, 1>(at),
                2 => self.add::<S, WHOLE, 2>(at),
                _ => self.add::<S, WHOLE, WINDOW>(at),
            }
        }
    }
}

impl SumsOfRows<'_> {
    /// Adds the sums of the `R` rows of the window that are inside the image.
    ///
    /// # Safety
    /// As [`ChannelKernel::run`]; the slices have the elements of the image, the row and the sums.
    #[inline(always)]
    unsafe fn add<S: Simd, const WHOLE: bool, const R: usize>(&mut self, at: ChannelRange) {
        let ([rows, columns], c, padded) = (&self.axes, self.c, pad16(self.c));
        let first = rows.inside(self.row).start;
        let top = (rows.row(self.row) + (first * rows.spacing) as isize) as usize;
        let row_step = rows.spacing * columns.size * c;
        // SAFETY: the caller's promise; taps outside the image are not read.
        unsafe {
            let x = self.x.as_ptr().add(top * columns.size * c + at.first);
            let dy = self.dy.as_ptr().add(at.first);
            let sums = self.sums.as_mut_ptr().add(first * WINDOW * padded + at.first);
            let mut total = [[S::splat(0.0); WINDOW]; R];
            unroll!(R, r, {
                unroll!(WINDOW, k, {
                    total[r][k] = S::load(sums.add((r * WINDOW + k) * padded));
                });
            });
            let of = Factors { x, dy, steps: [row_step, columns.spacing * c], count: at.count };
            for row in 0..self.count {
                let starts = [row * rows.step * columns.size * c, row * columns.outputs * c];
                let places = |output| {
                    let first = columns.row(output) * c as isize + starts[0] as isize;
                    [first, (starts[1] + output * c) as isize]
                };
                // In order, so that only the outputs at the edges test each column of taps.
                for output in 0..self.whole.start {
                    of.add::<S, WHOLE, R>(places(output), columns.inside(output), &mut total);
                }
                for output in self.whole.clone() {
                    of.add::<S, WHOLE, R>(places(output), 0..WINDOW, &mut total);
                }
                for output in self.whole.end..columns.outputs {
                    of.add::<S, WHOLE, R>(places(output), columns.inside(output), &mut total);
                }
            }
            unroll!(R, r, {
                unroll!(WINDOW, k, {
                    total[r][k].store(sums.add((r * WINDOW + k) * padded));
                });
            });
        }
    }
}

/// Addresses of the factors of a row's sums.
struct Factors {
    /// First row of taps in the image, at column 0 of the input.
    x: *const f32,
    /// The output's gradient at column 0.
    dy: *const f32,
    /// Distances between rows and columns of taps.
    steps: [usize; 2],
    /// Channels.
    count: usize,
}

impl Factors {
    /// Adds the products of an output with the taps of these columns; `places` are the offsets of
    /// its first tap, which may be outside, and of its gradient.
    ///
    /// # Safety
    /// As [`SumsOfRows::add`].
    #[inline(always)]
    unsafe fn add<S: Simd, const WHOLE: bool, const R: usize>(
        &self,
        [first, output]: [isize; 2],
        columns: Range<usize>,
        total: &mut [[S; WINDOW]; R],
    ) {
        let [row, column] = self.steps;
        // SAFETY: the caller's promise; taps outside the image are not read.
        unsafe {
            let d = load::<S, WHOLE>(self.dy.offset(output), self.count);
            let x = self.x.wrapping_offset(first);
            unroll!(R, r, {
                unroll!(WINDOW, k, {
                    if columns.contains(&k) {
                        let x = load::<S, WHOLE>(x.wrapping_add(r * row + k * column), self.count);
                        total[r][k] = x.mul_add(d, total[r][k]);
                    }
                });
            });
        }
    }
}

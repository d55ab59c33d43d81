//! Depthwise convolutions: each channel has a filter of its own, so the channels are the lanes.
//!
//! A row of the output is computed for one block of channels after the other. Its input rows stay
//! in the first-level cache. Taps outside the image are left out, so no image is copied to be
//! padded. The gradient of the input is the same over the output's gradient, phase by phase.
//!
//! Windows of at most 3 × 3 taps have kernels for each number of rows and columns of taps. The
//! weights stay in registers over a row, so a multiply-add takes one load, and the sums of
//! neighbouring outputs, which do not wait for each other, hide its latency. Windows of 3 × 3 with
//! stride 1 are computed for four columns of two rows at once (`pairs`). In larger windows
//! [`PIXELS`] neighbouring pixels share each load of a weight. The gradient of the weights keeps
//! the sums of a window of three columns and at most three rows in registers over up to four rows
//! of the output; for other windows it is a `tile` job.

mod pairs;
mod weights;

use pairs::SIDE;
pub(super) use weights::{sums_in_registers, weight_gradient};

use std::ops::Range;

use super::ConvShape;
use super::phases::{AxisPhase, Phase};
use crate::lanes::{ChannelKernel, ChannelRange, for_channels};
use crate::macros::unroll;
use crate::simd::Simd;
use crate::{GradOut, Isa, pad16};

/// Pixels that are computed together: enough sums to hide the latency of a multiply-add.
const PIXELS: usize = 8;

/// Where the taps of the rows, or of the columns, of the output are in the input.
#[derive(Clone, Copy, Debug)]
struct AxisTaps {
    /// Rows of the input.
    size: usize,
    /// Row of the input at the first tap of the first output; it may be outside.
    first: isize,
    /// Rows of the input from one output to the next, and from one tap to the next.
    step: usize,
    spacing: usize,
    taps: usize,
    /// Outputs.
    outputs: usize,
    /// Row of the first output, distance of the next ones, and number of rows of the output's
    /// image.
    to_first: usize,
    to_step: usize,
    to_size: usize,
}

impl AxisTaps {
    fn forward(shape: &ConvShape, axis: usize) -> Self {
        let outputs = [shape.out_h(), shape.out_w()][axis];
        Self {
            size: [shape.in_h, shape.in_w][axis],
            first: -(shape.padding[axis] as isize),
            step: shape.stride[axis],
            spacing: shape.dilation[axis],
            taps: shape.kernel[axis],
            outputs,
            to_first: 0,
            to_step: 1,
            to_size: outputs,
        }
    }

    /// The gradient of the input, from that of the output.
    fn data(shape: &ConvShape, axis: usize, of: &AxisPhase) -> Self {
        Self {
            size: [shape.out_h(), shape.out_w()][axis],
            first: of.start,
            step: 1,
            spacing: of.spacing,
            taps: of.taps,
            outputs: of.len,
            to_first: of.first,
            to_step: shape.stride[axis],
            to_size: [shape.in_h, shape.in_w][axis],
        }
    }

    /// Row of the input at the first tap of an output.
    const fn row(&self, output: usize) -> isize {
        self.first + (output * self.step) as isize
    }

    /// The taps of an output that are inside the image.
    fn inside(&self, output: usize) -> Range<usize> {
        let row = self.row(output);
        // Most taps are neighbours: a division takes as long as several multiply-adds.
        let taps = |rows: isize| match (rows.max(0) as usize, self.spacing) {
            (rows, 1) => rows,
            (rows, spacing) => rows.div_ceil(spacing),
        };
        let (start, end) = (taps(-row), taps(self.size as isize - row).min(self.taps));
        start.min(end)..end
    }

    /// The outputs whose taps are all inside the image.
    fn whole(&self) -> Range<usize> {
        let Some(others) = self.taps.checked_sub(1) else { return 0..self.outputs };
        let start = ((-self.first).max(0) as usize).div_ceil(self.step);
        // Position of the first tap of the last such output, from that of output 0.
        let row = self.size as isize - 1 - (others * self.spacing) as isize - self.first;
        let end = usize::try_from(row).map_or(0, |row| row / self.step + 1).min(self.outputs);
        start.min(end)..end
    }
}

/// A depthwise convolution with its weights.
pub(super) struct Depthwise<'a> {
    rows: AxisTaps,
    columns: AxisTaps,
    whole_columns: Range<usize>,
    /// Whether two rows of outputs may be computed together: windows of 3 × 3 that read
    /// neighbouring rows and columns for neighbours, and at edges lack one column.
    has_pairs: bool,
    channels: usize,
    steps: Steps,
    /// `[taps][pad16(channels)]`.
    weights: &'a [f32],
    /// One value per channel, or none.
    bias: &'a [f32],
}

/// Distances in elements.
#[derive(Clone, Copy)]
struct Steps {
    /// Between rows of taps, columns of taps, and outputs, in the input.
    x: [usize; 3],
    /// Between rows of weights, and weights.
    weights: [usize; 2],
    /// Between outputs.
    to: usize,
}

impl<'a> Depthwise<'a> {
    /// The forward convolution.
    pub(super) fn forward(shape: &ConvShape, weights: &'a [f32], bias: &'a [f32]) -> Self {
        let [rows, columns] = [0, 1].map(|axis| AxisTaps::forward(shape, axis));
        Self::new(shape, [rows, columns], weights, bias)
    }

    /// The gradient of a phase of the input; the weights are in the order of its taps.
    pub(super) fn data(shape: &ConvShape, phase: &Phase, weights: &'a [f32]) -> Self {
        let axes =
            [AxisTaps::data(shape, 0, &phase.rows), AxisTaps::data(shape, 1, &phase.columns)];
        Self::new(shape, axes, weights, &[])
    }

    fn new(
        shape: &ConvShape,
        [rows, columns]: [AxisTaps; 2],
        weights: &'a [f32],
        bias: &'a [f32],
    ) -> Self {
        let (whole_columns, channels) = (columns.whole(), shape.in_c);
        let has_pairs = [rows.taps, columns.taps] == [SIDE; 2]
            && [rows.step, rows.spacing, rows.to_step] == [1; 3]
            && [columns.step, columns.spacing] == [1; 2]
            && (0..whole_columns.start).all(|column| columns.inside(column) == (1..SIDE))
            && (whole_columns.end..columns.outputs).all(|column| columns.inside(column) == (0..2));
        let (c, padded) = (channels, pad16(channels));
        let steps = Steps {
            x: [rows.spacing * columns.size * c, columns.spacing * c, columns.step * c],
            weights: [columns.taps * padded, padded],
            to: columns.to_step * c,
        };
        assert!(rows.taps * columns.taps * padded <= weights.len(), "depthwise: weights");
        let last = columns.to_first + columns.outputs.saturating_sub(1) * columns.to_step;
        assert!(columns.outputs == 0 || last < columns.to_size, "depthwise: columns");
        Self { rows, columns, whole_columns, has_pairs, channels, steps, weights, bias }
    }

    /// Computes whole images.
    pub(super) fn run(&self, isa: Isa, x: &[f32], to: GradOut<'_>) {
        let (rows, columns, c) = (&self.rows, &self.columns, self.channels);
        let (width, row_len) = (columns.size * c, columns.to_size * c);
        let (image, to_image) = (rows.size * width, rows.to_size * row_len);
        assert!(x.len().is_multiple_of(image), "depthwise: whole images");
        assert_eq!(x.len() / image * to_image, to.values.len(), "depthwise: output");
        let each = x.chunks_exact(image).zip(to.values.chunks_exact_mut(to_image));
        for (x, y) in each {
            let mut row = 0;
            while row < rows.outputs {
                let (outputs, first_tap) = match self.pair(row) {
                    Some(has) => (OutputRows::Two { has }, 0),
                    None => {
                        let taps = rows.inside(row);
                        (OutputRows::One { taps: taps.len() }, taps.start)
                    }
                };
                let top = rows.row(row) + (first_tap * rows.spacing) as isize;
                let (first, count) = (rows.to_first + row * rows.to_step, outputs.count());
                let values = &mut y[first * row_len..(first + count) * row_len];
                let mut kernel = RowKernel {
                    of: self,
                    outputs,
                    x,
                    top: top * width as isize,
                    first_weight: first_tap * self.steps.weights[0],
                    to: GradOut { values, ..to },
                };
                for_channels(isa, c, &mut kernel);
                row += count;
            }
        }
    }

    /// If an output row and the next one can be computed together, whether the first and the last
    /// of the four input rows of their windows are in the image. The others are.
    fn pair(&self, row: usize) -> Option<[bool; 2]> {
        if !self.has_pairs || row + 1 >= self.rows.outputs {
            return None;
        }
        match (self.rows.inside(row), self.rows.inside(row + 1)) {
            (Range { start: top @ 0..2, end: SIDE }, Range { start: 0, end: end @ 2..=SIDE }) => {
                Some([top == 0, end == SIDE])
            }
            _ => None,
        }
    }
}

/// Rows of outputs that are computed together.
#[derive(Clone, Copy)]
enum OutputRows {
    /// One row, with this number of rows of taps in the image.
    One { taps: usize },
    /// Two rows, as [`Depthwise::pair`] says.
    Two { has: [bool; 2] },
}

impl OutputRows {
    const fn count(self) -> usize {
        match self {
            Self::One { .. } => 1,
            Self::Two { .. } => 2,
        }
    }
}

/// One row of the output, or two.
struct RowKernel<'a> {
    of: &'a Depthwise<'a>,
    outputs: OutputRows,
    /// The input's image.
    x: &'a [f32],
    /// Element of the image at the first row of taps that is computed, which for two rows may be
    /// outside.
    top: isize,
    /// Element of the weights at this row of taps.
    first_weight: usize,
    /// The row, or the two rows.
    to: GradOut<'a>,
}

/// Addresses that the pixels of a row have in common.
struct RowTaps<S> {
    /// First tap, at column 0 of the input.
    x: *const f32,
    steps: Steps,
    /// Weights of the first row of taps.
    weights: *const f32,
    bias: Option<S>,
    count: usize,
    accumulate: bool,
}

impl ChannelKernel for RowKernel<'_> {
    const AT_ONCE: usize = 2;

    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        let Depthwise { columns, channels: c, steps, weights, bias, .. } = self.of;
        let padded = steps.weights[1];
        assert!(at.first + S::LANES <= padded && at.first + at.count <= *c, "depthwise: channels");
        // SAFETY: the addresses below are those of taps inside the image, of outputs inside the
        // rows, and of the weights of these taps, whose padding is readable; the lengths were
        // checked here and by `Depthwise`. The rest is the caller's promise.
        unsafe {
            let bias = (!bias.is_empty()).then(|| at.coefficients::<S, WHOLE>(bias));
            let taps = RowTaps {
                x: self.x.as_ptr().wrapping_offset(self.top).wrapping_add(at.first),
                steps: *steps,
                weights: weights.as_ptr().wrapping_add(self.first_weight + at.first),
                bias,
                count: at.count,
                accumulate: self.to.accumulate,
            };
            let to = self.to.values.as_mut_ptr().add(columns.to_first * c + at.first);
            let of = self.of;
            match (self.outputs, columns.taps) {
                (OutputRows::Two { has }, _) => taps.pair::<WHOLE>(of, has, to),
                (OutputRows::One { taps: 1 }, 1) if WHOLE => taps.row::<1, 1>(of, to),
                (OutputRows::One { taps: 1 }, 2) if WHOLE => taps.row::<1, 2>(of, to),
                (OutputRows::One { taps: 1 }, 3) if WHOLE => taps.row::<1, 3>(of, to),
                (OutputRows::One { taps: 2 }, 1) if WHOLE => taps.row::<2, 1>(of, to),
                (OutputRows::One { taps: 2 }, 2) if WHOLE => taps.row::<2, 2>(of, to),
                (OutputRows::One { taps: 2 }, 3) if WHOLE => taps.row::<2, 3>(of, to),
                (OutputRows::One { taps: 3 }, 1) if WHOLE => taps.row::<3, 1>(of, to),
                (OutputRows::One { taps: 3 }, 2) if WHOLE => taps.row::<3, 2>(of, to),
                (OutputRows::One { taps: 3 }, 3) if WHOLE => taps.row::<3, 3>(of, to),
                (OutputRows::One { taps: rows }, _) => taps.any_row::<WHOLE>(of, rows, to),
            }
        }
    }
}

impl<S: Simd> RowTaps<S> {
    /// Computes the outputs of a row from this number of rows of taps.
    ///
    /// # Safety
    /// As [`RowTaps::pixels`].
    #[inline(always)]
    unsafe fn any_row<const WHOLE: bool>(&self, of: &Depthwise<'_>, rows: usize, to: *mut f32) {
        let Depthwise { columns, whole_columns: whole, channels, .. } = of;
        let mut output = 0;
        while output < columns.outputs {
            let x = self.x.wrapping_offset(columns.row(output) * *channels as isize);
            let left = whole.end.saturating_sub(output);
            // SAFETY: the caller's promise.
            unsafe {
                let to = to.add(output * self.steps.to);
                if whole.start > output || left == 0 {
                    self.pixels::<WHOLE, 1>(x, [0..rows, columns.inside(output)], to);
                    output += 1;
                } else if left >= PIXELS {
                    self.pixels::<WHOLE, PIXELS>(x, [0..rows, 0..columns.taps], to);
                    output += PIXELS;
                } else if left >= 4 {
                    self.pixels::<WHOLE, 4>(x, [0..rows, 0..columns.taps], to);
                    output += 4;
                } else {
                    self.pixels::<WHOLE, 1>(x, [0..rows, 0..columns.taps], to);
                    output += 1;
                }
            }
        }
    }

    /// Computes `P` neighbouring outputs from the taps of these rows and columns; `x` is the first
    /// tap of the first row, which may be outside.
    ///
    /// # Safety
    /// As [`ChannelKernel::run`], for addresses inside the image and the row.
    #[inline(always)]
    unsafe fn pixels<const WHOLE: bool, const P: usize>(
        &self,
        x: *const f32,
        [rows, columns]: [Range<usize>; 2],
        to: *mut f32,
    ) {
        let Steps { x: [row, column, step], weights: [weight_row, tap], .. } = self.steps;
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [S::splat(0.0); P];
            for r in rows {
                let weights = self.weights.add(r * weight_row);
                let x = x.wrapping_add(r * row);
                for k in columns.start..columns.end {
                    let weight = S::load(weights.add(k * tap));
                    let x = x.wrapping_add(k * column);
                    unroll!(P, p, {
                        let x = load::<S, WHOLE>(x.wrapping_add(p * step), self.count);
                        sums[p] = x.mul_add(weight, sums[p]);
                    });
                }
            }
            self.put::<WHOLE, P>(sums, to);
        }
    }

    /// Computes the outputs of a row, with the weights of `R` rows and `K` columns of taps in
    /// registers.
    ///
    /// # Safety
    /// As [`RowTaps::pixels`]; there are as many rows and columns of taps.
    #[inline(always)]
    unsafe fn row<const R: usize, const K: usize>(&self, of: &Depthwise<'_>, to: *mut f32) {
        let Depthwise { columns, whole_columns: whole, channels, .. } = of;
        let [row, tap] = self.steps.weights;
        // SAFETY: the caller's promise.
        unsafe {
            let mut weights = [[S::splat(0.0); K]; R];
            unroll!(R, r, {
                unroll!(K, k, {
                    weights[r][k] = S::load(self.weights.add(r * row + k * tap));
                });
            });
            let x = |output| self.x.wrapping_offset(columns.row(output) * *channels as isize);
            for output in (0..whole.start).chain(whole.end..columns.outputs) {
                let to = to.add(output * self.steps.to);
                self.windows::<R, K, 1>(&weights, columns.inside(output), x(output), to);
            }
            let mut output = whole.start;
            while output + 2 <= whole.end {
                let to = to.add(output * self.steps.to);
                self.windows::<R, K, 2>(&weights, 0..K, x(output), to);
                output += 2;
            }
            if output < whole.end {
                let to = to.add(output * self.steps.to);
                self.windows::<R, K, 1>(&weights, 0..K, x(output), to);
            }
        }
    }

    /// Computes `P` neighbouring outputs as [`RowTaps::pixels`] does, in the same order.
    ///
    /// # Safety
    /// As [`RowTaps::row`].
    #[inline(always)]
    unsafe fn windows<const R: usize, const K: usize, const P: usize>(
        &self,
        weights: &[[S; K]; R],
        columns: Range<usize>,
        x: *const f32,
        to: *mut f32,
    ) {
        let [row, column, step] = self.steps.x;
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [S::splat(0.0); P];
            unroll!(R, r, {
                unroll!(K, k, {
                    if columns.contains(&k) {
                        let x = x.wrapping_add(r * row + k * column);
                        for (p, sum) in sums.iter_mut().enumerate() {
                            *sum = S::load(x.wrapping_add(p * step)).mul_add(weights[r][k], *sum);
                        }
                    }
                });
            });
            self.put::<true, P>(sums, to);
        }
    }

    /// Adds bias and old values if there are any, and stores.
    ///
    /// # Safety
    /// As [`RowTaps::pixels`].
    #[inline(always)]
    unsafe fn put<const WHOLE: bool, const P: usize>(&self, mut sums: [S; P], to: *mut f32) {
        let pixel = |p: usize| to.wrapping_add(p * self.steps.to);
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(bias) = self.bias {
                unroll!(P, p, {
                    sums[p] = sums[p].add(bias);
                });
            }
            if self.accumulate {
                unroll!(P, p, {
                    sums[p] = sums[p].add(load::<S, WHOLE>(pixel(p), self.count));
                });
            }
            unroll!(P, p, {
                if WHOLE {
                    sums[p].store(pixel(p));
                } else {
                    sums[p].store_n(pixel(p), self.count);
                }
            });
        }
    }
}

/// The elements of a register, or the first `count` of them.
///
/// # Safety
/// They are readable, and the machine has the instructions of `S`.
#[inline(always)]
unsafe fn load<S: Simd, const WHOLE: bool>(p: *const f32, count: usize) -> S {
    // SAFETY: the caller's promise.
    unsafe { if WHOLE { S::load(p) } else { S::load_n(p, count) } }
}

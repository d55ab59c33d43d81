//! Depthwise convolutions: each channel has a filter of its own, so the channels are the lanes.
//!
//! A row of the output is computed for one block of channels after the other. Its input rows stay
//! in the first-level cache. Taps outside the image are left out, so no image is copied to be
//! padded. The gradient of the input is the same over the output's gradient, phase by phase.
//!
//! Windows of at most 3 × 3 taps have kernels for each number of rows and columns of taps. The
//! weights stay in registers over a row, so a multiply-add takes one load, and the sums of
//! neighbouring outputs, which do not wait for each other, hide its latency. Two neighbouring rows
//! of windows of 3 × 3 read four rows of the input instead of six. In larger windows
//! [`PIXELS`] neighbouring pixels share each load of a weight. The gradient of the weights keeps
//! the sums of a window of three columns and at most three rows in registers over up to four rows
//! of the output; for other windows it is a `tile` job.

mod weights;

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

/// Rows and columns of the windows of which two rows are computed at once, and the rows of the
/// input that both read together.
const SIDE: usize = 3;
const ROWS_OF_TWO: usize = SIDE + 1;

/// Pixels of each of two rows that are computed together: with the weights in nine registers AVX2
/// has four for sums, and some for elements.
const PIXELS_OF_TWO: usize = 2;

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
    /// Whether two rows of outputs with whole windows may be computed together: windows of 3 × 3
    /// that read neighbouring rows for neighbouring rows, and at edges lack one column.
    has_pairs: bool,
    channels: usize,
    /// `[taps][pad16(channels)]`.
    weights: &'a [f32],
    /// One value per channel, or none.
    bias: &'a [f32],
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
        let has_pairs = [rows.taps, columns.taps] == [3; 2]
            && [rows.step, rows.spacing, rows.to_step] == [1; 3]
            && (0..whole_columns.start).all(|column| columns.inside(column) == (1..3))
            && (whole_columns.end..columns.outputs).all(|column| columns.inside(column) == (0..2));
        Self { rows, columns, whole_columns, has_pairs, channels, weights, bias }
    }

    /// Computes whole images.
    pub(super) fn run(&self, isa: Isa, x: &[f32], to: GradOut<'_>) {
        let (rows, columns, c) = (&self.rows, &self.columns, self.channels);
        let row_len = columns.to_size * c;
        let (image, to_image) = (rows.size * columns.size * c, rows.to_size * row_len);
        assert!(x.len().is_multiple_of(image), "depthwise: whole images");
        assert_eq!(x.len() / image * to_image, to.values.len(), "depthwise: output");
        let each = x.chunks_exact(image).zip(to.values.chunks_exact_mut(to_image));
        for (x, y) in each {
            let mut row = 0;
            while row < rows.outputs {
                let count = if self.is_pair(row) { 2 } else { 1 };
                let start = (rows.to_first + row * rows.to_step) * row_len;
                let to = GradOut { values: &mut y[start..start + count * row_len], ..to };
                for_channels(isa, c, &mut RowKernel { of: self, x, row, count, to });
                row += count;
            }
        }
    }

    /// Whether an output row and the next one, whose windows of 3 × 3 are whole, read neighbouring
    /// rows and are neighbours in their image.
    fn is_pair(&self, row: usize) -> bool {
        let rows = &self.rows;
        let is_whole = |row: usize| row < rows.outputs && rows.inside(row) == (0..3);
        self.has_pairs && is_whole(row) && is_whole(row + 1)
    }
}

/// A row of the output, or two that share input rows ([`Depthwise::is_pair`]).
struct RowKernel<'a> {
    of: &'a Depthwise<'a>,
    /// The input's image.
    x: &'a [f32],
    row: usize,
    count: usize,
    to: GradOut<'a>,
}

/// Addresses that the pixels of a row have in common.
struct RowTaps<S> {
    /// First tap in the image, at column 0 of the input.
    x: *const f32,
    /// Distances between rows of taps, columns of taps, and outputs.
    steps: [usize; 3],
    rows: usize,
    /// Weights of the first row that is in the image, and distances between rows and taps.
    weights: *const f32,
    weight_steps: [usize; 2],
    bias: Option<S>,
    count: usize,
    accumulate: bool,
    to_step: usize,
}

impl ChannelKernel for RowKernel<'_> {
    const AT_ONCE: usize = 2;

    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        let Depthwise { rows, columns, whole_columns, channels: c, weights, bias, .. } = self.of;
        let (inside, width, padded) = (rows.inside(self.row), columns.size * c, pad16(*c));
        assert!(at.first + S::LANES <= padded && at.first + at.count <= *c, "depthwise: channels");
        assert!(rows.taps * columns.taps * padded <= weights.len(), "depthwise: weights");
        let top = rows.row(self.row) + (inside.start * rows.spacing) as isize;
        let last = columns.to_first + columns.outputs.saturating_sub(1) * columns.to_step;
        assert!(last < columns.to_size && columns.to_size * c <= self.to.values.len());
        // SAFETY: the addresses below are those of taps inside the image, of outputs inside the
        // row, and of the weights of these taps, whose padding is readable; the lengths were
        // checked here and by the caller. The rest is the caller's promise.
        unsafe {
            let bias = (!bias.is_empty()).then(|| at.coefficients::<S, WHOLE>(bias));
            let taps = RowTaps {
                x: self.x.as_ptr().wrapping_offset(top * width as isize).wrapping_add(at.first),
                steps: [rows.spacing * width, columns.spacing * c, columns.step * c],
                rows: inside.len(),
                weights: weights
                    .as_ptr()
                    .wrapping_add(inside.start * columns.taps * padded + at.first),
                weight_steps: [columns.taps * padded, padded],
                bias,
                count: at.count,
                accumulate: self.to.accumulate,
                to_step: columns.to_step * c,
            };
            let to = self.to.values.as_mut_ptr().add(columns.to_first * c + at.first);
            if self.count == 2 {
                return taps.pair::<WHOLE>(self.of, to, columns.to_size * c);
            }
            if WHOLE {
                let of = self.of;
                match [taps.rows, columns.taps] {
                    [1, 1] => return taps.row::<1, 1>(of, to),
                    [1, 2] => return taps.row::<1, 2>(of, to),
                    [1, 3] => return taps.row::<1, 3>(of, to),
                    [2, 1] => return taps.row::<2, 1>(of, to),
                    [2, 2] => return taps.row::<2, 2>(of, to),
                    [2, 3] => return taps.row::<2, 3>(of, to),
                    [3, 1] => return taps.row::<3, 1>(of, to),
                    [3, 2] => return taps.row::<3, 2>(of, to),
                    [3, 3] => return taps.row::<3, 3>(of, to),
                    _ => {}
                }
            }
            let mut output = 0;
            while output < columns.outputs {
                let start = taps.x.wrapping_offset(columns.row(output) * *c as isize);
                let to = to.add(output * taps.to_step);
                let left = whole_columns.end.saturating_sub(output);
                if whole_columns.start > output || left == 0 {
                    taps.pixels::<WHOLE, 1>(start, columns.inside(output), to);
                    output += 1;
                } else if left >= PIXELS {
                    taps.pixels::<WHOLE, PIXELS>(start, 0..columns.taps, to);
                    output += PIXELS;
                } else if left >= 4 {
                    taps.pixels::<WHOLE, 4>(start, 0..columns.taps, to);
                    output += 4;
                } else {
                    taps.pixels::<WHOLE, 1>(start, 0..columns.taps, to);
                    output += 1;
                }
            }
        }
    }
}

impl<S: Simd> RowTaps<S> {
    /// Computes `P` neighbouring outputs from the taps of these columns; `x` is the first tap of
    /// the first row, which may be outside.
    ///
    /// # Safety
    /// As [`ChannelKernel::run`], for addresses inside the image and the row.
    #[inline(always)]
    unsafe fn pixels<const WHOLE: bool, const P: usize>(
        &self,
        x: *const f32,
        columns: Range<usize>,
        to: *mut f32,
    ) {
        let [row, column, step] = self.steps;
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [S::splat(0.0); P];
            for r in 0..self.rows {
                let weights = self.weights.add(r * self.weight_steps[0]);
                let x = x.wrapping_add(r * row);
                for k in columns.start..columns.end {
                    let weight = S::load(weights.add(k * self.weight_steps[1]));
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
        let [row, tap] = self.weight_steps;
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
                let to = to.add(output * self.to_step);
                self.windows::<R, K, 1>(&weights, columns.inside(output), x(output), to);
            }
            let mut output = whole.start;
            while output + 2 <= whole.end {
                let to = to.add(output * self.to_step);
                self.windows::<R, K, 2>(&weights, 0..K, x(output), to);
                output += 2;
            }
            if output < whole.end {
                let to = to.add(output * self.to_step);
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
        let [row, column, step] = self.steps;
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

    /// Computes two rows of outputs, the second `to_row` elements after the first. Each element
    /// that both read is loaded once, and the weights are loaded once for both.
    ///
    /// # Safety
    /// As [`RowTaps::pixels`], for [`Depthwise::is_pair`].
    #[inline(always)]
    unsafe fn pair<const WHOLE: bool>(&self, of: &Depthwise<'_>, to: *mut f32, to_row: usize) {
        let Depthwise { columns, whole_columns: whole, channels, .. } = of;
        let [row, tap] = self.weight_steps;
        // SAFETY: the caller's promise.
        unsafe {
            let mut weights = [[S::splat(0.0); 3]; 3];
            unroll!(SIDE, r, {
                unroll!(SIDE, k, {
                    weights[r][k] = S::load(self.weights.add(r * row + k * tap));
                });
            });
            let x = |output| self.x.wrapping_offset(columns.row(output) * *channels as isize);
            let mut output = 0;
            while output < columns.outputs {
                let x = x(output);
                let to = to.add(output * self.to_step);
                let to = [to, to.add(to_row)];
                output += if output < whole.start {
                    self.two::<WHOLE, 1, 1, 3>(&weights, x, to)
                } else if output + PIXELS_OF_TWO <= whole.end {
                    self.two::<WHOLE, PIXELS_OF_TWO, 0, 3>(&weights, x, to)
                } else if output < whole.end {
                    self.two::<WHOLE, 1, 0, 3>(&weights, x, to)
                } else {
                    self.two::<WHOLE, 1, 0, 2>(&weights, x, to)
                };
            }
        }
    }

    /// Computes `P` neighbouring outputs of two rows as [`RowTaps::pixels`] does, in the same
    /// order, from the columns `FROM..TO` of their windows. Returns `P`.
    ///
    /// # Safety
    /// As [`RowTaps::pair`].
    #[inline(always)]
    unsafe fn two<const WHOLE: bool, const P: usize, const FROM: usize, const TO: usize>(
        &self,
        weights: &[[S; 3]; 3],
        x: *const f32,
        to: [*mut f32; 2],
    ) -> usize {
        let [row, column, step] = self.steps;
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[S::splat(0.0); P]; 2];
            unroll!(ROWS_OF_TWO, r, {
                unroll!(SIDE, k, {
                    if FROM <= k && k < TO {
                        let x = x.wrapping_add(r * row + k * column);
                        unroll!(P, p, {
                            let x = load::<S, WHOLE>(x.wrapping_add(p * step), self.count);
                            if r < 3 {
                                sums[0][p] = x.mul_add(weights[r % 3][k], sums[0][p]);
                            }
                            if r > 0 {
                                sums[1][p] = x.mul_add(weights[(r + 2) % 3][k], sums[1][p]);
                            }
                        });
                    }
                });
            });
            self.put::<WHOLE, P>(sums[0], to[0]);
            self.put::<WHOLE, P>(sums[1], to[1]);
            P
        }
    }

    /// Adds bias and old values if there are any, and stores.
    ///
    /// # Safety
    /// As [`RowTaps::pixels`].
    #[inline(always)]
    unsafe fn put<const WHOLE: bool, const P: usize>(&self, sums: [S; P], to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            unroll!(P, p, {
                let to = to.add(p * self.to_step);
                let mut sum = sums[p];
                if let Some(bias) = self.bias {
                    sum = sum.add(bias);
                }
                if self.accumulate {
                    sum = sum.add(load::<S, WHOLE>(to, self.count));
                }
                if WHOLE {
                    sum.store(to);
                } else {
                    sum.store_n(to, self.count);
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

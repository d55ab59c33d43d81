//! Depthwise convolutions: each channel has a filter of its own, so the channels are the lanes.
//!
//! A row of the output is computed for one block of channels after the other. Its input rows stay
//! in the first-level cache, and [`PIXELS`] neighbouring pixels share each load of a weight. Taps
//! outside the image are left out, so no image is copied to be padded. The gradient of the input is
//! the same over the output's gradient, phase by phase. The gradient of the weights keeps the sums
//! of a window of 3 × 3 in registers over a row; for larger windows it is a `tile` job.

use std::ops::Range;

use super::ConvShape;
use super::phases::{AxisPhase, Phase};
use crate::kernels::lanes::{ChannelKernel, ChannelRange, for_channels};
use crate::kernels::macros::unroll;
use crate::kernels::simd::Simd;
use crate::kernels::{GradOut, Isa, pad16};

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
        let start = ((-row).max(0) as usize).div_ceil(self.spacing);
        let end = ((self.size as isize - row).max(0) as usize).div_ceil(self.spacing);
        let end = end.min(self.taps);
        start.min(end)..end
    }

    /// The outputs whose taps are all inside the image.
    fn whole(&self) -> Range<usize> {
        let is_whole = |output: &usize| self.inside(*output).len() == self.taps;
        let start = (0..self.outputs).find(is_whole).unwrap_or(self.outputs);
        let count = (start..self.outputs).take_while(is_whole).count();
        start..start + count
    }
}

/// A depthwise convolution with its weights.
pub(super) struct Depthwise<'a> {
    rows: AxisTaps,
    columns: AxisTaps,
    whole_columns: Range<usize>,
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
        Self { rows, columns, whole_columns, channels, weights, bias }
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
            for row in 0..rows.outputs {
                let start = (rows.to_first + row * rows.to_step) * row_len;
                let to = GradOut { values: &mut y[start..start + row_len], ..to };
                for_channels(isa, c, &mut RowKernel { of: self, x, row, to });
            }
        }
    }
}

/// A row of the output.
struct RowKernel<'a> {
    of: &'a Depthwise<'a>,
    /// The input's image.
    x: &'a [f32],
    row: usize,
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
        let Depthwise { rows, columns, whole_columns, channels: c, weights, bias } = self.of;
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

/// Most rows of a window, and columns of each window, whose sums stay in registers.
const WINDOW: usize = 3;

/// Whether [`weight_gradient`] computes a convolution.
pub(super) const fn sums_in_registers(shape: &ConvShape) -> bool {
    shape.is_depthwise() && shape.kernel[0] <= WINDOW && shape.kernel[1] == WINDOW
}

/// Gradients of the weights for whole images, added to `dw` `[taps][pad16(channels)]`: sums over
/// each of the shape's [blocks](ConvShape::block), which are added in their order. `sums` is
/// scratch, as long as the weights.
pub(super) fn weight_gradient(
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
            for (row, dy) in dy.chunks_exact(row_len).enumerate() {
                let (whole, sums) = (whole_columns.clone(), &mut *sums);
                let mut kernel = SumsOfRow { axes, whole, c, x, dy, row, sums };
                for_channels(isa, c, &mut kernel);
            }
        }
        dw.iter_mut().zip(&*sums).for_each(|(dw, sum)| *dw += sum);
    }
}

/// Products of a row of the output's gradient with its window.
struct SumsOfRow<'a> {
    axes: [AxisTaps; 2],
    /// The outputs whose columns of taps are all inside the image.
    whole: Range<usize>,
    c: usize,
    /// The input's image.
    x: &'a [f32],
    /// The row.
    dy: &'a [f32],
    row: usize,
    /// `[taps][pad16(c)]`.
    sums: &'a mut [f32],
}

impl ChannelKernel for SumsOfRow<'_> {
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

impl SumsOfRow<'_> {
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
            for output in 0..columns.outputs {
                let d = load::<S, WHOLE>(dy.add(output * c), at.count);
                let x = x.wrapping_offset(columns.row(output) * c as isize);
                let is_whole = self.whole.contains(&output);
                let inside = if is_whole { 0..WINDOW } else { columns.inside(output) };
                unroll!(R, r, {
                    unroll!(WINDOW, k, {
                        if is_whole || inside.contains(&k) {
                            let x = x.wrapping_add(r * row_step + k * columns.spacing * c);
                            let x = load::<S, WHOLE>(x, at.count);
                            total[r][k] = x.mul_add(d, total[r][k]);
                        }
                    });
                });
            }
            unroll!(R, r, {
                unroll!(WINDOW, k, {
                    total[r][k].store(sums.add((r * WINDOW + k) * padded));
                });
            });
        }
    }
}

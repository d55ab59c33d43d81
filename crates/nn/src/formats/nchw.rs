//! The three passes of a convolution over `[N][C][H][W]` (F4): what the NHWC kernels are checked
//! against, and the other side of their benchmark. No plan uses it.
//!
//! It is the usual way for this format: the windows of an image are laid out as a matrix, one row
//! per element of the window, and multiplied with PyTorch's weights `[out][in / groups][kh][kw]` by
//! the tile kernel that the NHWC passes use too. What differs between the two is the format.

use std::ops::Range;

use crate::kernels::conv::{ALIGNMENT, ConvShape, aligned};
use crate::kernels::tile::{self, Job, Layout, Mode, Nest};
use crate::kernels::{Isa, PAD, pad16};

/// A convolution over NCHW, with room for its matrices.
#[derive(Clone, Debug)]
pub(super) struct NchwConv {
    isa: Isa,
    shape: ConvShape,
    /// Windows `[taps · in][pixels]`, or their gradient.
    windows: Vec<f32>,
    /// Output gradient `[out][pixels]`, or `[pixels][out]`.
    gradient: Vec<f32>,
    /// Gradient of the weights `[groups][taps · in][out]`.
    weights: Vec<f32>,
}

/// The sizes of the product of one group in one image.
#[derive(Clone, Copy)]
struct Sizes {
    /// Output pixels.
    pixels: usize,
    /// Elements of a window.
    depth: usize,
    /// Output channels.
    out: usize,
    /// Elements of the group's input channels.
    input: usize,
    /// From row to row of a matrix with pixels as columns: whole vectors and one more, for
    /// multiples of 4 KiB (images of 32 × 32) would put the rows of a tile into the same few lines
    /// of the cache.
    step: usize,
}

impl Sizes {
    fn of(shape: &ConvShape) -> Self {
        let pixels = shape.output().pixels();
        Self {
            pixels,
            depth: shape.taps() * shape.in_c / shape.groups,
            out: shape.out_c / shape.groups,
            input: shape.in_c / shape.groups * shape.input().pixels(),
            step: pad16(pixels) + PAD,
        }
    }
}

impl NchwConv {
    /// Makes room for a shape.
    pub(super) fn new(isa: Isa, shape: ConvShape) -> Self {
        shape.check();
        let Sizes { pixels, depth, out, step, .. } = Sizes::of(&shape);
        let room = |len: usize| vec![0.0; len + ALIGNMENT];
        Self {
            isa,
            shape,
            windows: room(depth * step),
            gradient: room((out * step).max(pixels * pad16(out))),
            weights: vec![0.0; shape.out_c * depth],
        }
    }

    /// Elements of the weights.
    pub(super) fn weight_len(&self) -> usize {
        self.weights.len()
    }

    /// Convolution: `y` `[N][out_c][out_h][out_w]` is overwritten.
    pub(super) fn forward(&mut self, x: &[f32], w: &[f32], y: &mut [f32]) {
        let Self { isa, shape, windows, .. } = self;
        let Sizes { pixels, depth, out, input, step } = Sizes::of(shape);
        let windows = aligned(windows);
        let images = x.chunks_exact(input).zip(y.chunks_exact_mut(out * pixels));
        for (i, (x, y)) in images.enumerate() {
            let w = group_of(w, i % shape.groups, out * depth);
            fill(shape, x, windows);
            let a = Left { values: w, rows: line(out, depth), depth: line(depth, 1) };
            multiply(
                *isa,
                a,
                windows,
                step,
                Product { values: y, step: pixels, cols: pixels },
                false,
            );
        }
    }

    /// Gradient of the input: `dx` `[N][in_c][in_h][in_w]` is overwritten.
    pub(super) fn backward_data(&mut self, dy: &[f32], w: &[f32], dx: &mut [f32]) {
        let Self { isa, shape, windows, gradient, .. } = self;
        let Sizes { pixels, depth, out, input, step } = Sizes::of(shape);
        let (windows, gradient) = (aligned(windows), aligned(gradient));
        let images = dy.chunks_exact(out * pixels).zip(dx.chunks_exact_mut(input));
        for (i, (dy, dx)) in images.enumerate() {
            let w = group_of(w, i % shape.groups, out * depth);
            for (row, dy) in gradient.chunks_exact_mut(step).zip(dy.chunks_exact(pixels)) {
                row[..pixels].copy_from_slice(dy);
            }
            let a = Left { values: w, rows: line(depth, 1), depth: line(out, depth) };
            multiply(
                *isa,
                a,
                gradient,
                step,
                Product { values: windows, step, cols: pixels },
                false,
            );
            dx.fill(0.0);
            add_windows(shape, windows, dx);
        }
    }

    /// Gradient of the weights, added to `dw`.
    pub(super) fn backward_weight(&mut self, x: &[f32], dy: &[f32], dw: &mut [f32]) {
        let Self { isa, shape, windows, gradient, weights } = self;
        let Sizes { pixels, depth, out, input, step } = Sizes::of(shape);
        let (windows, gradient) = (aligned(windows), aligned(gradient));
        weights.fill(0.0);
        let images = x.chunks_exact(input).zip(dy.chunks_exact(out * pixels));
        for (i, (x, dy)) in images.enumerate() {
            let group = i % shape.groups * out * depth;
            let to = &mut weights[group..group + out * depth];
            fill(shape, x, windows);
            for (o, dy) in dy.chunks_exact(pixels).enumerate() {
                for (row, dy) in gradient.chunks_exact_mut(pad16(out)).zip(dy) {
                    row[o] = *dy;
                }
            }
            let a = Left { values: windows, rows: line(depth, step), depth: line(pixels, 1) };
            let to = Product { values: to, step: out, cols: out };
            multiply(*isa, a, gradient, pad16(out), to, true);
        }
        let groups = dw.chunks_exact_mut(out * depth).zip(weights.chunks_exact(out * depth));
        for (dw, from) in groups {
            for (o, dw) in dw.chunks_exact_mut(depth).enumerate() {
                dw.iter_mut().zip(from[o..].iter().step_by(out)).for_each(|(dw, d)| *dw += d);
            }
        }
    }
}

fn group_of(values: &[f32], group: usize, len: usize) -> &[f32] {
    &values[group * len..(group + 1) * len]
}

/// `count` places, `stride` apart.
fn line(count: usize, stride: usize) -> Nest {
    Nest { counts: [1, 1, count], strides: [0, 0, stride] }
}

/// Left factor of a product, with its rows and its columns.
struct Left<'a> {
    values: &'a [f32],
    rows: Nest,
    depth: Nest,
}

/// Destination of a product, with its row step and columns.
struct Product<'a> {
    values: &'a mut [f32],
    step: usize,
    cols: usize,
}

/// `c = a · b`, or `c += a · b`; `b_step` is the row step of `b`.
fn multiply(isa: Isa, a: Left<'_>, b: &[f32], b_step: usize, c: Product<'_>, accumulate: bool) {
    let (mode, b_layout) = (Mode::Broadcast, Layout::Rows(b_step));
    let (Left { values: a, rows, depth }, Product { values: c, step: c_step, cols }) = (a, c);
    tile::run(
        isa,
        Job { mode, a, rows, depth, b, b_layout, c, c_step, cols, bias: None, accumulate },
    );
}

/// Lays out the windows of the group `x` `[in][in_h][in_w]`, zero in the padding.
fn fill(shape: &ConvShape, x: &[f32], windows: &mut [f32]) {
    for_each_run(shape, |row, inside, at| {
        let row = &mut windows[row];
        row[..inside.start].fill(0.0);
        row[inside.end..].fill(0.0);
        let row = &mut row[inside];
        match shape.stride[1] {
            1 => row.copy_from_slice(&x[at..at + row.len()]),
            stride => {
                row.iter_mut().zip(x[at..].iter().step_by(stride)).for_each(|(to, x)| *to = *x);
            }
        }
    });
}

/// The reverse: adds every element of the windows to its place in `dx`.
fn add_windows(shape: &ConvShape, windows: &[f32], dx: &mut [f32]) {
    for_each_run(shape, |row, inside, at| {
        let row = &windows[row][inside];
        match shape.stride[1] {
            1 => dx[at..at + row.len()].iter_mut().zip(row).for_each(|(dx, d)| *dx += d),
            stride => {
                dx[at..].iter_mut().step_by(stride).zip(row).for_each(|(dx, d)| *dx += d);
            }
        }
    });
}

/// Calls `visit(row, inside, at)` for every element of the window and row of output pixels: where
/// the row lies in the windows, which part of it sees the image, and where that starts in there.
fn for_each_run(shape: &ConvShape, mut visit: impl FnMut(Range<usize>, Range<usize>, usize)) {
    let ConvShape { in_h, in_w, kernel, stride, padding, .. } = *shape;
    let (out_h, out_w) = (shape.out_h(), shape.out_w());
    let Sizes { depth, step, .. } = Sizes::of(shape);
    for element in 0..depth {
        let (channel, tap) = (element / shape.taps(), element % shape.taps());
        let (ky, kx) = (tap / kernel[1], tap % kernel[1]);
        let first = padding[1].saturating_sub(kx).div_ceil(stride[1]).min(out_w);
        let end = (in_w + padding[1]).saturating_sub(kx).div_ceil(stride[1]).min(out_w);
        for oy in 0..out_h {
            let start = element * step + oy * out_w;
            let y = (oy * stride[0] + ky).wrapping_sub(padding[0]);
            // The image is not seen: above or below it, or left or right.
            let (inside, at) = match y < in_h && first < end {
                true => {
                    (first..end, (channel * in_h + y) * in_w + first * stride[1] + kx - padding[1])
                }
                false => (0..0, 0),
            };
            visit(start..start + out_w, inside, at);
        }
    }
}

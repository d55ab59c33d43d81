//! The transforms of two dimensions, over vectors of channels.

use std::array::from_fn;
use std::marker::PhantomData;

use super::super::place::Placement;
use super::TAPS;
use super::points::Points;
use crate::kernels::lanes::{ChannelKernel, Channels};
use crate::kernels::simd::Simd;
use crate::kernels::{GradOut, ImageShape, PAD};

/// The tiles of a block of images.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    pub(super) h: usize,
    pub(super) w: usize,
    /// Rows, and columns, of outputs of a tile.
    pub(super) outputs: usize,
    pub(super) images: usize,
}

impl Grid {
    /// Rows and columns of tiles of an image.
    fn tiles(&self) -> [usize; 2] {
        [self.h.div_ceil(self.outputs), self.w.div_ceil(self.outputs)]
    }

    /// Points of a tile.
    pub(super) fn points(&self) -> usize {
        (self.outputs + 2) * (self.outputs + 2)
    }

    /// Tiles of so many images.
    pub(super) fn tiles_of(&self, images: usize) -> usize {
        images * self.tiles()[0] * self.tiles()[1]
    }

    /// Elements from one point of all tiles to the next: an odd number of cache lines, as points
    /// that are a power of two apart would have few places in a cache.
    pub(super) fn plane(&self, c: usize) -> usize {
        let lines = (self.tiles_of(self.images) * c).div_ceil(PAD);
        (lines | 1) * PAD
    }

    /// Image, row and column of the first output of each tile.
    fn each(self) -> impl Iterator<Item = [usize; 3]> {
        let [rows, columns] = self.tiles();
        let of = move |n| {
            (0..rows).flat_map(move |i| {
                (0..columns).map(move |j| [n, i * self.outputs, j * self.outputs])
            })
        };
        (0..self.images).flat_map(of)
    }

    /// Images with a halo of zeros, and with as many rows and columns as the tiles read.
    pub(super) fn placement(&self, c: usize) -> Placement {
        let [rows, columns] = self.tiles().map(|tiles| tiles * self.outputs + 2);
        Placement {
            image: ImageShape { batch: 1, h: self.h, w: self.w, c },
            channels: [0, c],
            size: [rows, columns, c],
            origin: [1, 1],
            dilation: [1, 1],
        }
    }
}

/// Points of images, from their copy with a halo.
pub(super) struct Input<'a, P, const M: usize, const T: usize> {
    grid: Grid,
    c: usize,
    padded: &'a [f32],
    points: &'a mut [f32],
    of: PhantomData<P>,
}

impl<'a, P, const M: usize, const T: usize> Input<'a, P, M, T> {
    pub(super) fn new(grid: Grid, c: usize, padded: &'a [f32], points: &'a mut [f32]) -> Self {
        Self { grid, c, padded, points, of: PhantomData }
    }
}

impl<P: Points<M, T>, const M: usize, const T: usize> ChannelKernel for Input<'_, P, M, T> {
    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: Channels) {
        let Self { grid, c, padded, .. } = *self;
        let strides = grid.placement(c).strides();
        let plane = grid.plane(c);
        // SAFETY: the caller's promise; loads and stores check their bounds.
        unsafe {
            for (tile, [n, i, j]) in grid.each().enumerate() {
                let from = n * strides.image + i * strides.row + j * strides.pixel;
                let mut half = [[S::splat(0.0); T]; T];
                for x in 0..T {
                    let column = from_fn(|y| {
                        at.load::<S, WHOLE>(padded, from + y * strides.row + x * strides.pixel)
                    });
                    let column = P::input(column);
                    for y in 0..T {
                        half[y][x] = column[y];
                    }
                }
                for y in 0..T {
                    let row = P::input(half[y]);
                    for x in 0..T {
                        let to = (y * T + x) * plane + tile * c;
                        at.store::<S, WHOLE>(row[x], self.points, to);
                    }
                }
            }
        }
    }
}

/// Points of gradients of the outputs; those beyond the image are zero.
pub(super) struct Gradient<'a, P, const M: usize, const T: usize> {
    grid: Grid,
    c: usize,
    dy: &'a [f32],
    points: &'a mut [f32],
    of: PhantomData<P>,
}

impl<'a, P, const M: usize, const T: usize> Gradient<'a, P, M, T> {
    pub(super) fn new(grid: Grid, c: usize, dy: &'a [f32], points: &'a mut [f32]) -> Self {
        Self { grid, c, dy, points, of: PhantomData }
    }
}

impl<P: Points<M, T>, const M: usize, const T: usize> ChannelKernel for Gradient<'_, P, M, T> {
    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: Channels) {
        let Self { grid, c, dy, .. } = *self;
        let Grid { h, w, .. } = grid;
        let plane = grid.plane(c);
        // SAFETY: the caller's promise; loads and stores check their bounds.
        unsafe {
            let zero = S::splat(0.0);
            for (tile, [n, i, j]) in grid.each().enumerate() {
                let mut half = [[zero; M]; T];
                for x in 0..M {
                    let column = from_fn(|y| match i + y < h && j + x < w {
                        true => at.load::<S, WHOLE>(dy, ((n * h + i + y) * w + j + x) * c),
                        false => zero,
                    });
                    let column = P::gradient(column);
                    for y in 0..T {
                        half[y][x] = column[y];
                    }
                }
                for y in 0..T {
                    let row = P::gradient(half[y]);
                    for x in 0..T {
                        let to = (y * T + x) * plane + tile * c;
                        at.store::<S, WHOLE>(row[x], self.points, to);
                    }
                }
            }
        }
    }
}

/// Outputs from their points; those beyond the image are left out.
pub(super) struct Output<'a, P, const M: usize, const T: usize> {
    grid: Grid,
    points: &'a [f32],
    /// One value per channel, or none.
    bias: &'a [f32],
    to: GradOut<'a>,
    of: PhantomData<P>,
}

impl<'a, P, const M: usize, const T: usize> Output<'a, P, M, T> {
    pub(super) fn new(grid: Grid, points: &'a [f32], bias: &'a [f32], to: GradOut<'a>) -> Self {
        Self { grid, points, bias, to, of: PhantomData }
    }
}

impl<P: Points<M, T>, const M: usize, const T: usize> ChannelKernel for Output<'_, P, M, T> {
    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: Channels) {
        let Self { grid, points, bias, .. } = *self;
        let Grid { h, w, images, .. } = grid;
        let c = self.to.values.len() / (images * h * w);
        let plane = grid.plane(c);
        // SAFETY: the caller's promise; loads and stores check their bounds.
        unsafe {
            let zero = S::splat(0.0);
            let bias = if bias.is_empty() { zero } else { at.load::<S, WHOLE>(bias, 0) };
            for (tile, [n, i, j]) in grid.each().enumerate() {
                let mut half = [[zero; T]; M];
                for x in 0..T {
                    let column =
                        from_fn(|y| at.load::<S, WHOLE>(points, (y * T + x) * plane + tile * c));
                    let column = P::output(column);
                    for y in 0..M {
                        half[y][x] = column[y];
                    }
                }
                for y in 0..M.min(h - i) {
                    let row = P::output(half[y]);
                    for x in 0..M.min(w - j) {
                        let to = ((n * h + i + y) * w + j + x) * c;
                        let mut value = row[x].add(bias);
                        if self.to.accumulate {
                            value = at.load::<S, WHOLE>(self.to.values, to).add(value);
                        }
                        at.store::<S, WHOLE>(value, self.to.values, to);
                    }
                }
            }
        }
    }
}

/// Points of filters: what is one channel elsewhere is here one element of the packed weights.
pub(super) struct Filter<'a, P, const M: usize, const T: usize> {
    taps: &'a [f32],
    points: &'a mut [f32],
    of: PhantomData<P>,
}

impl<'a, P, const M: usize, const T: usize> Filter<'a, P, M, T> {
    pub(super) fn new(taps: &'a [f32], points: &'a mut [f32]) -> Self {
        Self { taps, points, of: PhantomData }
    }
}

impl<P: Points<M, T>, const M: usize, const T: usize> ChannelKernel for Filter<'_, P, M, T> {
    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: Channels) {
        let len = self.taps.len() / TAPS;
        // SAFETY: the caller's promise; loads and stores check their bounds.
        unsafe {
            let mut half = [[S::splat(0.0); 3]; T];
            for x in 0..3 {
                let column = from_fn(|y| at.load::<S, WHOLE>(self.taps, (y * 3 + x) * len));
                let column = P::filter(column);
                for y in 0..T {
                    half[y][x] = column[y];
                }
            }
            for y in 0..T {
                let row = P::filter(half[y]);
                for x in 0..T {
                    at.store::<S, WHOLE>(row[x], self.points, (y * T + x) * len);
                }
            }
        }
    }
}

/// Gradients of filters, added to `dw`, from those of their points.
pub(super) struct FilterGradient<'a, P, const M: usize, const T: usize> {
    points: &'a [f32],
    dw: &'a mut [f32],
    of: PhantomData<P>,
}

impl<'a, P, const M: usize, const T: usize> FilterGradient<'a, P, M, T> {
    pub(super) fn new(points: &'a [f32], dw: &'a mut [f32]) -> Self {
        Self { points, dw, of: PhantomData }
    }
}

impl<P: Points<M, T>, const M: usize, const T: usize> ChannelKernel
    for FilterGradient<'_, P, M, T>
{
    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: Channels) {
        let len = self.dw.len() / TAPS;
        // SAFETY: the caller's promise; loads and stores check their bounds.
        unsafe {
            let mut half = [[S::splat(0.0); T]; 3];
            for x in 0..T {
                let column = from_fn(|y| at.load::<S, WHOLE>(self.points, (y * T + x) * len));
                let column = P::filter_gradient(column);
                for y in 0..3 {
                    half[y][x] = column[y];
                }
            }
            for y in 0..3 {
                let row = P::filter_gradient(half[y]);
                for x in 0..3 {
                    let to = (y * 3 + x) * len;
                    let value = at.load::<S, WHOLE>(self.dw, to).add(row[x]);
                    at.store::<S, WHOLE>(value, self.dw, to);
                }
            }
        }
    }
}

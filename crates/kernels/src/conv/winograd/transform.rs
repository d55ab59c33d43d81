//! The transforms of two dimensions, over vectors of channels: of one tile, or of two neighbouring
//! ones where a vector has room for the channels of both.

use std::marker::PhantomData;

use super::TAPS;
use super::block::{TileBlock, TileGrid, TilePosition};
use super::points::Points;
use crate::lanes::{ChannelKernel, ChannelRange};
use crate::macros::unroll;
use crate::simd::Simd;
use crate::{GradOut, PAD};

/// A tile and the next one; the last tile of an odd number twice.
#[inline(always)]
fn couple(block: &TileBlock, tile: usize, first: TilePosition) -> [TilePosition; 2] {
    [first, if tile + 1 < block.len() { block.after(first) } else { first }]
}

/// Applies a transform to the columns of a square, then to its rows: `$read` makes element
/// `[$y][$x]` of a `$from × $from` square, `$write` takes row `$row` of the result.
macro_rules! two_dimensions {
    ($S:ty, $transform:path, [$from:ident, $to:ident],
     |$y:ident, $x:ident| $read:expr, |$row:ident, $values:ident| $write:block) => {{
        let zero = <$S>::splat(0.0);
        let mut half = [[zero; $from]; $to];
        unroll!($from, $x, {
            let mut column = [zero; $from];
            unroll!($from, $y, {
                column[$y] = $read;
            });
            let column = $transform(column);
            unroll!($to, y, {
                half[y][$x] = column[y];
            });
        });
        unroll!($to, $row, {
            let $values = $transform(half[$row]);
            $write
        });
    }};
}

/// [`two_dimensions!`] with points as the result: row `row`, column `column` is stored `(row · T +
/// column) · plane` floats after `$to`.
macro_rules! to_points {
    ($S:ty, $transform:path, [$from:ident, $to_side:ident], $to:expr, $plane:expr,
     |$y:ident, $x:ident| $read:expr) => {
        two_dimensions!($S, $transform, [$from, $to_side], |$y, $x| $read, |row, values| {
            let to = $to.add(row * $to_side * $plane);
            unroll!($to_side, column, {
                values[column].store(to.add(column * $plane));
            });
        })
    };
}

/// Points of images, from their copy with a halo.
pub(super) struct InputTransform<'a, P, const M: usize, const T: usize> {
    block: TileBlock,
    c: usize,
    padded: &'a [f32],
    points: &'a mut [f32],
    of: PhantomData<P>,
}

impl<'a, P, const M: usize, const T: usize> InputTransform<'a, P, M, T> {
    pub(super) fn new(
        block: TileBlock,
        c: usize,
        padded: &'a [f32],
        points: &'a mut [f32],
    ) -> Self {
        block.check(M);
        assert!(block.padded_len(c) <= padded.len(), "winograd: copy");
        assert!(T * T * block.plane(c) <= points.len(), "winograd: points");
        Self { block, c, padded, points, of: PhantomData }
    }
}

impl<P: Points<M, T>, const M: usize, const T: usize> ChannelKernel
    for InputTransform<'_, P, M, T>
{
    fn pixels(&self) -> usize {
        2
    }

    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        const { assert!(T == M + 2) };
        assert!(WHOLE && at.first + at.count <= self.c, "winograd: whole vectors");
        let Self { block, c, .. } = *self;
        let ([image, row], plane) = (block.strides(c), block.plane(c));
        let from = self.padded[at.first..].as_ptr();
        let to = self.points[at.first..].as_mut_ptr();
        let mut next = TilePosition::default();
        for tile in (0..block.len()).step_by(S::PIXELS) {
            let tiles = couple(&block, tile, next);
            next = block.after(tiles[S::PIXELS - 1]);
            // SAFETY: `new` has checked that the copy has T × T pixels from the first of each tile
            // on, and that the points of each tile are there, two of the last one if a vector has
            // two tiles. The vector's channels are among `c`. The rest is the caller's promise.
            unsafe {
                let at = tiles
                    .map(|of| from.add(of.image * image + of.row * M * row + of.column * M * c));
                let to = to.add(tile * c);
                to_points!(S, P::input, [T, T], to, plane, |y, x| S::load_apart(
                    at,
                    y * row + x * c
                ));
            }
        }
    }
}

/// Points of gradients of the outputs; gradients beyond the image are zero.
pub(super) struct GradientTransform<'a, P, const M: usize, const T: usize> {
    block: TileBlock,
    c: usize,
    dy: &'a [f32],
    points: &'a mut [f32],
    of: PhantomData<P>,
}

impl<'a, P, const M: usize, const T: usize> GradientTransform<'a, P, M, T> {
    /// `dy`: whole images of the block.
    pub(super) fn new(block: TileBlock, c: usize, dy: &'a [f32], points: &'a mut [f32]) -> Self {
        block.check(M);
        assert!(block.images * block.grid.h * block.grid.w * c <= dy.len(), "winograd: gradient");
        assert!(T * T * block.plane(c) <= points.len(), "winograd: points");
        Self { block, c, dy, points, of: PhantomData }
    }
}

impl<P: Points<M, T>, const M: usize, const T: usize> ChannelKernel
    for GradientTransform<'_, P, M, T>
{
    fn pixels(&self) -> usize {
        2
    }

    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        assert!(WHOLE && at.first + at.count <= self.c, "winograd: whole vectors");
        let Self { block, c, .. } = *self;
        let (TileGrid { h, w, .. }, plane) = (block.grid, block.plane(c));
        let from = self.dy[at.first..].as_ptr();
        let to = self.points[at.first..].as_mut_ptr();
        let mut next = TilePosition::default();
        let mut edge = [[0f32; PAD]; PAD];
        for tile in (0..block.len()).step_by(S::PIXELS) {
            let tiles = couple(&block, tile, next);
            next = block.after(tiles[S::PIXELS - 1]);
            let whole = tiles.iter().all(|of| block.inside(*of) == [M; 2]);
            // SAFETY: `new` has checked that the images are there and that the points of each tile
            // are; a tile that is not whole is read from `edge`. The vector's channels are among
            // `c`. The rest is the caller's promise.
            unsafe {
                let start = tiles.map(|of| {
                    let y = (block.first + of.row) * M;
                    from.wrapping_add(((of.image * h + y) * w + of.column * M) * c)
                });
                let to = to.add(tile * c);
                if !whole {
                    edge = [[0.0; PAD]; PAD];
                    let each = S::LANES / S::PIXELS;
                    for (k, of) in tiles.iter().enumerate().take(S::PIXELS) {
                        let [y, x] = block.inside(*of);
                        for (i, j) in (0..y).flat_map(|i| (0..x).map(move |j| (i, j))) {
                            let from = start[k].add((i * w + j) * c);
                            let to = edge[i * M + j][k * each..].as_mut_ptr();
                            std::ptr::copy_nonoverlapping(from, to, each);
                        }
                    }
                }
                let edge = edge.as_flattened().as_ptr();
                to_points!(S, P::gradient, [M, T], to, plane, |y, x| if whole {
                    S::load_apart(start, (y * w + x) * c)
                } else {
                    S::load(edge.add((y * M + x) * PAD))
                });
            }
        }
    }
}

/// Outputs from their points; outputs beyond the image are left out.
pub(super) struct OutputTransform<'a, P, const M: usize, const T: usize> {
    block: TileBlock,
    c: usize,
    points: &'a [f32],
    /// One value per channel, or none.
    bias: &'a [f32],
    to: GradOut<'a>,
    of: PhantomData<P>,
}

impl<'a, P, const M: usize, const T: usize> OutputTransform<'a, P, M, T> {
    /// `to`: whole images of the block.
    pub(super) fn new(
        block: TileBlock,
        c: usize,
        points: &'a [f32],
        bias: &'a [f32],
        to: GradOut<'a>,
    ) -> Self {
        block.check(M);
        let TileGrid { h, w, .. } = block.grid;
        assert!(block.images * h * w * c <= to.values.len(), "winograd: output");
        assert!(T * T * block.plane(c) <= points.len(), "winograd: points");
        Self { block, c, points, bias, to, of: PhantomData }
    }
}

impl<P: Points<M, T>, const M: usize, const T: usize> ChannelKernel
    for OutputTransform<'_, P, M, T>
{
    fn pixels(&self) -> usize {
        2
    }

    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        assert!(WHOLE && at.first + at.count <= self.c, "winograd: whole vectors");
        let Self { block, c, .. } = *self;
        let (TileGrid { h, w, .. }, plane) = (block.grid, block.plane(c));
        let from = self.points[at.first..].as_ptr();
        let to = self.to.values[at.first..].as_mut_ptr();
        let accumulate = self.to.accumulate;
        let mut next = TilePosition::default();
        let mut edge = [[0f32; PAD]; PAD];
        // SAFETY: the caller's promise; the slice has all elements that are read.
        let bias = unsafe {
            if self.bias.is_empty() { S::splat(0.0) } else { at.coefficients::<S, true>(self.bias) }
        };
        for tile in (0..block.len()).step_by(S::PIXELS) {
            let tiles = couple(&block, tile, next);
            next = block.after(tiles[S::PIXELS - 1]);
            let apart = S::PIXELS == 1 || tile + 1 < block.len();
            let whole = apart && tiles.iter().all(|of| block.inside(*of) == [M; 2]);
            // SAFETY: `new` has checked that the points of each tile are there, two of the last one
            // if a vector has two tiles, and the images; outputs of tiles that are not whole go to
            // `edge`, and from there the outputs inside the image. The vector's channels are among
            // `c`. The rest is the caller's promise.
            unsafe {
                let start = tiles.map(|of| {
                    let y = (block.first + of.row) * M;
                    to.wrapping_add(((of.image * h + y) * w + of.column * M) * c)
                });
                let before = start.map(|p| p.cast_const());
                let from = from.add(tile * c);
                let out = edge.as_flattened_mut().as_mut_ptr();
                two_dimensions!(
                    S,
                    P::output,
                    [T, M],
                    |y, x| S::load(from.add((y * T + x) * plane)),
                    |y, values| {
                        unroll!(M, x, {
                            let value = values[x].add(bias);
                            if whole {
                                let pixel = (y * w + x) * c;
                                let value = if accumulate {
                                    S::load_apart(before, pixel).add(value)
                                } else {
                                    value
                                };
                                value.store_apart(start, pixel);
                            } else {
                                value.store(out.add((y * M + x) * PAD))
                            }
                        });
                    }
                );
                if whole {
                    continue;
                }
                let (count, each) = (if apart { S::PIXELS } else { 1 }, S::LANES / S::PIXELS);
                for (k, of) in tiles.iter().enumerate().take(count) {
                    let [y, x] = block.inside(*of);
                    for (i, j) in (0..y).flat_map(|i| (0..x).map(move |j| (i, j))) {
                        let to = start[k].add((i * w + j) * c);
                        for (l, &value) in edge[i * M + j][k * each..][..each].iter().enumerate() {
                            let to = to.add(l);
                            *to = if accumulate { *to + value } else { value };
                        }
                    }
                }
            }
        }
    }
}

/// Transform of filters to points. Each element of the packed weights is handled like a channel.
pub(super) struct FilterTransform<'a, P, const M: usize, const T: usize> {
    taps: &'a [f32],
    points: &'a mut [f32],
    of: PhantomData<P>,
}

impl<'a, P, const M: usize, const T: usize> FilterTransform<'a, P, M, T> {
    pub(super) fn new(taps: &'a [f32], points: &'a mut [f32]) -> Self {
        Self { taps, points, of: PhantomData }
    }
}

impl<P: Points<M, T>, const M: usize, const T: usize> ChannelKernel
    for FilterTransform<'_, P, M, T>
{
    #[inline(always)]
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        let len = self.taps.len() / TAPS;
        // SAFETY: the caller's promise; loads and stores check their bounds.
        unsafe {
            let mut half = [[S::splat(0.0); 3]; T];
            for x in 0..3 {
                let mut column = [S::splat(0.0); 3];
                for (y, value) in column.iter_mut().enumerate() {
                    *value = at.load::<S, WHOLE>(self.taps, (y * 3 + x) * len);
                }
                let column = P::filter(column);
                unroll!(T, y, {
                    half[y][x] = column[y];
                });
            }
            unroll!(T, y, {
                let row = P::filter(half[y]);
                unroll!(T, x, {
                    at.store::<S, WHOLE>(row[x], self.points, (y * T + x) * len);
                });
            });
        }
    }
}

/// Gradients of filters, added to `dw`, from the gradients of their points.
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
    unsafe fn run<S: Simd, const WHOLE: bool>(&mut self, at: ChannelRange) {
        let len = self.dw.len() / TAPS;
        // SAFETY: the caller's promise; loads and stores check their bounds.
        unsafe {
            let mut half = [[S::splat(0.0); T]; 3];
            unroll!(T, x, {
                let mut column = [S::splat(0.0); T];
                unroll!(T, y, {
                    column[y] = at.load::<S, WHOLE>(self.points, (y * T + x) * len);
                });
                let column = P::filter_gradient(column);
                for y in 0..3 {
                    half[y][x] = column[y];
                }
            });
            for y in 0..3 {
                let row = P::filter_gradient(half[y]);
                for (x, row) in row.into_iter().enumerate() {
                    let to = (y * 3 + x) * len;
                    let value = at.load::<S, WHOLE>(self.dw, to).add(row);
                    at.store::<S, WHOLE>(value, self.dw, to);
                }
            }
        }
    }
}

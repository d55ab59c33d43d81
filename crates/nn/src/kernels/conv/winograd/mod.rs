//! Winograd's minimal filtering for 3×3 convolutions with stride 1 and padding 1 (Lavin and Gray,
//! "Fast Algorithms for Convolutional Neural Networks", 2015): fewer multiplications for a larger
//! rounding error.
//!
//! Outputs are computed in tiles of M × M. The T × T inputs of a tile (T = M + 2) and the filters
//! are transformed to T² *points*; for each point the tiles of a block of images are multiplied
//! with the filters, one `tile` job; then the points are transformed to outputs. A tile of 2 × 2
//! takes 16 multiplications in place of 36, one of 4 × 4 takes 36 in place of 144.
//! - forward: `Y = Aᵀ[Σ (G·g·Gᵀ) ⊙ (Bᵀ·d·B)]A`, sums over input channels;
//! - data gradient: the same over `dy`, with flipped and transposed filters;
//! - weight gradient: `dg = Gᵀ[Σ (A·dy·Aᵀ) ⊙ (Bᵀ·d·B)]G`, sums over tiles.
//!
//! A product differs from the exact one by at most `n·2⁻²⁴` of the same formula over magnitudes,
//! with n the roundings on a path: at most 5 for each transform of one dimension, and the terms of
//! the sum. `tests/all/kernels/winograd.rs` has that bound. A value that is not finite spreads to
//! its whole tile.
//!
//! # Memory
//! Points of images are `[T²][tiles][channels]`, points of filters `[T²]` packed weights. A block
//! has so many images that its points stay in the second-level cache.

mod points;
mod transform;

use self::points::{Four, Points, Two};
use self::transform::{Filter, FilterGradient, Gradient, Grid, Input, Output};
use super::{ALIGNMENT, ConvShape, aligned};
use crate::kernels::lanes::for_channels;
use crate::kernels::norm::batch::{Moments, StatsSums, stats_scratch_len};
use crate::kernels::tile::{self, Job, Layout, Mode, Nest};
use crate::kernels::transpose::transpose;
use crate::kernels::{GradOut, Isa, pad16};

/// f32 elements of points that a block of images has at most, if it has more than one image.
const BLOCK: usize = 128 * 1024;

/// Tiles that a block has at least, if the batch does: enough rows for full register tiles.
const TILES: usize = 28;

/// Fewest channels, read and written, with which the products outweigh the transforms.
const CHANNELS_MIN: usize = 16;

/// Taps of a filter.
const TAPS: usize = 9;

/// Outputs of a tile, in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileSize {
    /// 2 × 2.
    Two,
    /// 4 × 4.
    Four,
}

impl TileSize {
    const fn outputs(self) -> usize {
        match self {
            TileSize::Two => 2,
            TileSize::Four => 4,
        }
    }
}

/// A convolution that is computed in tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Winograd {
    /// Shape: 3×3 with stride 1 and padding 1, one group, channels in whole halves of a vector.
    pub shape: ConvShape,
    /// Size of the tiles.
    pub tile: TileSize,
}

/// Points of filters, `[T²]` packed weights: of [`Winograd::filters`] or
/// [`Winograd::turned_filters`].
#[derive(Clone, Copy, Debug)]
pub struct Filters<'a>(&'a [f32]);

/// Inputs of a forward pass.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Input `[N][H][W][in_c]`.
    pub x: &'a [f32],
    /// Points of [`Winograd::filters`].
    pub filters: Filters<'a>,
    /// One value per output channel, or none.
    pub bias: &'a [f32],
}

/// One of the products over images: `read` to `written` channels.
struct Pass<'a> {
    channels: [usize; 2],
    /// How the points of filters lie.
    layout: Layout,
    of: Inputs<'a>,
    to: GradOut<'a>,
}

/// Parts of scratch.
struct Parts<'a> {
    /// A block of images with its halo.
    padded: &'a mut [f32],
    /// Points of what is read.
    input: &'a mut [f32],
    /// Points of what is written.
    output: &'a mut [f32],
    rest: &'a mut [f32],
}

impl Winograd {
    /// The tiles for a convolution, if they save enough multiplications.
    pub fn worthwhile(shape: &ConvShape) -> Option<Self> {
        let few = shape.in_c.min(shape.out_c) < CHANNELS_MIN || shape.batch == 0;
        if !Self::fits(shape) || few {
            return None;
        }
        let sizes = [TileSize::Two, TileSize::Four].map(|tile| Self { shape: *shape, tile });
        sizes.into_iter().min_by_key(|of| of.grid().tiles_of(1) * of.grid().points())
    }

    /// Whether a convolution can be computed so.
    pub fn fits(shape: &ConvShape) -> bool {
        let window = (shape.kernel, shape.stride, shape.padding) == ([3; 2], [1; 2], [1; 2]);
        let whole = shape.in_c.is_multiple_of(8) && shape.out_c.is_multiple_of(8);
        window && whole && shape.groups == 1
    }

    /// Points of packed weights, for a forward pass. Takes [`Winograd::filters_len`] f32 of memory.
    pub fn filters<'a>(&self, isa: Isa, w: &[f32], to: &'a mut [f32]) -> Filters<'a> {
        self.filter_points(isa, self.shape.in_c * pad16(self.shape.out_c), w, aligned(to))
    }

    /// Points of packed weights that are flipped and transposed, for the gradient of the input.
    /// Takes [`Winograd::filters_len`] f32 of memory.
    pub fn turned_filters<'a>(&self, isa: Isa, w: &[f32], to: &'a mut [f32]) -> Filters<'a> {
        let [read, written] = [self.shape.out_c, self.shape.in_c];
        let (from, len) = (written * pad16(read), read * pad16(written));
        let (taps, to) = aligned(to).split_at_mut(TAPS * len);
        for (tap, to) in taps.chunks_exact_mut(len).enumerate() {
            let w = &w[(TAPS - 1 - tap) * from..(TAPS - tap) * from];
            transpose(isa, [written, read], w, to, [read, 0]);
        }
        self.filter_points(isa, len, taps, to)
    }

    /// Memory that filters need in either direction, in f32.
    pub fn filters_len(&self) -> usize {
        let ConvShape { in_c, out_c, .. } = self.shape;
        let turned = (TAPS + self.grid().points()) * out_c * pad16(in_c);
        turned.max(self.filter_len()) + ALIGNMENT
    }

    /// Elements of a forward pass' points of filters.
    fn filter_len(&self) -> usize {
        self.grid().points() * self.shape.in_c * pad16(self.shape.out_c)
    }

    /// Convolution: `y` `[N][H][W][out_c]` is overwritten.
    pub fn forward(&self, isa: Isa, of: Inputs<'_>, y: &mut [f32], scratch: &mut [f32]) {
        self.convolve(isa, of, y, scratch, |_| {});
    }

    /// [`Winograd::forward`], and the [moments](Moments) of its output, gathered while each block
    /// of images is in cache.
    pub fn forward_with_moments(
        &self,
        isa: Isa,
        of: Inputs<'_>,
        y: &mut [f32],
        to: Moments<'_>,
        scratch: &mut [f32],
    ) {
        let (sums, scratch) = scratch.split_at_mut(stats_scratch_len(self.shape.out_c));
        let mut sums = StatsSums::new(sums, self.shape.output());
        self.convolve(isa, of, y, scratch, |images| sums.add(isa, images));
        sums.finish(to);
    }

    fn convolve(
        &self,
        isa: Isa,
        of: Inputs<'_>,
        y: &mut [f32],
        scratch: &mut [f32],
        done: impl FnMut(&[f32]),
    ) {
        let channels @ [_, written] = [self.shape.in_c, self.shape.out_c];
        let layout = Layout::Rows(pad16(written));
        let pass = Pass { channels, layout, of, to: GradOut::overwrite(y) };
        self.pass_tiles(isa, pass, scratch, done);
    }

    /// Gradient with respect to the input, from `dy` `[N][H][W][out_c]` and
    /// [turned filters](Winograd::turned_filters).
    pub fn backward_data(
        &self,
        isa: Isa,
        (dy, turned): (&[f32], Filters<'_>),
        dx: GradOut<'_>,
        scratch: &mut [f32],
    ) {
        let channels = [self.shape.out_c, self.shape.in_c];
        let of = Inputs { x: dy, filters: turned, bias: &[] };
        let pass = Pass { channels, layout: Layout::Panels, of, to: dx };
        self.pass_tiles(isa, pass, scratch, |_| {});
    }

    /// Gradient with respect to the weights, added to `dw`, from `x` and `dy`.
    pub fn backward_weight(
        &self,
        isa: Isa,
        [x, dy]: [&[f32]; 2],
        dw: &mut [f32],
        scratch: &mut [f32],
    ) {
        let mut parts = self.parts(scratch, [self.shape.in_c, self.shape.out_c]);
        match self.tile {
            TileSize::Two => self.weight::<Two, 2, 4>(isa, [x, dy], dw, &mut parts),
            TileSize::Four => self.weight::<Four, 4, 6>(isa, [x, dy], dw, &mut parts),
        }
    }

    /// Scratch that any of the products needs, in f32.
    pub fn scratch_len(&self) -> usize {
        let ConvShape { in_c, out_c, .. } = self.shape;
        let of = |channels| self.lens(channels).iter().map(|len| pad16(*len)).sum::<usize>();
        let most = (of([in_c, out_c]) + self.filter_len()).max(of([out_c, in_c]));
        most + ALIGNMENT + stats_scratch_len(out_c)
    }

    /// Elements of the [`Parts`].
    fn lens(&self, [read, written]: [usize; 2]) -> [usize; 3] {
        let grid = self.grid();
        let points = grid.points();
        let padded = grid.images * grid.placement(read).strides().image;
        [padded, points * grid.plane(read), points * grid.plane(written)]
    }

    /// Images that are computed together.
    pub(crate) fn block(&self) -> usize {
        self.grid().images
    }

    /// Tiles of an image.
    pub(crate) fn image_tiles(&self) -> usize {
        self.grid().tiles_of(1).max(1)
    }

    fn grid(&self) -> Grid {
        let ConvShape { batch, in_h: h, in_w: w, in_c, out_c, .. } = self.shape;
        let one = Grid { h, w, outputs: self.tile.outputs(), images: 1 };
        let tiles = one.tiles_of(1);
        let fit = BLOCK / (one.points() * tiles * (in_c + out_c));
        Grid { images: fit.max(TILES.div_ceil(tiles)).min(batch).max(1), ..one }
    }

    /// Divides scratch; the halo is zero.
    fn parts<'a>(&self, scratch: &'a mut [f32], channels: [usize; 2]) -> Parts<'a> {
        let mut rest = aligned(scratch);
        let [padded, input, output] = self.lens(channels).map(|len| {
            let (part, left) = std::mem::take(&mut rest).split_at_mut(pad16(len));
            rest = left;
            &mut part[..len]
        });
        padded.fill(0.0);
        Parts { padded, input, output, rest }
    }

    fn filter_points<'a>(
        &self,
        isa: Isa,
        len: usize,
        taps: &[f32],
        to: &'a mut [f32],
    ) -> Filters<'a> {
        let (taps, points) = (&taps[..TAPS * len], &mut to[..self.grid().points() * len]);
        match self.tile {
            TileSize::Two => for_channels(isa, len, &mut Filter::<Two, 2, 4>::new(taps, points)),
            TileSize::Four => for_channels(isa, len, &mut Filter::<Four, 4, 6>::new(taps, points)),
        }
        Filters(points)
    }

    fn pass_tiles(&self, isa: Isa, pass: Pass<'_>, scratch: &mut [f32], done: impl FnMut(&[f32])) {
        let mut parts = self.parts(scratch, pass.channels);
        match self.tile {
            TileSize::Two => self.pass::<Two, 2, 4>(isa, pass, &mut parts, done),
            TileSize::Four => self.pass::<Four, 4, 6>(isa, pass, &mut parts, done),
        }
    }

    /// Input points, products, outputs, block by block.
    fn pass<P: Points<M, T>, const M: usize, const T: usize>(
        &self,
        isa: Isa,
        pass: Pass<'_>,
        parts: &mut Parts<'_>,
        mut done: impl FnMut(&[f32]),
    ) {
        let Pass { channels: [read, written], layout, of: Inputs { x, filters, bias }, to } = pass;
        let grid = self.grid();
        let (placement, pixels) = (grid.placement(read), grid.h * grid.w);
        let (x_block, y_block) = (grid.images * pixels * read, grid.images * pixels * written);
        for (x, y) in x.chunks(x_block).zip(to.values.chunks_mut(y_block)) {
            let grid = Grid { images: x.len() / (pixels * read), ..grid };
            let tiles = grid.tiles_of(grid.images);
            placement.copy(x, parts.padded);
            let mut points = Input::<P, M, T>::new(grid, read, parts.padded, parts.input);
            for_channels(isa, read, &mut points);
            let filters = filters.0.chunks_exact(read * pad16(written));
            let inputs = parts.input.chunks_exact(grid.plane(read));
            let outputs = parts.output.chunks_exact_mut(grid.plane(written));
            for ((a, b), c) in inputs.zip(filters).zip(outputs).take(T * T) {
                let job = Job {
                    mode: Mode::Broadcast,
                    a,
                    rows: Nest { counts: [1, 1, tiles], strides: [0, 0, read] },
                    depth: Nest { counts: [1, 1, read], strides: [0, 0, 1] },
                    b,
                    b_layout: layout,
                    c,
                    c_step: written,
                    cols: written,
                    bias: None,
                    accumulate: false,
                };
                tile::run(isa, job);
            }
            let to = GradOut { values: &mut *y, accumulate: to.accumulate };
            let mut outputs = Output::<P, M, T>::new(grid, parts.output, bias, to);
            for_channels(isa, written, &mut outputs);
            done(y);
        }
    }

    /// Points of `x` and of `dy`, products over the tiles of all blocks, gradients of the taps.
    fn weight<P: Points<M, T>, const M: usize, const T: usize>(
        &self,
        isa: Isa,
        [x, dy]: [&[f32]; 2],
        dw: &mut [f32],
        parts: &mut Parts<'_>,
    ) {
        let [read, written] = [self.shape.in_c, self.shape.out_c];
        let grid = self.grid();
        let (placement, pixels) = (grid.placement(read), grid.h * grid.w);
        let len = read * pad16(written);
        let sums = &mut parts.rest[..T * T * len];
        sums.fill(0.0);
        let blocks = x.chunks(grid.images * pixels * read);
        for (x, dy) in blocks.zip(dy.chunks(grid.images * pixels * written)) {
            let grid = Grid { images: x.len() / (pixels * read), ..grid };
            let tiles = grid.tiles_of(grid.images);
            placement.copy(x, parts.padded);
            let mut points = Input::<P, M, T>::new(grid, read, parts.padded, parts.input);
            for_channels(isa, read, &mut points);
            let mut points = Gradient::<P, M, T>::new(grid, written, dy, parts.output);
            for_channels(isa, written, &mut points);
            let inputs = parts.input.chunks_exact(grid.plane(read));
            let outputs = parts.output.chunks_exact(grid.plane(written));
            let filters = sums.chunks_exact_mut(len);
            for ((a, b), c) in inputs.zip(outputs).zip(filters).take(T * T) {
                let job = Job {
                    mode: Mode::Broadcast,
                    a,
                    rows: Nest { counts: [1, 1, read], strides: [0, 0, 1] },
                    depth: Nest { counts: [1, 1, tiles], strides: [0, 0, read] },
                    b,
                    b_layout: Layout::Rows(written),
                    c,
                    c_step: pad16(written),
                    cols: written,
                    bias: None,
                    accumulate: true,
                };
                tile::run(isa, job);
            }
        }
        for_channels(isa, len, &mut FilterGradient::<P, M, T>::new(sums, dw));
    }
}

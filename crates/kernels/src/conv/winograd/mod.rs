//! Winograd's minimal filtering for 3×3 convolutions with stride 1 and padding 1 (Lavin and Gray,
//! "Fast Algorithms for Convolutional Neural Networks", 2015): fewer multiplications for a larger
//! rounding error.
//!
//! # Method
//! Outputs are computed in tiles of M × M. The T × T inputs of a tile (T = M + 2) and the filters
//! are transformed to T² *points*. A convolution is then T² products of matrices, one for each
//! point, and a transform of their results:
//! ```text
//! for each block of tiles:                          image        points      outputs
//!     for each tile: d → V = Bᵀ·d·B                ┌──────┐  Bᵀ·d·B  ┌──────┐
//!     for each point p in T²:                      │T × T │ ───────▸ │T × T │
//!         M[p] = V[p] · U[p]     [tiles][in]       └──────┘          └──┬───┘
//!                                · [in][out]        filter    G·g·Gᵀ    ⊙ Σ over in
//!     for each tile: M → y = Aᵀ·M·A                ┌──────┐ ───────▸ ┌──┴───┐  Aᵀ·M·A  ┌──────┐
//!                                                  │3 × 3 │          │T × T │ ───────▸ │M × M │
//! U = G·g·Gᵀ of the filters, once for a call       └──────┘          └──────┘          └──────┘
//! ```
//! - forward: `Y = Aᵀ[Σ (G·g·Gᵀ) ⊙ (Bᵀ·d·B)]A`, sums over input channels;
//! - data gradient: the same over `dy`, with flipped and transposed filters;
//! - weight gradient: `dg = Gᵀ[Σ (A·dy·Aᵀ) ⊙ (Bᵀ·d·B)]G`, sums over tiles.
//!
//! # Memory
//! Points of images are `[T²][tiles][channels]`, points of filters `[T²]` packed weights. A block
//! has the largest number of tiles whose points fit into the second-level cache: all tiles of some
//! images, or some rows of one image's tiles. Filters are transformed for each call; with more than
//! 256 filters that takes too long for a few images, so such convolutions end a chain
//! (`ops::samples`).
//!
//! # Speed
//! A tile of 2 × 2 takes 16 multiplications rather than 36. A tile of 4 × 4 takes 36, not 144.
//! Products of at most 32 channels have kernels that are compiled for their row lengths, and need
//! no table of row addresses (`product`). Transforms take about half of the time with 8 channels,
//! so two tiles share a vector there (`transform`). Speed in operations of the direct product per
//! second, in tiles of 4 × 4, relative to the 114 GFLOP/s of a Zen 4 core: 2.0 for 8→16 @16×16, 1.6
//! for 8→8 @32×32, 2.6 for 16→32 @8×8.
//!
//! # Assumptions
//! - Channels are multiples of 8, and at least `CHANNELS_MIN`; one group.
//! - A product differs from the exact one by at most `n·2⁻²⁴` of the same formula over magnitudes,
//!   with n the roundings on a path: at most 5 for each transform of one dimension, and the terms
//!   of the sum. `tests/all/winograd.rs` has that bound.
//! - A value that is not finite spreads to its whole tile.
//! - The plan chooses the tiles (`ops::conv::ConvProduct::tiles`). Without tiles an operation is
//!   computed directly; a GPU's kernels are compared with this direct form.

mod block;
mod points;
mod product;
mod transform;

use self::block::{TileBlock, TileGrid};
use self::points::{FourOutputs, Points, TwoOutputs};
use self::product::{PointProduct, PointSums};
use self::transform::{
    FilterGradient, FilterTransform, GradientTransform, InputTransform, OutputTransform,
};
use super::{ALIGNMENT, ConvShape, aligned};
use crate::lanes::for_channels;
use crate::norm::batch::{ChannelMoments, StatsSums, stats_scratch_len};
use crate::tile::MatrixLayout;
use crate::transpose::transpose;
use crate::{GradOut, Isa, pad16};

/// Most f32 elements of a block's points, unless a limit of [`TILES`] tiles permits more.
const BLOCK: usize = 128 * 1024;

/// Most tiles of a block if fewer would fit into [`BLOCK`]: enough rows for full register tiles.
const TILES: usize = 28;

/// Fewest channels, read and written, with which the products outweigh the transforms.
const CHANNELS_MIN: usize = 8;

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
    /// Shape: 3×3 with stride 1 and padding 1, one group, channels in multiples of 8.
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
pub struct WinogradInputs<'a> {
    /// Input `[N][H][W][in_c]`.
    pub x: &'a [f32],
    /// Points of [`Winograd::filters`].
    pub filters: Filters<'a>,
    /// One value per output channel, or none.
    pub bias: &'a [f32],
}

/// One of the products over images: `read` to `written` channels.
struct ImagePass<'a> {
    channels: [usize; 2],
    /// Layout of the points of filters.
    layout: MatrixLayout,
    of: WinogradInputs<'a>,
    to: GradOut<'a>,
}

/// Parts of scratch.
struct ScratchParts<'a> {
    /// A block of images with its halo.
    padded: &'a mut [f32],
    /// Points of the images that are read.
    input: &'a mut [f32],
    /// Points of the images that are written.
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
        sizes.into_iter().min_by_key(|of| of.image_tiles() * of.grid().points())
    }

    /// Whether tiles can compute a convolution.
    pub fn fits(shape: &ConvShape) -> bool {
        let window = (shape.kernel, shape.stride, shape.padding) == ([3; 2], [1; 2], [1; 2]);
        let whole = shape.in_c.is_multiple_of(8) && shape.out_c.is_multiple_of(8);
        let some = shape.in_c > 0 && shape.out_c > 0;
        window && whole && some && shape.groups == 1 && !shape.is_dilated()
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
    pub fn forward(&self, isa: Isa, of: WinogradInputs<'_>, y: &mut [f32], scratch: &mut [f32]) {
        self.convolve(isa, of, y, scratch, |_| {});
    }

    /// [`Winograd::forward`], and the [moments](ChannelMoments) of its output, gathered while each
    /// block of images is in cache.
    pub fn forward_with_moments(
        &self,
        isa: Isa,
        of: WinogradInputs<'_>,
        y: &mut [f32],
        to: ChannelMoments<'_>,
        scratch: &mut [f32],
    ) {
        let (sums, scratch) = scratch.split_at_mut(stats_scratch_len(self.shape.out_c));
        let mut sums = StatsSums::new(sums, self.shape.output());
        self.forward_with_sums(isa, of, y, &mut sums, scratch);
        sums.finish(to);
    }

    /// [`Winograd::forward`], whose output is added to the sums of its [moments](ChannelMoments).
    pub fn forward_with_sums(
        &self,
        isa: Isa,
        of: WinogradInputs<'_>,
        y: &mut [f32],
        sums: &mut StatsSums<'_>,
        scratch: &mut [f32],
    ) {
        self.convolve(isa, of, y, scratch, |images| sums.add(isa, images));
    }

    fn convolve(
        &self,
        isa: Isa,
        of: WinogradInputs<'_>,
        y: &mut [f32],
        scratch: &mut [f32],
        done: impl FnMut(&[f32]),
    ) {
        let channels @ [_, written] = [self.shape.in_c, self.shape.out_c];
        let layout = MatrixLayout::Rows(pad16(written));
        let pass = ImagePass { channels, layout, of, to: GradOut::overwrite(y) };
        self.pass_tiles(isa, pass, scratch, done);
    }

    /// Gradient with respect to the input, from `dy` `[N][H][W][out_c]` and
    /// [turned filters](Winograd::turned_filters).
    pub fn backward_data(
        &self,
        isa: Isa,
        dy: &[f32],
        turned: Filters<'_>,
        dx: GradOut<'_>,
        scratch: &mut [f32],
    ) {
        let channels = [self.shape.out_c, self.shape.in_c];
        let of = WinogradInputs { x: dy, filters: turned, bias: &[] };
        let pass = ImagePass { channels, layout: MatrixLayout::Panels, of, to: dx };
        self.pass_tiles(isa, pass, scratch, |_| {});
    }

    /// Gradient with respect to the weights, added to `dw`, from `x` and `dy`.
    pub fn backward_weight(
        &self,
        isa: Isa,
        x: &[f32],
        dy: &[f32],
        dw: &mut [f32],
        scratch: &mut [f32],
    ) {
        let mut parts = self.parts(scratch, [self.shape.in_c, self.shape.out_c]);
        match self.tile {
            TileSize::Two => self.weight::<TwoOutputs, 2, 4>(isa, x, dy, dw, &mut parts),
            TileSize::Four => self.weight::<FourOutputs, 4, 6>(isa, x, dy, dw, &mut parts),
        }
    }

    /// Scratch that any of the products needs, in f32.
    pub fn scratch_len(&self) -> usize {
        let ConvShape { in_c, out_c, .. } = self.shape;
        let of = |channels| self.lens(channels).iter().map(|len| pad16(*len)).sum::<usize>();
        let most = (of([in_c, out_c]) + self.filter_len()).max(of([out_c, in_c]));
        most + ALIGNMENT + stats_scratch_len(out_c)
    }

    /// Elements of the [`ScratchParts`].
    fn lens(&self, [read, written]: [usize; 2]) -> [usize; 3] {
        let (block, points) = (self.largest(), self.grid().points());
        [block.padded_len(read), points * block.plane(read), points * block.plane(written)]
    }

    /// Images that are computed together: about the same number in each block of the batch.
    pub fn block(&self) -> usize {
        let (batch, most) = (self.shape.batch.max(1), self.largest().images);
        batch.div_ceil(batch.div_ceil(most))
    }

    /// Tiles of an image.
    pub fn image_tiles(&self) -> usize {
        let [rows, columns] = self.grid().tiles();
        (rows * columns).max(1)
    }

    fn grid(&self) -> TileGrid {
        TileGrid { h: self.shape.in_h, w: self.shape.in_w, outputs: self.tile.outputs() }
    }

    /// The largest block: as many whole images, or rows of an image's tiles, as [`BLOCK`] or
    /// [`TILES`] permits; at least one row of tiles.
    fn largest(&self) -> TileBlock {
        let ConvShape { batch, in_c, out_c, .. } = self.shape;
        let (grid, each) = (self.grid(), self.image_tiles());
        let [rows, columns] = grid.tiles();
        let fit = (BLOCK / (grid.points() * (in_c + out_c))).max(TILES);
        let images = (fit / each).clamp(1, batch.max(1));
        // Rows of tiles, about the same number in each block.
        let blocks = rows.div_ceil((fit / columns.max(1)).clamp(1, rows.max(1)));
        TileBlock { grid, images, first: 0, rows: rows.div_ceil(blocks.max(1)) }
    }

    /// The blocks of `images` images, none larger than [`Winograd::largest`].
    fn blocks(&self, images: usize) -> impl Iterator<Item = TileBlock> {
        let (block, all) = (self.largest(), self.grid().tiles()[0]);
        (0..all).step_by(block.rows.max(1)).map(move |first| {
            let rows = block.rows.min(all - first);
            TileBlock { images, first, rows, ..block }
        })
    }

    /// Divides scratch.
    fn parts<'a>(&self, scratch: &'a mut [f32], channels: [usize; 2]) -> ScratchParts<'a> {
        let mut rest = aligned(scratch);
        let [padded, input, output] = self.lens(channels).map(|len| {
            let (part, left) = std::mem::take(&mut rest).split_at_mut(pad16(len));
            rest = left;
            &mut part[..len]
        });
        ScratchParts { padded, input, output, rest }
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
            TileSize::Two => {
                for_channels(isa, len, &mut FilterTransform::<TwoOutputs, 2, 4>::new(taps, points))
            }
            TileSize::Four => {
                for_channels(isa, len, &mut FilterTransform::<FourOutputs, 4, 6>::new(taps, points))
            }
        }
        Filters(points)
    }

    fn pass_tiles(
        &self,
        isa: Isa,
        pass: ImagePass<'_>,
        scratch: &mut [f32],
        done: impl FnMut(&[f32]),
    ) {
        let mut parts = self.parts(scratch, pass.channels);
        match self.tile {
            TileSize::Two => self.pass::<TwoOutputs, 2, 4>(isa, pass, &mut parts, done),
            TileSize::Four => self.pass::<FourOutputs, 4, 6>(isa, pass, &mut parts, done),
        }
    }

    /// Input points, products, outputs, block by block.
    fn pass<P: Points<M, T>, const M: usize, const T: usize>(
        &self,
        isa: Isa,
        pass: ImagePass<'_>,
        parts: &mut ScratchParts<'_>,
        mut done: impl FnMut(&[f32]),
    ) {
        let ImagePass {
            channels: [read, written],
            layout,
            of: WinogradInputs { x, filters, bias },
            to,
        } = pass;
        let (pixels, images) = (self.shape.in_h * self.shape.in_w, self.block());
        let each = x.chunks(images * pixels * read);
        for (x, y) in each.zip(to.values.chunks_mut(images * pixels * written)) {
            for block in self.blocks(x.len() / (pixels * read)) {
                self.input_points::<P, M, T>(isa, block, read, x, parts);
                let filters = filters.0.chunks_exact(read * pad16(written));
                let inputs = parts.input.chunks_exact(block.plane(read));
                let outputs = parts.output.chunks_exact_mut(block.plane(written));
                for ((a, b), c) in inputs.zip(filters).zip(outputs).take(T * T) {
                    let rows = block.len();
                    let of = PointProduct { a, depth: read, b, layout, c, rows, cols: written };
                    of.run(isa);
                }
                let to = GradOut { values: &mut *y, accumulate: to.accumulate };
                let mut outputs =
                    OutputTransform::<P, M, T>::new(block, written, parts.output, bias, to);
                for_channels(isa, written, &mut outputs);
            }
            done(y);
        }
    }

    /// Points of a block of `x`, which has `read` channels.
    fn input_points<P: Points<M, T>, const M: usize, const T: usize>(
        &self,
        isa: Isa,
        block: TileBlock,
        read: usize,
        x: &[f32],
        parts: &mut ScratchParts<'_>,
    ) {
        block.copy(read, x, parts.padded);
        let mut points = InputTransform::<P, M, T>::new(block, read, parts.padded, parts.input);
        for_channels(isa, read, &mut points);
    }

    /// Points of `x` and of `dy`, products over the tiles of all blocks, gradients of the taps.
    fn weight<P: Points<M, T>, const M: usize, const T: usize>(
        &self,
        isa: Isa,
        x: &[f32],
        dy: &[f32],
        dw: &mut [f32],
        parts: &mut ScratchParts<'_>,
    ) {
        let [read, written] = [self.shape.in_c, self.shape.out_c];
        let (pixels, images) = (self.shape.in_h * self.shape.in_w, self.block());
        let len = read * pad16(written);
        parts.rest[..T * T * len].fill(0.0);
        let each = x.chunks(images * pixels * read);
        for (x, dy) in each.zip(dy.chunks(images * pixels * written)) {
            for block in self.blocks(x.len() / (pixels * read)) {
                self.input_points::<P, M, T>(isa, block, read, x, parts);
                let mut points =
                    GradientTransform::<P, M, T>::new(block, written, dy, parts.output);
                for_channels(isa, written, &mut points);
                let inputs = parts.input.chunks_exact(block.plane(read));
                let outputs = parts.output.chunks_exact(block.plane(written));
                let filters = parts.rest.chunks_exact_mut(len);
                for ((a, b), c) in inputs.zip(outputs).zip(filters).take(T * T) {
                    let terms = block.len();
                    PointSums { a, depth: read, b, c, terms, cols: written }.run(isa);
                }
            }
        }
        let sums = &parts.rest[..T * T * len];
        for_channels(isa, len, &mut FilterGradient::<P, M, T>::new(sums, dw));
    }
}

//! Steps of 2-d convolution, and of linear layers, whose shape is [`ConvShape::linear`].
//!
//! Factors are rounded where they are multiplied (see [`Precision`]): images, weights, and the
//! gradient of the output. The gradient of the bias sums unrounded values.

use super::operand::{Signature, StepOperands, f32s, scratch, values};
use crate::kernels::conv::winograd::{self, TileSize, Winograd};
use crate::kernels::conv::{self, ConvInputs, ConvShape, ParamGrads};
use crate::kernels::norm::batch::StatsSums;
use crate::kernels::norm::{self, BatchStats, ChannelMoments};
use crate::kernels::parts::{self, PartScratch};
use crate::kernels::{GradOut, Isa, split_f64};
use crate::precision::Precision;

/// Least number of Winograd tiles in a part of a weight gradient that has more than two parts.
const TILES_OF_PART: usize = 256;

/// Largest number of filters for which transforms take much less time than products, even for a few
/// samples.
const FILTERS: usize = 256;

/// Products of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvProduct {
    /// Shape of the convolution.
    pub shape: ConvShape,
    /// Precision of the factors.
    pub precision: Precision,
    /// Tile size of Winograd's minimal filtering on a processor; `None` for direct products. A GPU
    /// ignores it.
    pub tiles: Option<TileSize>,
}

/// A convolution's forward and backward steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ConvOp {
    /// Reads x, weight, bias (optional); writes y, scratch.
    Forward(ConvProduct),
    /// Like [`ConvOp::Forward`]; also writes mean and variance of y per channel, as operands
    /// between y and scratch.
    ForwardWithStats(ConvProduct),
    /// Reads x, dy; adds to dweight and dbias (optional); scratch.
    WeightGradient(ConvProduct),
    /// Reads dy, weight; writes dx, scratch.
    DataGradient {
        /// Shape and precision.
        product: ConvProduct,
        /// Add to dx.
        accumulate: bool,
    },
}

impl ConvProduct {
    /// Products of unrounded factors.
    pub const fn f32(shape: ConvShape) -> Self {
        Self { shape, precision: Precision::F32, tiles: None }
    }

    fn winograd(&self) -> Option<Winograd> {
        self.tiles.map(|tile| Winograd { shape: self.shape, tile })
    }

    /// The same products over `batch` images.
    pub(super) fn with_batch(&self, batch: usize) -> Self {
        Self { shape: ConvShape { batch, ..self.shape }, ..*self }
    }

    /// Whether the products may be computed for a few samples at a time. Winograd's filtering
    /// transforms its filters each time, so only with few filters.
    pub(crate) fn goes_by_sample(&self) -> bool {
        self.tiles.is_none() || self.shape.in_c * self.shape.out_c <= FILTERS
    }

    /// Number u of images after which products are added to the gradient of the weights: smaller
    /// blocks, of a multiple of u images, give the same bits as blocks of `block` images. `None` if
    /// each block has its own sums, which begin with zeros.
    pub(crate) fn weight_unit(&self, block: usize) -> Option<usize> {
        let direct = self.tiles.is_none() && !self.shape.slides();
        let one_part = self.with_batch(block).weight_images() >= block;
        (direct && one_part).then(|| self.shape.block())
    }

    /// Images of a part of the batch.
    pub(super) fn images(&self) -> usize {
        let shape = &self.shape;
        let block = self.winograd().map_or(shape.block(), |of| of.block());
        let window = shape.taps() * shape.in_c / shape.groups;
        parts::images(shape.batch, block, shape.output().len() / shape.batch.max(1) * window)
    }

    /// Images of a part for the gradient of the weights. In tiles each part transforms its sums
    /// back to taps, which takes as long as the products of some 25 tiles. There are several parts
    /// if there are several of [`ConvProduct::images`].
    pub(super) fn weight_images(&self) -> usize {
        let enough = self.winograd().map_or(1, |of| TILES_OF_PART.div_ceil(of.image_tiles()));
        self.images().max(enough.min(self.shape.batch.div_ceil(2))).max(1)
    }

    /// Number u of images whose moments are summed together: a part in blocks of a multiple of u
    /// images has moments with the same bits as the part in one block. `None` if every other
    /// division changes them.
    pub(super) fn moments_unit(&self) -> Option<usize> {
        // Winograd's filtering begins new sums in each of its blocks, whose size depends on the
        // number of images: that changes no bits only if an image has whole runs of pixels.
        let whole = self.shape.output().pixels().is_multiple_of(norm::batch::RUN);
        match self.winograd() {
            Some(_) => whole.then_some(1),
            None => Some(self.shape.block()),
        }
    }

    /// Scratch of [`ConvProduct::forward_with_sums`].
    pub(super) fn block_scratch_len(&self) -> usize {
        let of = self.winograd();
        of.map_or(self.shape.scratch_len(), |of| of.filters_len() + of.scratch_len())
    }

    /// The forward product of some images of a part, whose output is added to `sums`.
    pub(super) fn forward_with_sums(
        &self,
        isa: Isa,
        of: ConvInputs<'_>,
        y: &mut [f32],
        sums: &mut StatsSums<'_>,
        scratch: &mut [f32],
    ) {
        let Some(tiles) = self.winograd() else {
            return conv::forward_with_sums(isa, &self.shape, &of, y, sums, scratch);
        };
        let ConvInputs { x, w, bias } = of;
        let (filters, scratch) = scratch.split_at_mut(tiles.filters_len());
        let of = winograd::WinogradInputs { x, filters: tiles.filters(isa, w, filters), bias };
        tiles.forward_with_sums(isa, of, y, sums, scratch);
    }

    /// Elements of the gradients of the weights of all parts but the first.
    pub(super) fn sums_len(&self) -> usize {
        let parts = self.shape.batch.div_ceil(self.weight_images());
        parts.saturating_sub(1) * self.shape.weight_len()
    }

    /// Elements of an image, and of its output; not zero.
    fn image_lens(&self) -> [usize; 2] {
        [self.shape.input(), self.shape.output()].map(|of| (of.pixels() * of.c).max(1))
    }

    /// Scratch of one part, of any of its steps.
    fn part_len(&self) -> usize {
        let of = self.with_batch(self.weight_images());
        of.winograd().map_or(of.shape.scratch_len(), |of| of.scratch_len())
    }

    /// Scratch that all parts share: points of filters, and moments of the output's channels, or
    /// gradients of the weights.
    fn shared_len(&self) -> usize {
        let filters = self.winograd().map_or(0, |of| of.filters_len());
        let moments = norm::batch::moments_scratch_len(self.shape.out_c);
        (filters + moments).max(self.sums_len())
    }

    /// Scratch of the operation: the shared scratch, and if there is only one part, that part's.
    fn scratch_len(&self) -> usize {
        let one = self.images() >= self.shape.batch;
        self.shared_len() + if one { self.part_len() } else { 0 }
    }

    /// Divides scratch into the shared scratch and the scratch of one part.
    fn divide<'a>(&self, scratch: &'a mut [f32]) -> (&'a mut [f32], PartScratch<'a>) {
        let (shared, own) = scratch.split_at_mut(self.shared_len());
        (shared, PartScratch { own, of_part: self.part_len() })
    }

    fn forward(
        &self,
        isa: Isa,
        of: ConvInputs<'_>,
        y: &mut [f32],
        stats: Option<BatchStats<'_>>,
        scratch: &mut [f32],
    ) {
        let ConvInputs { x, w, bias } = of;
        let (images, [image, out_image]) = (self.images(), self.image_lens());
        let (shared, scratch) = self.divide(scratch);
        let (sums, filters) = split_f64(shared, parts::MOST * 2 * self.shape.out_c);
        sums.fill(f64::NAN);
        let filters = self.winograd().map(|of| of.filters(isa, w, filters));
        let each = x.chunks(images * image).zip(y.chunks_mut(images * out_image));
        // Without statistics, no part has moments.
        let moments = sums.chunks_exact_mut(2 * self.shape.out_c);
        let moments = moments.map(|of| stats.is_some().then_some(ChannelMoments(of)));
        parts::each(each.zip(moments), scratch, |_, ((x, y), moments), scratch| {
            let part = self.with_batch(x.len() / image);
            match part.winograd().zip(filters) {
                Some((tiles, filters)) => {
                    let of = winograd::WinogradInputs { x, filters, bias };
                    match moments {
                        Some(to) => tiles.forward_with_moments(isa, of, y, to, scratch),
                        None => tiles.forward(isa, of, y, scratch),
                    }
                }
                None => {
                    let (shape, of) = (&part.shape, &ConvInputs { x, w, bias });
                    match moments {
                        Some(to) => conv::forward_with_moments(isa, shape, of, y, to, scratch),
                        None => conv::forward(isa, shape, of, y, scratch),
                    }
                }
            }
        });
        if let Some(to) = stats {
            norm::batch::combine(self.shape.batch, images, sums, to);
        }
    }

    fn weight_gradient(
        &self,
        isa: Isa,
        x: &[f32],
        dy: &[f32],
        dw: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (images, [image, out_image]) = (self.weight_images(), self.image_lens());
        let (shared, scratch) = self.divide(scratch);
        let sums = &mut shared[..self.sums_len()];
        let each = x.chunks(images * image).zip(dy.chunks(images * out_image));
        parts::each(each.zip(parts::sums(dw, sums)), scratch, |_, ((x, dy), dw), scratch| {
            let part = self.with_batch(x.len() / image);
            match part.winograd() {
                Some(tiles) => tiles.backward_weight(isa, x, dy, dw, scratch),
                None => {
                    let to = ParamGrads { dw, db: &mut [] };
                    conv::backward_weight(isa, &part.shape, x, dy, to, scratch);
                }
            }
        });
        parts::add(dw, sums);
    }

    fn data_gradient(&self, isa: Isa, dy: &[f32], w: &[f32], dx: GradOut<'_>, scratch: &mut [f32]) {
        let (images, [image, out_image]) = (self.images(), self.image_lens());
        let accumulate = dx.accumulate;
        let (shared, scratch) = self.divide(scratch);
        let turned = self.winograd().map(|of| of.turned_filters(isa, w, shared));
        let each = dy.chunks(images * out_image).zip(dx.values.chunks_mut(images * image));
        parts::each(each, scratch, |_, (dy, values), scratch| {
            let (part, dx) =
                (self.with_batch(dy.len() / out_image), GradOut { values, accumulate });
            match part.winograd().zip(turned) {
                Some((tiles, turned)) => tiles.backward_data(isa, dy, turned, dx, scratch),
                None => conv::backward_data(isa, &part.shape, dy, w, dx, scratch),
            }
        });
    }
}

impl ConvOp {
    fn product(&self) -> ConvProduct {
        match *self {
            ConvOp::Forward(product)
            | ConvOp::ForwardWithStats(product)
            | ConvOp::WeightGradient(product) => product,
            ConvOp::DataGradient { product, .. } => product,
        }
    }

    pub(super) fn signature(&self) -> Signature {
        let product = self.product();
        let shape = product.shape;
        let [x, y] = [shape.input(), shape.output()].map(|image| values(image.len()));
        let (w, channels) = (f32s(shape.weight_len()), f32s(shape.out_c));
        let (bias, rest) = (channels.optional(), scratch(product.scratch_len()));
        match self {
            ConvOp::Forward(_) => Signature::new(&[x, w, bias], &[y, rest]),
            ConvOp::ForwardWithStats(_) => {
                Signature::new(&[x, w, bias], &[y, channels, channels, rest])
            }
            ConvOp::WeightGradient(_) => Signature::new(&[x, y], &[w, bias, rest]),
            ConvOp::DataGradient { .. } => Signature::new(&[y, w], &[x, rest]),
        }
    }

    /// Rounded factors are copies in newly allocated memory. They define the results that a GPU's
    /// kernels are compared with; no plan of a processor rounds.
    pub(super) fn run(&self, isa: Isa, operands: StepOperands<'_>) {
        let product = self.product();
        let ConvProduct { shape, precision, .. } = &product;
        let round = |factor| precision.rounded(factor);
        match self {
            ConvOp::Forward(_) => {
                let ([x, w, bias], [y, scratch]) = operands.floats();
                let (x, w) = (round(x), round(w));
                let of = ConvInputs { x: &x, w: &w, bias };
                product.forward(isa, of, y, None, scratch);
            }
            ConvOp::ForwardWithStats(_) => {
                let ([x, w, bias], [y, mean, var, scratch]) = operands.floats();
                let (x, w) = (round(x), round(w));
                let of = ConvInputs { x: &x, w: &w, bias };
                product.forward(isa, of, y, Some(BatchStats { mean, var }), scratch);
            }
            ConvOp::WeightGradient(_) => {
                let ([x, dy], [dw, db, scratch]) = operands.floats();
                product.weight_gradient(isa, &round(x), &round(dy), dw, scratch);
                let bias = ParamGrads { dw: &mut [], db };
                conv::backward_weight(isa, shape, x, dy, bias, scratch);
            }
            ConvOp::DataGradient { accumulate, .. } => {
                let ([dy, w], [values, scratch]) = operands.floats();
                let dx = GradOut { values, accumulate: *accumulate };
                product.data_gradient(isa, &round(dy), &round(w), dx, scratch);
            }
        }
    }
}

//! Steps of a convolution together with the batch norm behind it, a block of images at a time: the
//! raw images between the two, or their gradients, stay in the cache and have no place in the
//! arena. Plans for processors have these; a GPU, whose plans have [stages](super::stage), carries
//! them out one after the other.

use super::conv::Product;
use super::norm::BatchNorm;
use super::operand::{Operands, Signature, Slice, SliceMut, f32s, scratch, u8s};
use super::stage::Data;
use crate::kernels::conv::{self, ConvInputs, ConvShape, ParamGrads, aligned};
use crate::kernels::norm::{self, BatchNormBackward, NormGradient};
use crate::kernels::parts::{self, Scratch};
use crate::kernels::{GradOut, Isa};

/// f32 elements of a block's raw images, if it has more than one image: half of a second-level
/// cache of 512 KiB, the smallest one of today's cores.
const BLOCK: usize = 64 * 1024;

/// A convolution and the batch norm behind it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normed {
    /// Convolution.
    pub product: Product,
    /// Batch norm, with what follows it.
    pub norm: BatchNorm,
}

/// Steps over blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// Reads x, weight, bias (optional), mean, variance, γ, β; writes y, scratch.
    Forward(Normed),
    /// Reads x, weight, raw images, mean, variance, γ, β, dy, codes (if pooled), y (if pooled, and
    /// optional); writes dx (if it is wanted); adds to dweight, dγ, dβ; scratch.
    Gradient {
        /// Shapes.
        of: Normed,
        /// The gradient of x: whether it is wanted, and added to dx.
        data: Data,
    },
}

impl Normed {
    /// Whether blocks are as good as the whole batch: images, computed directly.
    pub(crate) fn fits(&self) -> bool {
        let ConvShape { batch, .. } = self.product.shape;
        self.product.tiles.is_none() && batch == self.norm.shape.batch && batch > 1
    }

    /// The convolution of one block. Whole blocks of the convolution's own, so that sums have the
    /// order that they have over a whole part (but for the pairs of pixels of 8 channels, which
    /// are added up at the end of each block).
    fn block(&self) -> ConvShape {
        let shape = self.product.shape;
        let images = BLOCK / self.norm.shape.pixels() / self.norm.shape.c;
        let images = images.max(1).next_multiple_of(shape.block());
        ConvShape { batch: images.min(self.product.images()), ..shape }
    }

    /// Lengths of: gradients of the weights of all parts but the first, the norm's scratch.
    fn own_lens(&self) -> [usize; 2] {
        [self.product.sums_len(), self.norm.scratch_len()].map(|len| len.next_multiple_of(16))
    }

    /// Lengths of a part's scratch: raw elements of a block, scratch of the norm, and of the
    /// convolution.
    fn part_lens(&self) -> [usize; 3] {
        let block = self.block();
        [block.output().len(), self.norm.scratch_len(), block.scratch_len()]
            .map(|len| len.next_multiple_of(16))
    }

    /// Length of a part's scratch.
    fn part_len(&self) -> usize {
        self.part_lens().iter().sum::<usize>() + conv::ALIGNMENT
    }

    fn forward(&self, isa: Isa, operands: Operands<'_>) {
        let ([x, w, bias, mean, var, gamma, beta], [y, own]) = operands.floats();
        let Self { product: Product { shape, .. }, norm } = self;
        let block = self.block();
        let [image, out_image] = [shape.input(), norm.output()].map(|of| of.pixels() * of.c);
        let images = self.product.images();
        let each = x.chunks(images * image).zip(y.chunks_mut(images * out_image));
        let scratch = Scratch { own, of_part: self.part_len() };
        parts::each(each, scratch, |_, (x, y), scratch| {
            let [raw, own, rest] = divide(aligned(scratch), self.part_lens());
            let blocks = x.chunks(block.batch * image).zip(y.chunks_mut(block.batch * out_image));
            for (x, y) in blocks {
                let block = ConvShape { batch: x.len() / image, ..*shape };
                let raw = &mut raw[..block.output().len()];
                conv::forward(isa, &block, &ConvInputs { x, w, bias }, raw, rest);
                let of = norm.inputs([raw, mean, var, gamma, beta]);
                norm::batch_norm_act_forward(isa, &block.output(), &of, y, &mut [], own);
            }
        });
    }

    fn gradient(&self, isa: Isa, data: Data, operands: Operands<'_>) {
        let (reads, writes) = operands.split::<10, 5>();
        let [x, w, z, mean, var, gamma, beta, dout, codes, out] = reads;
        let [x, w, z, mean, var, gamma, beta, dout, out] =
            [x, w, z, mean, var, gamma, beta, dout, out].map(Slice::elements);
        let [dx, dw, dgamma, dbeta, all] = writes.map(SliceMut::elements::<f32>);
        let Self { product: Product { shape, .. }, norm } = self;
        let lens @ [sums, scales] = self.own_lens();
        let (own, rest) = aligned(all).split_at_mut(sums + scales);
        let [sums, scales] = divide(own, lens);
        let sums = &mut sums[..self.product.sums_len()];
        let forward = norm.inputs([z, mean, var, gamma, beta]);
        let of = BatchNormBackward { forward, dout, codes: codes.elements(), out };
        let norms = NormGradient::new(isa, &norm.shape, of, [dgamma, dbeta], scales);
        let (block, images) = (self.block().batch, self.product.images());
        let image = shape.input().pixels() * shape.in_c;
        // Where no gradient of x is wanted, each part has none of it.
        let dx = dx.chunks_mut(images * image).chain(std::iter::repeat_with(Default::default));
        let each = x.chunks(images * image).zip(dx).zip(parts::sums(dw, sums));
        let scratch = Scratch { own: rest, of_part: self.part_len() };
        parts::each(each, scratch, |part, ((x, dx), dw), scratch| {
            let [raw, _, rest] = divide(aligned(scratch), self.part_lens());
            let mut dx = dx.chunks_mut(block * image);
            for (k, x) in x.chunks(block * image).enumerate() {
                let (first, batch) = (part * images + k * block, x.len() / image);
                let block = ConvShape { batch, ..*shape };
                let raw = &mut raw[..block.output().len()];
                norms.images(isa, first..first + batch, GradOut::overwrite(raw));
                let to = ParamGrads { dw: &mut *dw, db: &mut [] };
                conv::backward_weight(isa, &block, x, raw, to, rest);
                if let Some(values) = dx.next() {
                    let to = GradOut { values, accumulate: data == Data::Accumulate };
                    conv::backward_data(isa, &block, raw, w, to, rest);
                }
            }
        });
        parts::add(dw, sums);
    }
}

/// Divides scratch into pieces.
fn divide<const N: usize>(mut rest: &mut [f32], lens: [usize; N]) -> [&mut [f32]; N] {
    lens.map(|len| {
        let (piece, left) = std::mem::take(&mut rest).split_at_mut(len);
        rest = left;
        piece
    })
}

impl Op {
    fn of(&self) -> &Normed {
        match self {
            Op::Forward(of) | Op::Gradient { of, .. } => of,
        }
    }

    pub(super) fn signature(&self) -> Signature {
        let of @ Normed { product: Product { shape, .. }, norm } = self.of();
        let [x, z, y] = [shape.input(), norm.shape, norm.output()].map(|images| f32s(images.len()));
        let (w, c) = (f32s(shape.weight_len()), f32s(shape.out_c));
        let own = of.own_lens().iter().sum::<usize>() + conv::ALIGNMENT;
        let rest = scratch(own + of.part_len());
        match self {
            Op::Forward(_) => Signature::new(&[x, w, c.optional(), c, c, c, c], &[y, rest]),
            Op::Gradient { data, .. } => {
                let pooled = if norm.pool { y.len } else { 0 };
                let (codes, out) = (u8s(pooled), f32s(pooled).optional());
                let dx = f32s(if *data == Data::Unwanted { 0 } else { x.len });
                Signature::new(&[x, w, z, c, c, c, c, y, codes, out], &[dx, w, c, c, rest])
            }
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: Operands<'_>) {
        match self {
            Op::Forward(of) => of.forward(isa, operands),
            Op::Gradient { of, data } => of.gradient(isa, *data, operands),
        }
    }
}

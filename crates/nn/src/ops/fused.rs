//! Fused convolutions: steps of a 3×3 convolution in which batch norm, ReLU and max pooling are
//! computed where the raw output is read, and are not stored if a fused operation is the only
//! reader.
//!
//! # Method
//! *Raw* images are the outputs of a convolution before its batch norm. Every batch norm here is
//! followed by a ReLU, and perhaps by 2×2 max pooling.
//! ```text
//! layers:   conv ─▸ norm ─▸ ReLU ─▸ pool ─▸ conv ─▸ norm ─▸ …
//! steps:   [conv + statistics]─▸ z ─▸[norm, ReLU, pool on load; conv + statistics]─▸ z ─▸ …
//!
//! forward of a block of the GPU:                backward:
//!     for each chunk of input channels:             dz = dy·scale − ((z − mean)·slope + offset)
//!         load z, normalise, pool → shared          dw += window(x)·dz      per slice of images
//!         sums += window · weights                  dx  = window(dz)·w      per tile
//!     z' = sums; partial sums of z', z'²            partial sums of dx for the norm before
//!     last block: mean, variance                    last block: dw, dγ, dβ, coefficients
//! ```
//! The gradient of a norm has coefficients `[3][C]` (scale, offset, slope), which follow from two
//! sums over the batch. The step that computes the gradient of the norm's output writes them if it
//! is a fused convolution's or the classifier's; otherwise [`FusedOp::Sums`] does.
//!
//! The last block is found by a *ticket*, a counter in the arena: each block adds 1 when its sums
//! are in memory, and the block that completes the count adds up the sums of all blocks, in a fixed
//! order. The first step of a plan zeroes all tickets, and the last block sets its ticket to zero
//! again.
//!
//! # Speed
//! Memory traffic is the cost on a GPU. A layer reads its input once and writes its raw output
//! once; separate kernels would write and read the normalised, the rectified and the pooled images
//! as well. Statistics take no pass over the images.
//!
//! # Assumptions
//! - The convolution has stride 1, padding 1, no dilation, one group, no bias, and at most
//!   `CHANNELS_MAX` channels on either side.
//! - Only plans for CUDA have these operations. `plan::fuse` marks the convolutions, and
//!   `plan::lower::fused` emits the steps. The processor's bodies (`reference`) are the definition
//!   that the conformance suite compares with.

mod reference;

use super::conv::ConvProduct;
use super::norm::BatchNorm;
use super::operand::{Signature, Spec, StepOperands, f32s, i64s, u32s, values};
use crate::kernels::conv::ConvShape;
use crate::kernels::{Isa, pad16};
use crate::precision::Precision;

/// Fewest input and output channels of a GPU's block that computes a part of the weights' gradient,
/// if there are several such parts.
const WEIGHT_BLOCK: [usize; 2] = [8, 32];

/// Most channels: a block's shared memory holds their coefficients.
const CHANNELS_MAX: usize = 256;

/// A convolution, and the batch norm before it if that is computed on load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FusedConv {
    /// Shape of the convolution: 3×3 with stride 1 and padding 1, without a bias.
    pub shape: ConvShape,
    /// Batch norm before it, with ReLU and perhaps pooling.
    pub before: Option<BatchNorm>,
    /// Precision of the products' factors: normalised images, weights, raw gradients.
    pub precision: Precision,
}

/// A classifier: a batch norm, the mean of each of its channels, and a linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClassifierHead {
    /// Batch norm, with ReLU and perhaps pooling.
    pub norm: BatchNorm,
    /// Outputs of the linear layer.
    pub classes: usize,
    /// Precision of the products' factors: means, weights, gradients of the outputs.
    pub precision: Precision,
}

/// Operations of fused convolutions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FusedOp {
    /// Writes zeros: the gradient of a group's parameters, and tickets (u32).
    Begin {
        /// Elements of the gradient.
        gradient: usize,
        /// Tickets.
        tickets: usize,
    },
    /// Reads x, and mean, variance, γ, β of the norm before (absent without one), weight; writes
    /// the raw output. In training it also writes mean and variance of the raw output, and updates
    /// running mean, running variance, batches counted (i64); then tickets (u32), scratch.
    Forward {
        /// Shapes.
        conv: FusedConv,
        /// In training, the share of the batch's statistics in the running ones.
        momentum: Option<f32>,
    },
    /// Reads x, and mean, variance, γ, β of the norm before (absent without one), weight; raw
    /// output, mean and β of the norm after, its coefficients; the gradient of that norm's output,
    /// for one pixel of each image if `uniform`. Writes dx, if wanted; adds to dweight. With a norm
    /// before and dx wanted, it also adds to that norm's dγ and dβ and writes its coefficients.
    /// Then tickets (u32), scratch.
    Backward {
        /// Shapes.
        conv: FusedConv,
        /// Norm of the raw output.
        after: BatchNorm,
        /// Whether all pixels of an image have the same gradient.
        uniform: bool,
        /// Destination of the gradient of x.
        data: InputGradient,
    },
    /// Reads raw images, mean, variance, γ, β, gradient of the norm's output; adds to dγ, dβ;
    /// writes coefficients; ticket (u32), scratch.
    Sums(BatchNorm),
    /// Reads raw images, mean, variance, γ, β, weight, bias (optional); writes the means, and the
    /// outputs.
    Head(ClassifierHead),
    /// Reads raw images, mean, variance, γ, β, weight, means, gradient of the outputs; writes the
    /// gradient of one pixel of the norm's output, `[N][C]`; adds to dweight, dbias (optional), dγ,
    /// dβ; writes coefficients; ticket (u32), scratch.
    HeadGradient(ClassifierHead),
}

/// Destination of the gradient of a convolution's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputGradient {
    /// It is not computed.
    Unwanted,
    /// It overwrites.
    Overwrite,
    /// It is added.
    Accumulate,
}

/// Whether a fused operation can compute this convolution.
pub(crate) fn fits(shape: &ConvShape) -> bool {
    let window = (shape.kernel, shape.stride, shape.padding) == ([3; 2], [1; 2], [1; 2]);
    window
        && !shape.is_dilated()
        && shape.groups == 1
        && shape.in_c.max(shape.out_c) <= CHANNELS_MAX
}

impl FusedConv {
    pub(crate) fn new(
        ConvProduct { shape, precision, .. }: ConvProduct,
        before: Option<BatchNorm>,
    ) -> Self {
        Self { shape, before, precision }
    }

    /// Tickets of the forward pass, and the most tickets of the backward pass: one for each part of
    /// the weights that blocks compute, and one for the data.
    pub fn tickets(&self) -> [usize; 2] {
        let [read, written] = WEIGHT_BLOCK;
        let ConvShape { in_c, out_c, .. } = self.shape;
        [1, in_c.div_ceil(read) * out_c.div_ceil(written) + 1]
    }

    /// Products of the convolution.
    pub(super) fn product(&self) -> ConvProduct {
        ConvProduct { precision: self.precision, ..ConvProduct::f32(self.shape) }
    }

    /// Elements of its input: of raw images if a norm comes before it.
    pub(super) fn read_len(&self) -> usize {
        self.before.map_or(self.shape.input().len(), |norm| norm.shape.len())
    }

    /// x, and mean, variance, γ, β of the norm before.
    fn reads(&self) -> [Spec; 5] {
        let c = f32s(self.before.map_or(0, |norm| norm.shape.c));
        [values(self.read_len()), c, c, c, c]
    }
}

impl FusedOp {
    pub(super) fn signature(&self) -> Signature {
        match *self {
            FusedOp::Begin { gradient, tickets } => {
                Signature::new(&[], &[f32s(gradient), u32s(tickets)])
            }
            FusedOp::Forward { conv, momentum } => {
                let weight = f32s(conv.shape.weight_len());
                let z = values(conv.shape.output().len());
                let reads = [&conv.reads()[..], &[weight]].concat();
                let (c, tickets) = (f32s(conv.shape.out_c), u32s(conv.tickets()[0]));
                match momentum {
                    Some(_) => Signature::new(&reads, &[z, c, c, c, c, i64s(1), tickets]),
                    None => Signature::new(&reads, &[z]),
                }
            }
            FusedOp::Backward { conv, after, uniform, data } => {
                let (weight, z) = (f32s(conv.shape.weight_len()), values(after.shape.len()));
                let c = after.shape.c;
                let dy = if uniform { after.shape.batch * c } else { after.output().len() };
                let own = [weight, z, f32s(c), f32s(c), f32s(3 * c), values(dy)];
                let wanted = usize::from(data != InputGradient::Unwanted);
                let dx = values(wanted * conv.shape.input().len());
                let before = wanted * conv.before.map_or(0, |norm| norm.shape.c);
                let norm = [f32s(before), f32s(before), f32s(3 * before)];
                let [dgamma, dbeta, coefficients] = norm;
                let tickets = u32s(conv.tickets()[1]);
                let writes = [dx, weight, dgamma, dbeta, coefficients, tickets];
                Signature::new(&[&conv.reads()[..], &own].concat(), &writes)
            }
            FusedOp::Sums(norm) => {
                let [z, y] = [norm.shape.len(), norm.output().len()].map(values);
                let c = norm.shape.c;
                let [one, three] = [c, 3 * c].map(f32s);
                Signature::new(&[z, one, one, one, one, y], &[one, one, three, u32s(1)])
            }
            FusedOp::Head(head) => {
                let [z, c, weight, bias, means, y] = head.specs();
                Signature::new(&[z, c, c, c, c, weight, bias.optional()], &[means, y])
            }
            FusedOp::HeadGradient(head) => {
                let [z, c, weight, bias, means, y] = head.specs();
                let dy = Spec { is_values: true, ..means };
                let three = f32s(3 * head.norm.shape.c);
                let reads = [z, c, c, c, c, weight, means, y];
                let writes = [dy, weight, bias.optional(), c, c, three, u32s(1)];
                Signature::new(&reads, &writes)
            }
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: StepOperands<'_>) {
        reference::run(self, isa, operands);
    }
}

impl ClassifierHead {
    /// Operands: raw images, one value per channel, weight, bias, means, outputs.
    fn specs(&self) -> [Spec; 6] {
        let Self { norm, classes, .. } = *self;
        let (c, batch) = (norm.shape.c, norm.shape.batch);
        let weight = c * pad16(classes);
        let [c, weight, bias, means] = [c, weight, classes, batch * c].map(f32s);
        [values(norm.shape.len()), c, weight, bias, means, values(batch * classes)]
    }

    /// Products of the linear layer.
    pub(super) fn linear(&self) -> ConvProduct {
        let Self { norm: BatchNorm { shape, .. }, classes, precision } = *self;
        ConvProduct {
            precision,
            ..ConvProduct::f32(ConvShape::linear(shape.batch, shape.c, classes))
        }
    }
}

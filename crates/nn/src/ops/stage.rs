//! Steps of a 3×3 convolution with its neighbours: batch norm, ReLU and max pooling are computed
//! where raw outputs are read and are never stored. For devices on which memory is what costs; the
//! plans of a processor have none of these.
//!
//! Every batch norm here is followed by a ReLU. Raw images are those before it. Its gradient goes
//! by coefficients `[3][C]`, which follow from two sums over the batch: scale, and what mean and
//! variance take away. Whoever computes the gradient of what is behind the ReLU leaves them.
//!
//! Tickets are how a GPU's last block finds out that it is the last: zero before an operation and
//! after it.

mod reference;

use super::conv::Product;
use super::norm::BatchNorm;
use super::operand::{Operands, Signature, Spec, f32s, i64s, u32s};
use crate::kernels::conv::ConvShape;
use crate::kernels::{Isa, pad16};
use crate::precision::Precision;

/// Fewest channels that are read, and fewest that are written, of a block of a GPU that has a part
/// of the weights, where there are several such blocks.
const WEIGHT_BLOCK: [usize; 2] = [8, 32];

/// Most channels: their coefficients lie in a block's memory.
const CHANNELS_MAX: usize = 256;

/// A convolution, and the batch norm before it if that is computed on load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stage {
    /// Shape of the convolution: 3×3 with stride 1 and padding 1, without a bias.
    pub shape: ConvShape,
    /// Batch norm before it, with ReLU and perhaps pooling.
    pub before: Option<BatchNorm>,
    /// Precision of the products' factors: images behind the norm, weights, raw gradients.
    pub precision: Precision,
}

/// A classifier: the mean of each channel behind a batch norm, and a linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Head {
    /// Batch norm, with ReLU and perhaps pooling.
    pub norm: BatchNorm,
    /// Outputs of the linear layer.
    pub classes: usize,
    /// Precision of the products' factors: means, weights, gradients of the outputs.
    pub precision: Precision,
}

/// Operations on stages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// Writes zeros: the gradient of a group's parameters, and tickets (u32).
    Begin {
        /// Elements of the gradient.
        gradient: usize,
        /// Tickets.
        tickets: usize,
    },
    /// Reads x, and mean, variance, γ, β of the norm before (absent without one), weight; writes
    /// the raw output. In training also mean and variance of that, and updates running mean,
    /// running variance, batches counted (i64); tickets (u32), scratch.
    Forward {
        /// Shapes.
        stage: Stage,
        /// In training, the share of the batch's statistics in the running ones.
        momentum: Option<f32>,
    },
    /// Reads x, and mean, variance, γ, β of the norm before (absent without one), weight; raw
    /// output, mean and β of the norm behind, its coefficients; gradient of what is behind that,
    /// or, if it is the same for all pixels of an image, that of one. Writes dx, if it is wanted;
    /// adds to dweight; with a norm before whose dx is wanted, adds to its dγ and dβ and writes
    /// its coefficients; tickets (u32), scratch.
    Backward {
        /// Shapes.
        stage: Stage,
        /// Norm behind the raw output.
        behind: BatchNorm,
        /// Whether all pixels of an image have the same gradient.
        uniform: bool,
        /// The gradient of x: whether it is wanted, and added to dx.
        data: Data,
    },
    /// Reads raw images, mean, variance, γ, β, gradient of what is behind; adds to dγ, dβ; writes
    /// coefficients; ticket (u32), scratch.
    Sums(BatchNorm),
    /// Reads raw images, mean, variance, γ, β, weight, bias (optional); writes the means, and the
    /// outputs.
    Head(Head),
    /// Reads raw images, mean, variance, γ, β, weight, means, gradient of the outputs; writes the
    /// gradient of one pixel behind the norm, `[N][C]`; adds to dweight, dbias (optional), dγ, dβ;
    /// writes coefficients; ticket (u32), scratch.
    HeadGradient(Head),
}

/// Where the gradient of a convolution's input goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// Nobody wants it.
    Unwanted,
    /// It overwrites.
    Overwrite,
    /// It is added.
    Accumulate,
}

/// Whether a convolution can be that of a stage.
pub(crate) fn fits(shape: &ConvShape) -> bool {
    let window = (shape.kernel, shape.stride, shape.padding) == ([3; 2], [1; 2], [1; 2]);
    window && shape.groups == 1 && shape.in_c.max(shape.out_c) <= CHANNELS_MAX
}

impl Stage {
    pub(crate) fn new(
        Product { shape, precision, .. }: Product,
        before: Option<BatchNorm>,
    ) -> Self {
        Self { shape, before, precision }
    }

    /// Tickets of the forward pass, and the most that the backward pass may need: one for each
    /// block that has a part of the weights, and one for the data.
    pub fn tickets(&self) -> [usize; 2] {
        let [read, written] = WEIGHT_BLOCK;
        let ConvShape { in_c, out_c, .. } = self.shape;
        [1, in_c.div_ceil(read) * out_c.div_ceil(written) + 1]
    }

    /// Products of the convolution.
    pub(super) fn product(&self) -> Product {
        Product { precision: self.precision, ..Product::f32(self.shape) }
    }

    /// Elements that it reads: raw images if there is a norm before it.
    pub(super) fn read_len(&self) -> usize {
        self.before.map_or(self.shape.input().len(), |norm| norm.shape.len())
    }

    /// x, and mean, variance, γ, β of the norm before.
    fn reads(&self) -> [Spec; 5] {
        let c = f32s(self.before.map_or(0, |norm| norm.shape.c));
        [f32s(self.read_len()), c, c, c, c]
    }
}

impl Op {
    pub(super) fn signature(&self) -> Signature {
        match *self {
            Op::Begin { gradient, tickets } => {
                Signature::new(&[], &[f32s(gradient), u32s(tickets)])
            }
            Op::Forward { stage, momentum } => {
                let (weight, z) =
                    (f32s(stage.shape.weight_len()), f32s(stage.shape.output().len()));
                let reads = [&stage.reads()[..], &[weight]].concat();
                let (c, tickets) = (f32s(stage.shape.out_c), u32s(stage.tickets()[0]));
                match momentum {
                    Some(_) => Signature::new(&reads, &[z, c, c, c, c, i64s(1), tickets]),
                    None => Signature::new(&reads, &[z]),
                }
            }
            Op::Backward { stage, behind, uniform, data } => {
                let (weight, z) = (f32s(stage.shape.weight_len()), f32s(behind.shape.len()));
                let c = behind.shape.c;
                let dy = if uniform { behind.shape.batch * c } else { behind.output().len() };
                let own = [weight, z, f32s(c), f32s(c), f32s(3 * c), f32s(dy)];
                let wanted = usize::from(data != Data::Unwanted);
                let dx = f32s(wanted * stage.shape.input().len());
                let before = wanted * stage.before.map_or(0, |norm| norm.shape.c);
                let norm = [f32s(before), f32s(before), f32s(3 * before)];
                let [dgamma, dbeta, coefficients] = norm;
                let tickets = u32s(stage.tickets()[1]);
                let writes = [dx, weight, dgamma, dbeta, coefficients, tickets];
                Signature::new(&[&stage.reads()[..], &own].concat(), &writes)
            }
            Op::Sums(norm) => {
                let (z, c, y) = (f32s(norm.shape.len()), norm.shape.c, f32s(norm.output().len()));
                let [one, three] = [c, 3 * c].map(f32s);
                Signature::new(&[z, one, one, one, one, y], &[one, one, three, u32s(1)])
            }
            Op::Head(head) => {
                let [z, c, weight, bias, means, y] = head.specs();
                Signature::new(&[z, c, c, c, c, weight, bias.optional()], &[means, y])
            }
            Op::HeadGradient(head) => {
                let [z, c, weight, bias, means, y] = head.specs();
                let three = f32s(3 * head.norm.shape.c);
                let reads = [z, c, c, c, c, weight, means, y];
                let writes = [means, weight, bias.optional(), c, c, three, u32s(1)];
                Signature::new(&reads, &writes)
            }
        }
    }

    pub(super) fn run(&self, isa: Isa, operands: Operands<'_>) {
        reference::run(self, isa, operands);
    }
}

impl Head {
    /// Raw images, something per channel, weight, bias, means, outputs.
    fn specs(&self) -> [Spec; 6] {
        let Self { norm, classes, .. } = *self;
        let (c, batch) = (norm.shape.c, norm.shape.batch);
        let weight = c * pad16(classes);
        [norm.shape.len(), c, weight, classes, batch * c, batch * classes].map(f32s)
    }

    /// Products of the linear layer.
    pub(super) fn linear(&self) -> Product {
        let Self { norm: BatchNorm { shape, .. }, classes, precision } = *self;
        Product { precision, ..Product::f32(ConvShape::linear(shape.batch, shape.c, classes)) }
    }
}

//! Reductions in a chain: operations that go sample by sample, and whose results are sums over the
//! batch.
//!
//! # Method
//! ```text
//! for each part of the batch:             sums of the part = nothing
//!     for each block of the part:         sums of the part += the block's, in order
//! results = the sums of all parts, in order
//! ```
//! - a convolution with the mean and variance of its output's channels;
//! - the sums of a batch norm's gradient: gradients of γ and β, and the coefficients of the input's
//!   gradient.
//!
//! # Assumptions
//! - The parts are those of the operation outside of a chain ([`Reduction::part`]), and blocks are
//!   multiples of [`Reduction::unit`]. So the results have the same bits in a chain and alone.
//! - No step of the chain reads the results.

use super::conv::ConvProduct;
use super::norm::BatchNorm;
use super::operand::{Slice, SliceMut, StepOperands};
use super::{ConvOp, NormOp, StepOp};
use crate::kernels::Isa;
use crate::kernels::conv::ConvInputs;
use crate::kernels::norm::batch::{self, GradientTotals, StatsSums, stats_scratch_len};
use crate::kernels::norm::{BatchNormBackward, BatchStats, ChannelMoments};

/// An operation with sums over the batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Reduction {
    /// Mean and variance of a convolution's output.
    Moments(ConvProduct),
    /// Sums of a batch norm's gradient.
    NormGradient(BatchNorm),
}

/// Sums of a part of the batch, fed block by block.
pub(super) enum PartSums<'a> {
    /// Sums of [`Reduction::Moments`].
    Moments {
        product: ConvProduct,
        sums: StatsSums<'a>,
        /// Destination.
        to: &'a mut [f64],
    },
    /// Sums of [`Reduction::NormGradient`].
    NormGradient {
        norm: BatchNorm,
        /// Coefficients of the forward pass, once a block was added.
        scale: &'a mut [f32],
        is_scaled: bool,
        totals: &'a mut [f64],
    },
}

impl StepOp {
    /// The operation as a reduction, if its results are sums over the batch that a chain can add.
    pub(crate) fn reduction(&self) -> Option<Reduction> {
        match *self {
            StepOp::Conv(ConvOp::ForwardWithStats(of)) => Some(Reduction::Moments(of)),
            StepOp::Norm(NormOp::GradientSums(of)) => Some(Reduction::NormGradient(of)),
            _ => None,
        }
    }
}

impl Reduction {
    /// Images of each part, except the last one.
    pub(crate) fn part(&self) -> usize {
        match self {
            Reduction::Moments(of) => of.images(),
            Reduction::NormGradient(of) => batch::gradient_part(&of.shape),
        }
    }

    /// Images of which a block has a multiple, unless it is a part's last block.
    pub(crate) fn unit(&self) -> usize {
        match self {
            Reduction::Moments(of) => of.moments_unit().unwrap_or(of.shape.batch),
            Reduction::NormGradient(_) => 1,
        }
    }

    fn channels(&self) -> usize {
        match self {
            Reduction::Moments(of) => of.shape.out_c,
            Reduction::NormGradient(of) => of.shape.c,
        }
    }

    /// f64 elements of the sums of a part.
    pub(super) fn sums_len(&self) -> usize {
        2 * self.channels()
    }

    /// f32 elements that a part needs beside its sums.
    pub(super) fn room_len(&self) -> usize {
        match self {
            Reduction::Moments(_) => stats_scratch_len(self.channels()),
            Reduction::NormGradient(_) => self.channels(),
        }
    }

    /// f32 elements of scratch for a block, whose operation this is.
    pub(super) fn scratch_len(&self) -> usize {
        match self {
            Reduction::Moments(of) => of.block_scratch_len(),
            Reduction::NormGradient(_) => 0,
        }
    }

    /// Begins the sums of a part: `to` has [`Reduction::sums_len`], `room` [`Reduction::room_len`].
    pub(super) fn begin<'a>(&self, to: &'a mut [f64], room: &'a mut [f32]) -> PartSums<'a> {
        match *self {
            Reduction::Moments(product) => PartSums::Moments {
                product,
                sums: StatsSums::new(room, product.shape.output()),
                to,
            },
            Reduction::NormGradient(norm) => {
                to.fill(0.0);
                PartSums::NormGradient { norm, scale: room, is_scaled: false, totals: to }
            }
        }
    }

    /// Writes the results from the sums of all parts, `part` images each except the last one. The
    /// operands are those of all samples; only the operands that they share are read and written.
    pub(super) fn finish(&self, part: usize, sums: &mut [f64], operands: StepOperands<'_>) {
        match self {
            Reduction::Moments(of) => {
                let (_, writes) = operands.split::<3, 4>();
                let [_, mean, var, _] = writes.map(SliceMut::elements);
                batch::combine(of.shape.batch, part, sums, BatchStats { mean, var });
            }
            Reduction::NormGradient(of) => {
                let (reads, writes) = operands.split::<8, 4>();
                let [_, mean, var, gamma, beta, ..] = reads.map(Slice::elements);
                let [coefficients, dgamma, dbeta, _] = writes.map(SliceMut::elements);
                let forward = of.inputs([&[], mean, var, gamma, beta]);
                let totals = GradientTotals { parts: sums, scaled: false };
                let parameters = [dgamma, dbeta];
                batch::finish_gradient_sums(&of.shape, &forward, totals, parameters, coefficients);
            }
        }
    }
}

impl PartSums<'_> {
    /// Runs the operation for the next `samples`, except that their sums are only added. The
    /// operands are those of [`Reduction::finish`], of these samples.
    pub(super) fn add(&mut self, isa: Isa, samples: usize, operands: StepOperands<'_>) {
        match self {
            PartSums::Moments { product, sums, .. } => {
                let (reads, [y, _, _, scratch]) = operands.split::<3, 4>();
                let [x, w, bias] = reads.map(Slice::elements);
                let (of, round) = (product.with_batch(samples), |f| product.precision.rounded(f));
                let (x, w) = (round(x), round(w));
                let inputs = ConvInputs { x: &x, w: &w, bias };
                of.forward_with_sums(isa, inputs, y.elements(), sums, scratch.elements());
            }
            PartSums::NormGradient { norm, scale, is_scaled, totals } => {
                let (reads, _) = operands.split::<8, 4>();
                let [x, mean, var, gamma, beta, dout, codes, _] = reads;
                let forward = norm.inputs([x, mean, var, gamma, beta].map(Slice::elements));
                if !std::mem::replace(is_scaled, true) {
                    forward.scales(scale);
                }
                let (dout, codes) = (dout.elements(), codes.elements());
                let of = BatchNormBackward { forward, dout, codes, out: &[] };
                batch::add_gradient_sums(isa, &norm.shape, &of, scale, totals);
            }
        }
    }

    /// Ends the sums of the part.
    pub(super) fn end(self) {
        if let PartSums::Moments { sums, to, .. } = self {
            sums.finish(ChannelMoments(to));
        }
    }
}

//! Operations that go sample by sample, so that a few samples can be taken at a time.

use super::conv::ConvProduct;
use super::{
    BlendOp, ConvOp, DropoutOp, ElementwiseOp, NormOp, PoolOp, RowsOp, StepOp, blend, norm,
};
use crate::kernels::BatchShape;
use crate::kernels::conv::ConvShape;
use crate::kernels::pool::PoolShape;
use crate::kernels::rows::Matrices;

/// Conversion of operations for all samples of a batch into operations for some of them.
#[derive(Clone, Copy)]
struct SampleCut {
    samples: usize,
    batch: usize,
}

impl StepOp {
    /// The operation for `samples` of its `batch` samples, if it goes through them one by one.
    ///
    /// Operands with a different length in the result consist of one part for each sample. All
    /// samples share the other operands; the written ones are added to, or are results of a
    /// [reduction](super::reduction), which are written after the last sample. The length of
    /// scratch may change, too.
    pub(crate) fn over(&self, samples: usize, batch: usize) -> Option<StepOp> {
        let cut = SampleCut { samples, batch };
        match self {
            StepOp::Conv(op) => cut.conv(op).map(StepOp::Conv),
            StepOp::Norm(op) => cut.norm(op).map(StepOp::Norm),
            StepOp::Pool(op) => cut.pool(op).map(StepOp::Pool),
            StepOp::Elementwise(op) => cut.elementwise(op).map(StepOp::Elementwise),
            StepOp::Dropout(op) => cut.dropout(op).map(StepOp::Dropout),
            StepOp::Blend(op) => cut.blend(op).map(StepOp::Blend),
            StepOp::Rows(op) => cut.rows(op).map(StepOp::Rows),
            StepOp::Lstm(_)
            | StepOp::Loss(_)
            | StepOp::Optim(_)
            | StepOp::Ppo(_)
            | StepOp::Sample(_)
            | StepOp::Fused(_)
            | StepOp::State(_)
            | StepOp::Chain(_) => None,
        }
    }
}

impl SampleCut {
    fn images(self, shape: BatchShape) -> Option<BatchShape> {
        (shape.batch == self.batch).then_some(BatchShape { batch: self.samples, ..shape })
    }

    fn values(self, len: usize) -> Option<usize> {
        len.is_multiple_of(self.batch).then_some(len / self.batch * self.samples)
    }

    fn product(self, of: ConvProduct) -> Option<ConvProduct> {
        let fits = of.goes_by_sample() && of.shape.batch == self.batch;
        fits.then_some(ConvProduct { shape: ConvShape { batch: self.samples, ..of.shape }, ..of })
    }

    fn batch_norm(self, of: norm::BatchNorm) -> Option<norm::BatchNorm> {
        Some(norm::BatchNorm { shape: self.images(of.shape)?, ..of })
    }

    fn conv(self, op: &ConvOp) -> Option<ConvOp> {
        Some(match *op {
            ConvOp::Forward(of) => ConvOp::Forward(self.product(of)?),
            ConvOp::WeightGradient(of) => ConvOp::WeightGradient(self.product(of)?),
            ConvOp::DataGradient { product, accumulate } => {
                ConvOp::DataGradient { product: self.product(product)?, accumulate }
            }
            ConvOp::ForwardWithStats(of) => {
                of.moments_unit()?;
                ConvOp::ForwardWithStats(self.product(of)?)
            }
        })
    }

    fn norm(self, op: &NormOp) -> Option<NormOp> {
        use norm::{GroupNorm, LayerNorm};
        let group = |of: GroupNorm| Some(GroupNorm { shape: self.images(of.shape)?, ..of });
        let layer = |of: LayerNorm| Some(LayerNorm { shape: self.images(of.shape)?, ..of });
        Some(match *op {
            NormOp::Forward(of) => NormOp::Forward(self.batch_norm(of)?),
            NormOp::GroupForward(of) => NormOp::GroupForward(group(of)?),
            NormOp::GroupGradient { norm, accumulate } => {
                NormOp::GroupGradient { norm: group(norm)?, accumulate }
            }
            NormOp::LayerForward(of) => NormOp::LayerForward(layer(of)?),
            NormOp::LayerGradient { norm, accumulate } => {
                NormOp::LayerGradient { norm: layer(norm)?, accumulate }
            }
            NormOp::InputGradient { norm, accumulate } => {
                NormOp::InputGradient { norm: self.batch_norm(norm)?, accumulate }
            }
            // Sums from pooled outputs go through a part of the batch as one row of pixels: blocks
            // would change their bits.
            NormOp::GradientSums(of) if !of.pool => NormOp::GradientSums(self.batch_norm(of)?),
            NormOp::Statistics(_) | NormOp::UpdateRunning { .. } | NormOp::GradientSums(_) => {
                return None;
            }
        })
    }

    fn pool(self, op: &PoolOp) -> Option<PoolOp> {
        let pooled = |of: PoolShape| Some(PoolShape { input: self.images(of.input)?, ..of });
        Some(match *op {
            PoolOp::Max(of) => PoolOp::Max(pooled(of)?),
            PoolOp::MaxGradient { shape, accumulate } => {
                PoolOp::MaxGradient { shape: pooled(shape)?, accumulate }
            }
            PoolOp::WindowAverage(of) => PoolOp::WindowAverage(pooled(of)?),
            PoolOp::WindowAverageGradient { shape, accumulate } => {
                PoolOp::WindowAverageGradient { shape: pooled(shape)?, accumulate }
            }
            PoolOp::NormCodes { len } => PoolOp::NormCodes { len: self.values(len)? },
            PoolOp::Average(of) => PoolOp::Average(self.images(of)?),
            PoolOp::AverageGradient { shape, accumulate } => {
                PoolOp::AverageGradient { shape: self.images(shape)?, accumulate }
            }
        })
    }

    fn elementwise(self, op: &ElementwiseOp) -> Option<ElementwiseOp> {
        Some(match *op {
            ElementwiseOp::Pass { len, accumulate } => {
                ElementwiseOp::Pass { len: self.values(len)?, accumulate }
            }
            ElementwiseOp::Narrow { len } => ElementwiseOp::Narrow { len: self.values(len)? },
            ElementwiseOp::Widen { len } => ElementwiseOp::Widen { len: self.values(len)? },
            ElementwiseOp::Forward { function, len } => {
                ElementwiseOp::Forward { function, len: self.values(len)? }
            }
            ElementwiseOp::Gradient { function, len, accumulate } => {
                ElementwiseOp::Gradient { function, len: self.values(len)?, accumulate }
            }
            ElementwiseOp::Add { len } => ElementwiseOp::Add { len: self.values(len)? },
            ElementwiseOp::Product { len, accumulate } => {
                ElementwiseOp::Product { len: self.values(len)?, accumulate }
            }
            ElementwiseOp::Scale { shape, factor } => {
                ElementwiseOp::Scale { shape: self.images(shape)?, factor }
            }
            ElementwiseOp::ScaleGradient { shape, factor, accumulate } => {
                ElementwiseOp::ScaleGradient { shape: self.images(shape)?, factor, accumulate }
            }
            // They go through gradients of parameters, or running statistics, without samples.
            ElementwiseOp::Fill { .. } | ElementwiseOp::Multiply { .. } => return None,
        })
    }

    fn dropout(self, op: &DropoutOp) -> Option<DropoutOp> {
        match *op {
            DropoutOp::Apply { len, accumulate } => {
                Some(DropoutOp::Apply { len: self.values(len)?, accumulate })
            }
            // Draws number the samples of the whole batch.
            DropoutOp::Draw { .. } | DropoutOp::Count => None,
        }
    }

    fn rows(self, op: &RowsOp) -> Option<RowsOp> {
        match *op {
            RowsOp::Transpose { of, accumulate } => (of.count == self.batch).then_some({
                let of = Matrices { count: self.samples, ..of };
                RowsOp::Transpose { of, accumulate }
            }),
            RowsOp::Embed(_)
            | RowsOp::EmbedGradient(_)
            | RowsOp::CopyIndices { .. }
            | RowsOp::Put { .. }
            | RowsOp::Take { .. } => None,
        }
    }

    fn blend(self, op: &BlendOp) -> Option<BlendOp> {
        use blend::Blend;
        let cut = |of: Blend| {
            let fits = of.samples == self.batch;
            let len = self.values(of.len).filter(|_| fits)?;
            Some(Blend { len, samples: self.samples, ..of })
        };
        Some(match *op {
            BlendOp::Forward(of) => BlendOp::Forward(cut(of)?),
            BlendOp::Gradient { blend, accumulate } => {
                BlendOp::Gradient { blend: cut(blend)?, accumulate }
            }
            BlendOp::TanhMix { len } => BlendOp::TanhMix { len: self.values(len)? },
            BlendOp::TanhMixGradient { len, accumulate } => {
                BlendOp::TanhMixGradient { len: self.values(len)?, accumulate }
            }
        })
    }
}

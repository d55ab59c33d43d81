//! Operations that go sample by sample, so that a few samples can be taken at a time.

use super::conv::{self, Product};
use super::{Op, blend, elementwise, norm, pool};
use crate::kernels::ImageShape;
use crate::kernels::conv::ConvShape;
use crate::kernels::pool::PoolShape;

/// Filters whose transforms take little of the time that their products take for a few samples.
const FILTERS: usize = 256;

/// How to make operations for all samples of a batch into ones for some of them.
#[derive(Clone, Copy)]
struct Cut {
    samples: usize,
    batch: usize,
}

impl Op {
    /// The operation for `samples` of its `batch` samples, if it goes through them one by one.
    ///
    /// Operands that have another length then have a part for every sample, one behind the other.
    /// The other operands are the same for all samples; what is written there is added to
    /// what is there. Scratch may have another length, too.
    pub(crate) fn over(&self, samples: usize, batch: usize) -> Option<Op> {
        let cut = Cut { samples, batch };
        match self {
            Op::Conv(op) => cut.conv(op).map(Op::Conv),
            Op::Norm(op) => cut.norm(op).map(Op::Norm),
            Op::Pool(op) => cut.pool(op).map(Op::Pool),
            Op::Elementwise(op) => cut.elementwise(op).map(Op::Elementwise),
            Op::Blend(op) => cut.blend(op).map(Op::Blend),
            Op::Rows(_)
            | Op::Lstm(_)
            | Op::Loss(_)
            | Op::Optim(_)
            | Op::Ppo(_)
            | Op::Sample(_)
            | Op::Stage(_)
            | Op::State(_)
            | Op::Chain(_) => None,
        }
    }
}

impl Cut {
    fn images(self, shape: ImageShape) -> Option<ImageShape> {
        (shape.batch == self.batch).then_some(ImageShape { batch: self.samples, ..shape })
    }

    fn values(self, len: usize) -> Option<usize> {
        len.is_multiple_of(self.batch).then_some(len / self.batch * self.samples)
    }

    /// Products by Winograd's filtering transform their filters each time: only few filters are
    /// done for a few samples at a time.
    fn product(self, of: Product) -> Option<Product> {
        let few = of.tiles.is_none() || of.shape.in_c * of.shape.out_c <= FILTERS;
        let fits = few && of.shape.batch == self.batch;
        fits.then_some(Product { shape: ConvShape { batch: self.samples, ..of.shape }, ..of })
    }

    fn batch_norm(self, of: norm::BatchNorm) -> Option<norm::BatchNorm> {
        Some(norm::BatchNorm { shape: self.images(of.shape)?, ..of })
    }

    fn conv(self, op: &conv::Op) -> Option<conv::Op> {
        use conv::Op;
        Some(match *op {
            Op::Forward(of) => Op::Forward(self.product(of)?),
            Op::WeightGradient(of) => Op::WeightGradient(self.product(of)?),
            Op::DataGradient { product, accumulate } => {
                Op::DataGradient { product: self.product(product)?, accumulate }
            }
            Op::ForwardWithStats(_) => return None,
        })
    }

    fn norm(self, op: &norm::Op) -> Option<norm::Op> {
        use norm::{GroupNorm, Op};
        let group = |of: GroupNorm| Some(GroupNorm { shape: self.images(of.shape)?, ..of });
        Some(match *op {
            Op::Forward(of) => Op::Forward(self.batch_norm(of)?),
            Op::GroupForward(of) => Op::GroupForward(group(of)?),
            Op::GroupGradient { norm, accumulate } => {
                Op::GroupGradient { norm: group(norm)?, accumulate }
            }
            Op::InputGradient { norm, accumulate } => {
                Op::InputGradient { norm: self.batch_norm(norm)?, accumulate }
            }
            Op::Statistics(_) | Op::UpdateRunning { .. } | Op::GradientSums(_) => return None,
        })
    }

    fn pool(self, op: &pool::Op) -> Option<pool::Op> {
        use pool::Op;
        let pooled = |of: PoolShape| Some(PoolShape { input: self.images(of.input)?, ..of });
        Some(match *op {
            Op::Max(of) => Op::Max(pooled(of)?),
            Op::MaxGradient { shape, accumulate } => {
                Op::MaxGradient { shape: pooled(shape)?, accumulate }
            }
            Op::NormCodes { len } => Op::NormCodes { len: self.values(len)? },
            Op::Average(of) => Op::Average(self.images(of)?),
            Op::AverageGradient { shape, accumulate } => {
                Op::AverageGradient { shape: self.images(shape)?, accumulate }
            }
        })
    }

    fn elementwise(self, op: &elementwise::Op) -> Option<elementwise::Op> {
        use elementwise::Op;
        Some(match *op {
            Op::Pass { len, accumulate } => Op::Pass { len: self.values(len)?, accumulate },
            Op::Forward { function, len } => Op::Forward { function, len: self.values(len)? },
            Op::Gradient { function, len, accumulate } => {
                Op::Gradient { function, len: self.values(len)?, accumulate }
            }
            Op::Add { len } => Op::Add { len: self.values(len)? },
            Op::Scale { shape, factor } => Op::Scale { shape: self.images(shape)?, factor },
            Op::ScaleGradient { shape, factor, accumulate } => {
                Op::ScaleGradient { shape: self.images(shape)?, factor, accumulate }
            }
            // They go through parameters, which have no samples.
            Op::Fill { .. } | Op::Multiply { .. } => return None,
        })
    }

    fn blend(self, op: &blend::Op) -> Option<blend::Op> {
        use blend::{Blend, Op};
        let cut = |of: Blend| {
            let fits = of.samples == self.batch;
            let len = self.values(of.len).filter(|_| fits)?;
            Some(Blend { len, samples: self.samples, ..of })
        };
        Some(match *op {
            Op::Forward(of) => Op::Forward(cut(of)?),
            Op::Gradient { blend, accumulate } => Op::Gradient { blend: cut(blend)?, accumulate },
            Op::TanhMix { len } => Op::TanhMix { len: self.values(len)? },
            Op::TanhMixGradient { len, accumulate } => {
                Op::TanhMixGradient { len: self.values(len)?, accumulate }
            }
        })
    }
}

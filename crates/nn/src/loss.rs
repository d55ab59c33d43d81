//! Loss of a network.

use meristem_device::DType;

use crate::error::{Error, Result};
use crate::kernels::loss::ElementLoss;
use crate::ops::loss::LossFormula;

/// Loss that a network is trained and evaluated with; part of the options of a plan.
///
/// Each sample has a loss, and the loss of a batch is the mean over its samples, so that metrics of
/// batches, epochs and replicas are sums over samples.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Loss {
    /// Softmax cross-entropy with labels, u32 `[n]`, which are below the number of classes:
    /// `torch.nn.functional.cross_entropy`. Score: share of correct samples.
    #[default]
    CrossEntropy,
    /// Mean over the outputs of binary cross-entropy of a logit with its target, f32 `[n, outputs]`
    /// in 0..=1: `torch.nn.functional.binary_cross_entropy_with_logits`. Score: micro-F1.
    BinaryCrossEntropy,
    /// Mean over the outputs of the squared difference from the target, f32 `[n, outputs]`:
    /// `torch.nn.functional.mse_loss`. Score: R², as for [`Loss::Huber`] and [`Loss::L1`].
    MeanSquaredError,
    /// Mean over the outputs of `½d²` for a difference d of at most `delta`, and of
    /// `delta·(|d| − ½·delta)` above it: `torch.nn.functional.huber_loss`. Targets f32
    /// `[n, outputs]`.
    Huber {
        /// Difference at which the square becomes linear; finite, above 0.
        delta: f32,
    },
    /// Mean over the outputs of the absolute difference from the target, f32 `[n, outputs]`:
    /// `torch.nn.functional.l1_loss`.
    L1,
}

impl Loss {
    /// Element type of the targets: u32 for labels `[n]`, else f32 for `[n, outputs]`.
    pub fn target_dtype(&self) -> DType {
        match self {
            Loss::CrossEntropy => DType::U32,
            _ => DType::F32,
        }
    }

    /// Whether its metrics have [`ScoreSums`](crate::ScoreSums).
    pub fn has_score_sums(&self) -> bool {
        *self != Loss::CrossEntropy
    }

    /// The formula that its steps compute.
    pub(crate) fn formula(&self) -> LossFormula {
        match *self {
            Loss::CrossEntropy => LossFormula::CrossEntropy,
            Loss::BinaryCrossEntropy => LossFormula::Elements(ElementLoss::BinaryCrossEntropy),
            Loss::MeanSquaredError => LossFormula::Elements(ElementLoss::Square),
            Loss::Huber { delta } => LossFormula::Elements(ElementLoss::Huber { delta }),
            Loss::L1 => LossFormula::Elements(ElementLoss::Absolute),
        }
    }

    /// Checks its numbers, for a network with this number of outputs.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub(crate) fn check(&self, _outputs: usize) -> Result<()> {
        match *self {
            Loss::Huber { delta } if !(delta > 0.0 && delta.is_finite()) => {
                Err(Error::argument("Network", "delta", "a finite number above 0", delta))
            }
            _ => Ok(()),
        }
    }
}

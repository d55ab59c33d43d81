//! Loss of a network.

use std::sync::Arc;

use meristem_device::DType;

use crate::error::{Error, Result};
use crate::kernels::loss::ElementLoss;
use crate::ops::loss::LossFormula;

/// Loss that a network is trained and evaluated with; part of the options of a plan.
///
/// Each sample has a loss, and the loss of a batch is the mean over its samples, so that metrics of
/// batches, epochs and replicas are sums over samples.
#[derive(Clone, Debug, PartialEq)]
pub enum Loss {
    /// Softmax cross-entropy with labels, u32 `[n]`, which are below the number of classes. Score:
    /// share of correct samples.
    ///
    /// With probabilities p, label y, smoothing s, weights w and K classes, the loss of a sample is
    /// `−(1 − s)·w[y]·ln p[y] − s/K·Σ w[c]·ln p[c]`, as
    /// `torch.nn.functional.cross_entropy(…, reduction="none")`. The loss of a batch is the mean
    /// over its samples. PyTorch's `reduction="mean"` differs where there are weights: it divides
    /// by the sum of the samples' `w[y]`, so that the gradient of a sample depends on the others of
    /// its batch. Both have the same scale if the mean over the training samples of `w[y]` is 1, as
    /// with `w[c] = n/(K·n_c)` for n_c of n samples in class c.
    CrossEntropy {
        /// Share of the target that is spread evenly over the classes, 0..=1.
        label_smoothing: f32,
        /// Weight of each class, finite and at least 0; `None` for weights of 1.
        class_weights: Option<Arc<[f32]>>,
    },
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

impl Default for Loss {
    /// Cross-entropy without smoothing and weights.
    fn default() -> Self {
        Loss::CrossEntropy { label_smoothing: 0.0, class_weights: None }
    }
}

impl Loss {
    /// Element type of the targets: u32 for labels `[n]`, else f32 for `[n, outputs]`.
    pub fn target_dtype(&self) -> DType {
        match self {
            Loss::CrossEntropy { .. } => DType::U32,
            _ => DType::F32,
        }
    }

    /// Whether its metrics have [`ScoreSums`](crate::ScoreSums).
    pub fn has_score_sums(&self) -> bool {
        !matches!(self, Loss::CrossEntropy { .. })
    }

    /// Weight of each class, if there are any.
    pub(crate) fn class_weights(&self) -> Option<&[f32]> {
        match self {
            Loss::CrossEntropy { class_weights, .. } => class_weights.as_deref(),
            _ => None,
        }
    }

    /// The formula that its steps compute.
    pub(crate) fn formula(&self) -> LossFormula {
        match *self {
            Loss::CrossEntropy { label_smoothing: 0.0, class_weights: None } => {
                LossFormula::CrossEntropy
            }
            Loss::CrossEntropy { label_smoothing, .. } => {
                LossFormula::SmoothedCrossEntropy { label_smoothing }
            }
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
    pub(crate) fn check(&self, outputs: usize) -> Result<()> {
        let refused = |argument, expected: String, got: String| {
            Err(Error::argument("Network", argument, expected, got))
        };
        match self {
            Loss::CrossEntropy { label_smoothing: s, .. } if !(0.0..=1.0).contains(s) => {
                refused("label_smoothing", "0 to 1".into(), s.to_string())
            }
            Loss::CrossEntropy { class_weights: Some(weights), .. } => {
                let is_weight = |w: &&f32| w.is_finite() && **w >= 0.0;
                match weights.iter().find(|w| !is_weight(w)) {
                    Some(w) => {
                        let expected = "finite and at least 0";
                        refused("class_weights", expected.into(), format!("a weight of {w}"))
                    }
                    None if weights.len() != outputs => {
                        let expected = format!("one weight for each of {outputs} classes");
                        refused("class_weights", expected, format!("{} weights", weights.len()))
                    }
                    None => Ok(()),
                }
            }
            Loss::Huber { delta } if !(*delta > 0.0 && delta.is_finite()) => {
                refused("delta", "a finite number above 0".into(), delta.to_string())
            }
            _ => Ok(()),
        }
    }
}

//! Options of a plan: mode and samples.

use std::sync::Arc;

use crate::kernels::conv::ConvShape;
use crate::kernels::conv::winograd::{TileSize, Winograd};
use crate::kernels::ppo::PpoLoss;
use crate::kernels::sample::Sampler;
use crate::ops::Target;
use crate::ops::ppo::Pass;
use crate::precision::Precision;

/// Computation of a plan.
#[derive(Clone, Debug, PartialEq)]
pub enum Mode {
    /// Forward with batch statistics, mean softmax cross-entropy with the labels, backward,
    /// metrics, clipping, the optimisers.
    Train,
    /// As [`Mode::Train`], with the loss of proximal policy optimisation; its other inputs follow
    /// the graph's, see [`ops::ppo`](crate::ops::ppo).
    TrainPolicy {
        /// Formula.
        loss: Arc<PpoLoss>,
        /// Which pass over a round it is.
        pass: Pass,
    },
    /// Forward with running statistics, cross-entropy, metrics.
    Evaluate,
    /// Forward with running statistics; the output stays in the arena, or is delivered.
    Infer,
    /// As [`Mode::Infer`], with a draw of actions in place of the output, see
    /// [`ops::sample`](crate::ops::sample). Legality and step are inputs after the graph's. The
    /// draw is outputs 0 to 4, then come the states, then copies of the inputs that have rows.
    Draw(Arc<Sampler>),
    /// Forward with batch statistics, then backward from a gradient of the output that the caller
    /// writes into the arena. Gradients of parameters and inputs stay in the arena.
    Gradient,
}

impl Mode {
    /// Whether there is a backward pass; batch norm then uses (and updates) the batch's statistics.
    pub fn is_training(&self) -> bool {
        matches!(self, Mode::Train | Mode::TrainPolicy { .. } | Mode::Gradient)
    }

    /// Whether the output goes into a loss, and not to the caller.
    pub(crate) fn has_loss(&self) -> bool {
        matches!(self, Mode::Train | Mode::TrainPolicy { .. } | Mode::Evaluate)
    }
}

/// Options of a plan besides its graph.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanOptions {
    /// Samples; for sequences the rows of all steps, `[steps][sequences]`.
    pub batch: usize,
    /// Steps of the sequences that the samples are; 1 where each is on its own.
    pub steps: usize,
    /// Computation.
    pub mode: Mode,
    /// Whether convolution, batch norm, ReLU and max pooling may become one pass. Off in tests that
    /// compare both.
    pub fuse: bool,
    /// Kind of device that it runs on.
    pub target: Target,
    /// Precision of the products of convolutions and linear layers.
    pub precision: Precision,
    /// Whether a processor may compute convolutions by Winograd's minimal filtering.
    pub winograd: bool,
    /// In training: mean losses of how many last batches the metrics keep.
    pub batch_log: usize,
}

impl PlanOptions {
    /// With fusion, for the processor, in f32, samples on their own, no log of batches.
    pub fn new(batch: usize, mode: Mode) -> Self {
        let (target, precision) = Default::default();
        Self { batch, steps: 1, mode, fuse: true, target, precision, winograd: true, batch_log: 0 }
    }

    /// Tiles for a convolution, if they pay.
    pub(crate) fn tiles(&self, shape: &ConvShape) -> Option<TileSize> {
        let may = self.winograd && self.target == Target::Cpu;
        Winograd::worthwhile(shape).filter(|_| may).map(|of| of.tile)
    }

    /// Sequences that the samples belong to.
    pub fn sequences(&self) -> usize {
        self.batch / self.steps.max(1)
    }
}

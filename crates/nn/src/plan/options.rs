//! Options of a plan: mode and samples.

use std::sync::Arc;

use crate::kernels::conv::ConvShape;
use crate::kernels::conv::winograd::{TileSize, Winograd};
use crate::kernels::ppo::PpoLoss;
use crate::kernels::sample::Sampler;
use crate::loss::Loss;
use crate::ops::PlanTarget;
use crate::ops::ppo::PpoPass;
use crate::precision::{Precision, ValueType};

/// Computation of a plan.
#[derive(Clone, Debug, PartialEq)]
pub enum PlanMode {
    /// Forward with batch statistics, mean [`Loss`] with the targets, backward, metrics, clipping,
    /// the optimisers.
    Train,
    /// Like [`PlanMode::Train`], with the loss of proximal policy optimisation; its other inputs
    /// follow the graph's, see [`ops::ppo`](crate::ops::ppo).
    TrainPolicy {
        /// Formula.
        loss: Arc<PpoLoss>,
        /// Whether it is the first pass over the batch.
        pass: PpoPass,
    },
    /// Like [`PlanMode::Train`], with a loss that the caller computes: the forward pass delivers
    /// the output as output 0, and the backward pass begins with the gradient of the output, which
    /// is the input after the graph's.
    TrainByGradient,
    /// Forward with running statistics, [`Loss`], metrics.
    Evaluate,
    /// Forward with running statistics; the output stays in the arena, or is delivered.
    Infer,
    /// Like [`PlanMode::Infer`], with a draw of actions instead of the output, see
    /// [`ops::sample`](crate::ops::sample). Legality and step are inputs after the graph's. The
    /// draw is outputs 0 to 4, then come the states, then copies of all inputs except states.
    Draw(Arc<Sampler>),
    /// Forward with batch statistics, then backward from a gradient of the output that the caller
    /// writes into the arena. Gradients of parameters and inputs stay in the arena.
    Gradient,
}

impl PlanMode {
    /// Whether there is a backward pass. Batch norm then uses the batch's statistics, and updates
    /// the running ones.
    pub(crate) fn is_training(&self) -> bool {
        self.updates() || *self == PlanMode::Gradient
    }

    /// Whether the optimisers take a step.
    pub(crate) fn updates(&self) -> bool {
        use PlanMode::{Train, TrainByGradient, TrainPolicy};
        matches!(self, Train | TrainPolicy { .. } | TrainByGradient)
    }

    /// Whether the plan trains or evaluates; the caller then does not read the output in the arena
    /// (of [`PlanMode::TrainByGradient`] it gets a copy).
    pub(crate) fn has_loss(&self) -> bool {
        self.updates() || *self == PlanMode::Evaluate
    }
}

/// Options of a plan, without its graph.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanOptions {
    /// Samples; for sequences the rows of all steps, `[steps][sequences]`.
    pub batch: usize,
    /// Length of each sequence, in steps; 1 for samples without sequences.
    pub steps: usize,
    /// Computation.
    pub mode: PlanMode,
    /// Whether convolution, batch norm, ReLU and max pooling may become one pass, and on the CPU
    /// consecutive steps a chain ([`ops::chain`](crate::ops::chain)). Off in tests that compare
    /// both.
    pub fuse: bool,
    /// Kind of device that it runs on.
    pub target: PlanTarget,
    /// Precision of the products of convolutions and linear layers. On CUDA devices it also
    /// determines the element type of activations and their gradients.
    pub precision: Precision,
    /// Whether the CPU may compute convolutions by Winograd's minimal filtering.
    pub winograd: bool,
    /// Loss, and the type of the targets, in [`PlanMode::Train`] and [`PlanMode::Evaluate`].
    pub loss: Loss,
    /// In training: number of last batches whose mean losses the metrics keep.
    pub batch_log: usize,
}

impl PlanOptions {
    /// With fusion, for the CPU, in f32, without sequences, cross-entropy, no log of batches.
    pub fn new(batch: usize, mode: PlanMode) -> Self {
        Self {
            batch,
            steps: 1,
            mode,
            fuse: true,
            target: PlanTarget::default(),
            precision: Precision::default(),
            winograd: true,
            loss: Loss::default(),
            batch_log: 0,
        }
    }

    /// Element type of activations and their gradients between steps.
    pub fn values(&self) -> ValueType {
        match self.target {
            PlanTarget::Cpu => ValueType::F32,
            PlanTarget::Cuda => self.precision.value_type(),
        }
    }

    /// Tiles for a convolution, if they pay.
    pub(crate) fn tiles(&self, shape: &ConvShape) -> Option<TileSize> {
        let may = self.winograd && self.target == PlanTarget::Cpu;
        Winograd::worthwhile(shape).filter(|_| may).map(|of| of.tile)
    }

    /// Sequences that the samples belong to.
    pub fn sequences(&self) -> usize {
        self.batch / self.steps.max(1)
    }
}

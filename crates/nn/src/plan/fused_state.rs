//! State of the fused convolutions while a plan is built: norms that are computed on load, and
//! gradients passed backward. See [`ops::fused`](crate::ops::fused).

use super::value::ValueId;
use crate::graph::{NodeId, ParamId};
use crate::ops::norm::BatchNorm;

/// A batch norm that is computed where its raw input is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loaded {
    pub(crate) norm: BatchNorm,
    /// Operands: mean, variance, γ, β.
    pub(crate) parameters: [ValueId; 4],
    /// The graph's parameters γ and β.
    pub(crate) params: [ParamId; 2],
}

/// State that a fused convolution passes to the preceding convolution, in addition to the gradient
/// of the images between them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingGradient {
    pub(crate) coefficients: ValueId,
    /// Whether all pixels of an image have the same gradient.
    pub(crate) uniform: bool,
}

/// Fused convolutions of a plan.
#[derive(Debug, Default)]
pub(crate) struct FusedState {
    /// Raw images, and their norms.
    loaded: Vec<(ValueId, Loaded)>,
    /// Pending gradients, with the output of their norm unit.
    pending: Vec<(NodeId, PendingGradient)>,
    /// Tickets of all fused convolutions, and how many of them are taken. A ticket is a counter by
    /// which the last block of a launch finds itself, see [`ops::fused`](crate::ops::fused).
    pub(crate) tickets: Option<(ValueId, usize)>,
}

impl FusedState {
    /// Marks a value as raw images, which readers normalise.
    pub(crate) fn load(&mut self, raw: ValueId, of: Loaded) {
        self.loaded.push((raw, of));
    }

    /// The norm of a value, if it is raw images.
    pub(crate) fn loaded(&self, raw: ValueId) -> Option<Loaded> {
        self.loaded.iter().find(|(value, _)| *value == raw).map(|(_, of)| *of)
    }

    /// Sets the pending gradient of the norm unit with this output.
    pub(crate) fn set_pending(&mut self, output: NodeId, pending: PendingGradient) {
        self.pending.push((output, pending));
    }

    /// The pending gradient of the norm unit with this output, if a step has computed it.
    pub(crate) fn pending(&self, output: NodeId) -> Option<PendingGradient> {
        self.pending.iter().find(|(node, _)| *node == output).map(|(_, pending)| *pending)
    }
}

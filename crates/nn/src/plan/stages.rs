//! Notes on the stages of a plan that is being built: what they hand to each other. See
//! [`ops::stage`](crate::ops::stage).

use super::value::ValueId;
use crate::graph::{NodeId, ParamId};
use crate::ops::norm::BatchNorm;

/// A batch norm that is computed where its raw input is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loaded {
    pub(crate) norm: BatchNorm,
    /// Mean, variance, γ, β.
    pub(crate) parameters: [ValueId; 4],
    /// γ and β.
    pub(crate) params: [ParamId; 2],
}

/// The gradient that a stage leaves for the one before it, besides that of the images between them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    pub(crate) coefficients: ValueId,
    /// Whether all pixels of an image have the same gradient.
    pub(crate) uniform: bool,
}

/// Stages of a plan.
#[derive(Debug, Default)]
pub(crate) struct Stages {
    /// Raw images, and what they stand for.
    loaded: Vec<(ValueId, Loaded)>,
    /// By the output of a norm unit.
    left: Vec<(NodeId, Left)>,
    /// Tickets of all stages, and how many are taken.
    pub(crate) tickets: Option<(ValueId, usize)>,
}

impl Stages {
    /// Says that a value is raw images, which readers normalise.
    pub(crate) fn load(&mut self, raw: ValueId, of: Loaded) {
        self.loaded.push((raw, of));
    }

    /// The norm behind a value, if it is raw images.
    pub(crate) fn loaded(&self, raw: ValueId) -> Option<Loaded> {
        self.loaded.iter().find(|(value, _)| *value == raw).map(|(_, of)| *of)
    }

    /// Leaves a gradient's coefficients for the norm unit with this output.
    pub(crate) fn leave(&mut self, output: NodeId, left: Left) {
        self.left.push((output, left));
    }

    /// The gradient that was left for the norm unit with this output.
    pub(crate) fn left(&self, output: NodeId) -> Option<Left> {
        self.left.iter().find(|(node, _)| *node == output).map(|(_, left)| *left)
    }
}

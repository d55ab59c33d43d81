//! Operations of a graph.

use super::conv_geometry::ConvGeometry;
use super::ids::{BufferId, NodeId, ParamId};
use crate::dims::Dims;
use crate::kernels::blend::BlendMode;
use crate::kernels::elementwise::UnaryFunction;
use crate::kernels::pool::PoolGeometry;

/// Values that a blend reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlendOperands {
    /// Host value h.
    pub host: NodeId,
    /// Module value m.
    pub module: NodeId,
    /// Module input x: h itself, or a `Detach` of h, which has the same value.
    pub input: NodeId,
    /// Gate g (one value per sample) for [`BlendMode::Gate`].
    pub gate: Option<NodeId>,
}

/// Parameters of an LSTM, under PyTorch's names. Gates are in the order i, f, g, o.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LstmParams {
    /// `weight_ih_l0` `[4·hidden, in]`.
    pub weight_ih: ParamId,
    /// `weight_hh_l0` `[4·hidden, hidden]`.
    pub weight_hh: ParamId,
    /// `bias_ih_l0` `[4·hidden]`.
    pub bias_ih: ParamId,
    /// `bias_hh_l0` `[4·hidden]`.
    pub bias_hh: ParamId,
}

/// One operation. The comments give the output in terms of the inputs.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeOp {
    /// An input, f32; the batch is input 0.
    Input(usize),
    /// An input of indices, u32, counted with the other inputs.
    Indices(usize),
    /// An input with the state before the first step, f32, one row per sequence, counted with the
    /// other inputs.
    State(usize),
    /// Cross-correlation, as PyTorch's `Conv2d`; a `Linear` layer is a convolution with a 1×1
    /// kernel, with weight `[out, in]`.
    Conv2d {
        /// Input node.
        x: NodeId,
        /// Weight parameter.
        weight: ParamId,
        /// Bias parameter.
        bias: Option<ParamId>,
        /// Kernel, stride, padding, groups, dilation.
        geometry: ConvGeometry,
    },
    /// PyTorch's `BatchNorm2d`: batch statistics in training, running ones in evaluation.
    BatchNorm {
        /// Input node.
        x: NodeId,
        /// Scale γ.
        weight: ParamId,
        /// Shift β.
        bias: ParamId,
        /// Running mean and running (unbiased) variance.
        running: [BufferId; 2],
        /// Batches seen.
        num_batches_tracked: BufferId,
        /// Added to the variance.
        eps: f32,
        /// Weight of the new batch in the running statistics.
        momentum: f32,
    },
    /// PyTorch's `GroupNorm`.
    GroupNorm {
        /// Input node.
        x: NodeId,
        /// Scale γ.
        weight: ParamId,
        /// Shift β.
        bias: ParamId,
        /// Channel groups.
        groups: usize,
        /// Added to the variance.
        eps: f32,
    },
    /// PyTorch's `LayerNorm` over the channels of each pixel, or the features of a vector.
    LayerNorm {
        /// Input node.
        x: NodeId,
        /// Scale γ.
        weight: ParamId,
        /// Shift β.
        bias: ParamId,
        /// Added to the variance.
        eps: f32,
    },
    /// PyTorch's `RMSNorm` over the channels of each pixel, or the features of a vector.
    RmsNorm {
        /// Input node.
        x: NodeId,
        /// Scale γ.
        weight: ParamId,
        /// Added to the mean square.
        eps: f32,
    },
    /// `f(x)` elementwise.
    Activation(UnaryFunction, NodeId),
    /// PyTorch's `Dropout`: in training each element is 0 with the rate of the layer, and `x/(1 −
    /// rate)` otherwise; in evaluation it is `x`. The rate is read from device memory.
    Dropout {
        /// Input node.
        x: NodeId,
        /// Index into [`Graph::dropouts`](super::Graph::dropouts).
        layer: usize,
    },
    /// PyTorch's `MaxPool2d`: padding never has the maximum; floor.
    MaxPool2d {
        /// Input node.
        x: NodeId,
        /// Windows.
        window: PoolGeometry,
    },
    /// PyTorch's `AvgPool2d`: padding counts as zeros; floor.
    AvgPool2d {
        /// Input node.
        x: NodeId,
        /// Windows.
        window: PoolGeometry,
    },
    /// Mean over height and width.
    GlobalAvgPool(NodeId),
    /// PyTorch's `Embedding`, one row of the table per index, rows side by side.
    Embedding {
        /// Indices.
        x: NodeId,
        /// Table `[entries, size]`.
        table: ParamId,
    },
    /// Channels of images side by side; vectors are images of one pixel.
    Concat(Vec<NodeId>),
    /// An image as a vector in PyTorch's order: channel by channel, each row by row.
    Flatten(NodeId),
    /// PyTorch's one-layer `LSTM` over sequences; see
    /// [`GraphBuilder::lstm`](super::GraphBuilder::lstm).
    Lstm {
        /// Input vectors.
        x: NodeId,
        /// 1, or 0 where the state is reset before the step.
        keep: NodeId,
        /// State before the first step: h, then c.
        state: NodeId,
        /// Weights and biases.
        params: LstmParams,
    },
    /// `a + b`.
    Add(NodeId, NodeId),
    /// `a · b`, elementwise.
    Multiply(NodeId, NodeId),
    /// `factor · x · s`, s one value per sample and channel.
    ScaleChannels {
        /// Image.
        x: NodeId,
        /// Vector with one value for each channel of the image.
        scale: NodeId,
        /// Constant factor.
        factor: f32,
    },
    /// `x + tanh(s)·(y − x)`, s a scalar parameter.
    TanhMix {
        /// Identity branch.
        x: NodeId,
        /// Other branch.
        y: NodeId,
        /// Scalar parameter.
        mix: ParamId,
    },
    /// The value of `x`; no gradient passes.
    Detach(NodeId),
    /// The value of `host`, bit for bit; the gradient goes unchanged to both.
    StraightThrough {
        /// The value that is passed on.
        host: NodeId,
        /// The module, which gets the gradient as if its alpha were 1.
        module: NodeId,
    },
    /// Mix of host and module, see [`BlendMode`]. Alpha is read from device memory, by slot.
    Blend {
        /// Values that are mixed.
        inputs: BlendOperands,
        /// Formula.
        mode: BlendMode,
        /// Index into the alpha vector.
        alpha: usize,
    },
}

impl NodeOp {
    /// Whether the operation has parameters.
    pub(crate) fn has_params(&self) -> bool {
        matches!(
            self,
            NodeOp::Conv2d { .. }
                | NodeOp::BatchNorm { .. }
                | NodeOp::GroupNorm { .. }
                | NodeOp::LayerNorm { .. }
                | NodeOp::RmsNorm { .. }
                | NodeOp::Embedding { .. }
                | NodeOp::Lstm { .. }
                | NodeOp::TanhMix { .. }
        )
    }

    /// Its index among the inputs, if it is an input.
    pub fn input(&self) -> Option<usize> {
        match *self {
            NodeOp::Input(n) | NodeOp::Indices(n) | NodeOp::State(n) => Some(n),
            _ => None,
        }
    }

    /// The nodes read, in argument order.
    pub fn inputs(&self) -> Vec<NodeId> {
        let mut read = vec![];
        self.clone().for_each_input(|id| read.push(*id));
        read
    }

    /// Visits the nodes read, in argument order.
    pub(super) fn for_each_input(&mut self, mut visit: impl FnMut(&mut NodeId)) {
        match self {
            NodeOp::Input(_) | NodeOp::Indices(_) | NodeOp::State(_) => {}
            NodeOp::Concat(parts) => parts.iter_mut().for_each(visit),
            NodeOp::Lstm { x, keep, state, .. } => [x, keep, state].into_iter().for_each(visit),
            NodeOp::Embedding { x, .. }
            | NodeOp::Conv2d { x, .. }
            | NodeOp::BatchNorm { x, .. }
            | NodeOp::GroupNorm { x, .. }
            | NodeOp::LayerNorm { x, .. }
            | NodeOp::RmsNorm { x, .. }
            | NodeOp::MaxPool2d { x, .. }
            | NodeOp::AvgPool2d { x, .. }
            | NodeOp::Activation(_, x)
            | NodeOp::Dropout { x, .. }
            | NodeOp::GlobalAvgPool(x)
            | NodeOp::Flatten(x)
            | NodeOp::Detach(x) => visit(x),
            NodeOp::Add(a, b)
            | NodeOp::Multiply(a, b)
            | NodeOp::ScaleChannels { x: a, scale: b, .. }
            | NodeOp::TanhMix { x: a, y: b, .. }
            | NodeOp::StraightThrough { host: a, module: b } => [a, b].into_iter().for_each(visit),
            NodeOp::Blend { inputs: BlendOperands { host, module, input, gate }, .. } => {
                [host, module, input].into_iter().chain(gate).for_each(visit);
            }
        }
    }
}

/// An operation and the shape of its output.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Operation.
    pub op: NodeOp,
    /// Output shape per sample.
    pub dims: Dims,
}

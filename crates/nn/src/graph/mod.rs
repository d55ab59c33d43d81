//! A network as data: nodes in execution order, and the parameters they name.
//!
//! A [`Graph`] is independent of batches, memory and kernels; `plan` compiles it. Values are
//! described per sample as [`Dims`] (channels, height, width); a feature vector of `C` values is `C
//! × 1 × 1`. Nodes can only refer to nodes that were added before them, so a graph is acyclic by
//! construction.

mod builder;
mod cost;
mod dropout;
mod optimiser;
mod pool;
mod recurrent;
mod step_factors;
mod widening;
mod width_init;

use std::sync::Arc;

pub(crate) use builder::BATCH_NORM_MOMENTUM;
pub use builder::GraphBuilder;
pub use dropout::DropoutSpec;
pub(crate) use dropout::{DROPOUT_NUMBERS, DrawSource};
pub(crate) use optimiser::HYPERPARAMETERS;
pub use optimiser::{Optimiser, OptimiserKind};
pub use recurrent::{LstmNodes, LstmParams};
pub use step_factors::StepFactors;
pub(crate) use widening::{TensorOrigin, Widening};
pub use width_init::WidthInit;

pub use crate::dims::Dims;
pub use crate::kernels::blend::BlendMode;
pub use crate::kernels::elementwise::UnaryFunction;
pub use crate::kernels::optim::{AdamConfig, LionConfig, MuonConfig, SgdConfig};
pub use crate::kernels::pool::PoolGeometry;

/// Index of a node (and of the value it produces) in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub(crate) usize);

/// Index of a parameter in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub(crate) usize);

/// Index of a buffer (state that is not trained) in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub(crate) usize);

/// Index of a parameter group in its graph; the host is group 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub(crate) usize);

macro_rules! index {
    ($($id:ident),*) => {$(
        impl $id {
            /// Position in the graph's list.
            pub fn index(self) -> usize {
                self.0
            }
        }
    )*};
}
index!(NodeId, ParamId, BufferId, GroupId);

impl GroupId {
    /// The group of the host: open when a builder is new.
    pub const HOST: GroupId = GroupId(0);
}

/// Kernel, stride, padding, groups and dilation of a 2-d convolution. A signal is an image with one
/// row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvGeometry {
    /// Kernel height and width.
    pub kernel: [usize; 2],
    /// Vertical and horizontal stride.
    pub stride: [usize; 2],
    /// Zero rows above and below, zero columns left and right.
    pub padding: [usize; 2],
    /// Channel groups; equal to the channels for a depthwise convolution.
    pub groups: usize,
    /// Rows and columns from one element of the kernel to the next; 1 for neighbours.
    pub dilation: [usize; 2],
}

impl ConvGeometry {
    /// A kernel of this height and width: stride 1, no padding, one group, no dilation.
    pub const fn new(kernel: [usize; 2]) -> Self {
        Self { kernel, stride: [1; 2], padding: [0; 2], groups: 1, dilation: [1; 2] }
    }

    /// Stride 1 and the padding that keeps the image's size (odd kernels), one group.
    pub const fn same(kernel: usize) -> Self {
        Self::new([kernel; 2]).padding([kernel / 2; 2])
    }

    /// The same with this stride.
    pub const fn stride(self, stride: [usize; 2]) -> Self {
        Self { stride, ..self }
    }

    /// The same with this padding.
    pub const fn padding(self, padding: [usize; 2]) -> Self {
        Self { padding, ..self }
    }

    /// The same with this number of groups.
    pub const fn groups(self, groups: usize) -> Self {
        Self { groups, ..self }
    }

    /// The same with this dilation.
    pub const fn dilation(self, dilation: [usize; 2]) -> Self {
        Self { dilation, ..self }
    }
}

/// Initialisation of a new parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Every element has this value.
    Constant(f32),
    /// Uniform in `[-bound, bound)`.
    Uniform {
        /// Half the width of the interval.
        bound: f32,
    },
    /// Standard normal.
    Normal,
    /// A matrix with orthonormal rows or columns, whichever are fewer, times `gain`.
    Orthogonal {
        /// Length of the orthogonal rows or columns.
        gain: f32,
    },
    /// The bias of an LSTM's gates: 1 for the forget gate (the second quarter), 0 for the others,
    /// so that a new network keeps its state.
    ForgetBias,
}

impl Init {
    /// PyTorch's default of convolutions and linear layers, weights and biases alike:
    /// Kaiming-uniform with a = √5, which is `U(±1/√fan_in)`.
    pub(crate) fn torch_default(fan_in: usize) -> Self {
        Self::Uniform { bound: 1.0 / (fan_in.max(1) as f32).sqrt() }
    }
}

/// Kind of a parameter, which decides its packed layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParamKind {
    /// `[out, in/groups, kh, kw]` in PyTorch's shape; `[out, in/groups, k]` for signals.
    ConvWeight {
        /// Channel groups of the convolution.
        groups: usize,
    },
    /// `[out, in]` in PyTorch's shape.
    LinearWeight,
    /// A vector or a scalar; stored as it is.
    Vector,
}

impl ParamKind {
    /// Whether it is a matrix `[out, …]`, which Muon updates.
    pub fn is_matrix(self) -> bool {
        matches!(self, ParamKind::ConvWeight { .. } | ParamKind::LinearWeight)
    }
}

/// A trained parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// PyTorch's `state_dict` name (U5).
    pub name: String,
    /// PyTorch's shape.
    pub shape: Vec<usize>,
    /// Layout class.
    pub kind: ParamKind,
    /// Initialisation.
    pub init: Init,
    /// The group that clips and updates it.
    pub group: GroupId,
    /// Index of its optimiser in [`GroupSpec::optimisers`]; 0 is the group's own.
    pub variant: usize,
}

/// State that is written by the network but not trained (running statistics).
#[derive(Clone, Debug, PartialEq)]
pub struct BufferSpec {
    /// PyTorch's `state_dict` name (U5).
    pub name: String,
    /// Elements; 0-dimensional in PyTorch when `scalar`.
    pub len: usize,
    /// Value when new.
    pub init: f32,
    /// Exported as a 0-dimensional i64 (`num_batches_tracked`), else as f32 `[len]`.
    pub counter: bool,
    /// The group it comes and goes with.
    pub group: GroupId,
}

/// Parameters that are clipped and updated together: the host, or one module.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupSpec {
    /// `host`, or the slot's name.
    pub name: String,
    /// Optimiser of its parameters. Plans depend on its kind, and not on its numbers, such as the
    /// learning rate.
    pub optimiser: Optimiser,
    /// Optimisers of the same kind with other numbers, each for the parameters whose
    /// [`ParamSpec::variant`] names it.
    pub variants: Vec<Optimiser>,
}

impl GroupSpec {
    /// The group's optimiser, then its variants.
    pub fn optimisers(&self) -> impl Iterator<Item = &Optimiser> {
        std::iter::once(&self.optimiser).chain(&self.variants)
    }
}

/// Values that a blend reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlendOperands {
    /// Host value h.
    pub host: NodeId,
    /// Module value m.
    pub module: NodeId,
    /// Module input x (equal in value to h; the output of a `Detach` while blending).
    pub input: NodeId,
    /// Gate g (one value per sample) for [`BlendMode::Gate`].
    pub gate: Option<NodeId>,
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
    /// Cross-correlation, as PyTorch's `Conv2d`; a `Linear` layer is a convolution of a 1×1 image,
    /// with weight `[out, in]`.
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
        /// Index into [`Graph::dropouts`].
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
    /// PyTorch's one-layer `LSTM` over sequences; see [`GraphBuilder::lstm`].
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
        match *self {
            NodeOp::Input(_) | NodeOp::Indices(_) | NodeOp::State(_) => vec![],
            NodeOp::Concat(ref parts) => parts.clone(),
            NodeOp::Lstm { x, keep, state, .. } => vec![x, keep, state],
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
            | NodeOp::Detach(x) => vec![x],
            NodeOp::Add(a, b) | NodeOp::Multiply(a, b) => vec![a, b],
            NodeOp::ScaleChannels { x, scale, .. } => vec![x, scale],
            NodeOp::TanhMix { x, y, .. } => vec![x, y],
            NodeOp::StraightThrough { host, module } => vec![host, module],
            NodeOp::Blend { inputs: BlendOperands { host, module, input, gate }, .. } => {
                [Some(host), Some(module), Some(input), gate].into_iter().flatten().collect()
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

/// A finished network: nodes in execution order, the last one gives the logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    /// Nodes in execution order.
    pub nodes: Vec<Node>,
    /// Parameters in the order they were declared.
    pub params: Vec<ParamSpec>,
    /// Buffers in the order they were declared.
    pub buffers: Vec<BufferSpec>,
    /// Parameter groups; the host is the first.
    pub groups: Vec<GroupSpec>,
    /// Logits `[classes]`.
    pub output: NodeId,
    /// Length of the alpha vector.
    pub alphas: usize,
    /// Dropout layers in the order of their nodes.
    pub dropouts: Vec<DropoutSpec>,
    /// Factors of the host's optimiser steps, if there are any ([`Graph::with_step_factors`]).
    pub step_factors: Option<Arc<StepFactors>>,
}

impl Graph {
    /// The shape of the input per sample.
    pub fn input_dims(&self) -> Dims {
        self.nodes[0].dims
    }

    /// The id of the parameter at a position of [`Graph::params`].
    pub fn param_id(&self, index: usize) -> ParamId {
        ParamId(index)
    }

    /// Number of inputs; the batch is the first.
    pub fn inputs(&self) -> usize {
        self.nodes.iter().filter(|n| n.op.input().is_some()).count()
    }

    /// Number of classes.
    pub fn classes(&self) -> usize {
        self.nodes[self.output.0].dims.c
    }

    /// Whether the graphs are equal but for the numbers of their optimisers, factors of their
    /// steps, and rates of dropout above 0: networks of the two share plans.
    pub fn has_topology_of(&self, other: &Graph) -> bool {
        let Self { nodes, params, buffers, groups, output, alphas, dropouts, step_factors } = self;
        let like = |a: &GroupSpec, b: &GroupSpec| {
            let alike = a.optimiser.kind() == b.optimiser.kind();
            a.name == b.name && alike && a.variants.len() == b.variants.len()
        };
        let drops = |graph: &[DropoutSpec]| -> Vec<bool> {
            graph.iter().map(|layer| layer.rate > 0.0).collect()
        };
        (output, alphas) == (&other.output, &other.alphas)
            && drops(dropouts) == drops(&other.dropouts)
            && step_factors.is_some() == other.step_factors.is_some()
            && groups.len() == other.groups.len()
            && groups.iter().zip(&other.groups).all(|(a, b)| like(a, b))
            && (nodes, params, buffers) == (&other.nodes, &other.params, &other.buffers)
    }

    /// Gives some parameters other numbers of the optimiser than their group has. For a parameter
    /// and its group's optimiser, `of` returns the number of a rule and the optimiser under this
    /// rule, or `None` for the group's. Parameters of one group and rule share an optimiser, so the
    /// topology does not depend on numbers. The clip norm remains the group's.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for an optimiser of another kind than the
    /// group's.
    pub fn vary_optimisers(
        &mut self,
        of: impl Fn(&ParamSpec, &Optimiser) -> Option<(usize, Optimiser)>,
    ) -> crate::Result<()> {
        let mut rules: Vec<Vec<usize>> = vec![vec![]; self.groups.len()];
        self.groups.iter_mut().for_each(|group| group.variants.clear());
        for param in &mut self.params {
            let (group, rules) = (&mut self.groups[param.group.0], &mut rules[param.group.0]);
            param.variant = 0;
            let Some((rule, optimiser)) = of(param, &group.optimiser) else { continue };
            let [expected, got] = [&group.optimiser, &optimiser].map(Optimiser::kind);
            if expected != got {
                let (expected, got) = (format!("{expected:?}"), format!("{got:?}"));
                return Err(crate::Error::argument("vary_optimisers", "of", expected, got));
            }
            let known = rules.iter().position(|known| *known == rule);
            let at = known.unwrap_or_else(|| {
                rules.push(rule);
                group.variants.push(optimiser);
                rules.len() - 1
            });
            param.variant = at + 1;
        }
        Ok(())
    }

    /// Trained elements, in PyTorch's shapes (padding lanes not counted), of one group or of all.
    pub fn parameters(&self, group: Option<GroupId>) -> usize {
        let of_group = |p: &&ParamSpec| group.is_none_or(|g| p.group == g);
        self.params.iter().filter(of_group).map(|p| p.shape.iter().product::<usize>()).sum()
    }
}

//! Parameters and buffers: their names, shapes and initial values.

use super::ids::GroupId;

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
    /// `[out, in]` in PyTorch's shape: of a linear layer or an LSTM.
    LinearWeight,
    /// A vector, a scalar, or the table of an embedding `[entries, size]`; stored as it is.
    Vector,
}

impl ParamKind {
    /// Whether it is a matrix `[out, …]`, which Muon updates: the weight of a convolution, a linear
    /// layer or an LSTM, and not the table of an embedding.
    pub fn is_matrix(self) -> bool {
        matches!(self, ParamKind::ConvWeight { .. } | ParamKind::LinearWeight)
    }
}

/// A trained parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// PyTorch's `state_dict` name.
    pub name: String,
    /// PyTorch's shape.
    pub shape: Vec<usize>,
    /// Layout class.
    pub kind: ParamKind,
    /// Initialisation.
    pub init: Init,
    /// The group that clips and updates it.
    pub group: GroupId,
    /// Index of its optimiser in [`GroupSpec::optimisers`](super::GroupSpec::optimisers); 0 is the
    /// group's own.
    pub variant: usize,
}

/// State that is written by the network but not trained (running statistics).
#[derive(Clone, Debug, PartialEq)]
pub struct BufferSpec {
    /// PyTorch's `state_dict` name.
    pub name: String,
    /// Elements; 1 for a counter.
    pub len: usize,
    /// Value when new.
    pub init: f32,
    /// Exported as a 0-dimensional i64 (`num_batches_tracked`), else as f32 `[len]`.
    pub counter: bool,
    /// The group it comes and goes with.
    pub group: GroupId,
}

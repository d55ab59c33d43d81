//! Errors of graphs, plans, networks, weights and the tensors they are given.

use meristem_device::DeviceId;

use crate::dims::Dims;
use crate::precision::Precision;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of graphs, plans and networks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device refused or failed.
    #[error(transparent)]
    Device(#[from] meristem_device::Error),
    /// Two parameters or buffers of one graph have the same name, or two groups, or two dropout
    /// layers.
    #[error("the name `{name}` is used twice in one network; give each parameter its own")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A window does not fit into the image that is left.
    #[error(
        "`{layer}`: a {}x{} window does not fit a {}x{} image; use fewer pools or blocks, a \
         smaller kernel, or a larger image",
        window[0], window[1], dims.h, dims.w
    )]
    TooSmall {
        /// Layer.
        layer: String,
        /// Its input.
        dims: Dims,
        /// Its window.
        window: [usize; 2],
    },
    /// Channels are not divisible by the groups, or there are none.
    #[error(
        "`{layer}`: {groups} groups do not divide {} input and {} output channels; use a divisor \
         of both",
        channels[0], channels[1]
    )]
    Groups {
        /// Layer.
        layer: String,
        /// Groups asked for.
        groups: usize,
        /// Input and output channels.
        channels: [usize; 2],
    },
    /// A linear layer, an LSTM or the output of a graph was given an image, or a linear layer no
    /// outputs.
    #[error(
        "`{layer}`: expected one vector per sample and at least one output, got {}; pool images \
         first",
        form(dims)
    )]
    NotAVector {
        /// Layer.
        layer: String,
        /// Its input.
        dims: Dims,
    },
    /// Two values have different shapes, but must have the same.
    #[error("{op}: expected {} per sample, got {}", form(expected), form(got))]
    Dims {
        /// Operation.
        op: &'static str,
        /// Expected shape per sample.
        expected: Dims,
        /// Shape found.
        got: Dims,
    },
    /// A plan without samples, or with values without elements, was requested.
    #[error(
        "a plan needs at least one sample and no layer without channels, got a batch of {batch}"
    )]
    EmptyBatch {
        /// Samples asked for.
        batch: usize,
    },
    /// A plan with more samples than memory has addresses for was requested.
    #[error(
        "a batch of {batch} samples needs more memory than can be addressed; use a smaller batch"
    )]
    BatchTooLarge {
        /// Samples asked for.
        batch: usize,
    },
    /// A plan was requested for rows that are not a whole number of sequences.
    #[error("expected a whole number of sequences of {steps} steps, got {batch} rows")]
    Steps {
        /// Rows asked for.
        batch: usize,
        /// Steps asked for.
        steps: usize,
    },
    /// Batch norm in training with one value per channel, whose variance is not defined.
    #[error(
        "batch norm `{parameter}` cannot train on one value per channel; use a larger batch or \
         image"
    )]
    OneValuePerChannel {
        /// Its scale.
        parameter: String,
    },
    /// No kernel supports this.
    #[error("`{layer}`: expected {expected}, got {got}")]
    Unsupported {
        /// Layer.
        layer: String,
        /// Supported values.
        expected: &'static str,
        /// The value asked for.
        got: String,
    },
    /// A device does not compute in this precision.
    #[error(
        "{device} computes in f32 only, got the precision {precision}; use f32, or a CUDA device"
    )]
    Precision {
        /// The device.
        device: DeviceId,
        /// The precision asked for.
        precision: Precision,
    },
    /// The memory given to a plan differs from the memory that it was compiled for.
    #[error("plan: {what}: expected {expected}, got {got}")]
    PlanMemory {
        /// Name of the memory.
        what: &'static str,
        /// Lengths needed.
        expected: String,
        /// Lengths given.
        got: String,
    },
    /// An operand of a step does not fit its operation.
    #[error("{op}: operand {operand}: expected {expected}, got {got}")]
    Operand {
        /// Operation.
        op: String,
        /// Read or written, and its position.
        operand: String,
        /// Type and length that fit.
        expected: String,
        /// Type and length given.
        got: String,
    },
    /// A tensor or value given to a network does not fit.
    #[error("`{operation}`: `{argument}` must be {expected}, got {got}")]
    Argument {
        /// Operation.
        operation: &'static str,
        /// Argument.
        argument: &'static str,
        /// Accepted values.
        expected: String,
        /// The value given.
        got: String,
    },
    /// Weights that do not fit a network.
    #[error(transparent)]
    State(#[from] crate::state::StateError),
    /// A weights file cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// Action that failed, as a verb: "read" or "write".
        action: &'static str,
        /// The file.
        path: std::path::PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A weights file whose content is unusable.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file.
        path: std::path::PathBuf,
        /// The problem, and its remedy.
        problem: String,
    },
}

impl Error {
    /// The message without the path of a file, for messages that name the file themselves.
    pub fn without_path(&self) -> String {
        match self {
            Error::File { problem, .. } => problem.clone(),
            Error::Io { action, source, .. } => format!("cannot {action} it: {source}"),
            error => error.to_string(),
        }
    }

    /// [`Error::Argument`].
    pub(crate) fn argument(
        operation: &'static str,
        argument: &'static str,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Self {
        Error::Argument { operation, argument, expected: expected.into(), got: got.to_string() }
    }
}

/// The shape of a sample in words.
fn form(dims: &Dims) -> String {
    let Dims { c, h, w } = dims;
    format!("{c} channels of {h} x {w}")
}

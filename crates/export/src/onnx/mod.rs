//! Networks as ONNX models, in evaluation mode. Each node of the graph that the output needs
//! becomes operators that define it in ONNX, and nothing is folded. A model therefore computes the
//! same as the engine, up to rounding.
//!
//! | | |
//! |---|---|
//! | input `images` | f32 `[N, C, H, W]`, or bytes `[N, H, W, C]` with preprocessing |
//! | or `inputs` | vectors `[N, F]`, signals `[N, C, L]`: f32, or bytes with preprocessing |
//! | values of the input | normalised; with preprocessing as they are stored |
//! | output `logits` | f32 `[N, classes]` |
//! | or `outputs` | numbers: f32 `[N, outputs]`, in the units of the targets |
//! | initializers | parameters and running statistics, under PyTorch's names |

mod build;
mod messages;
#[cfg(test)]
mod tests;

use meristem_nn::StateDict;
use meristem_nn::graph::Graph;
use prost::Message;
use thiserror::Error;

use self::build::OnnxBuilder;
use self::messages::{ModelProto, OperatorSetIdProto, StringStringEntryProto};

/// Version of ONNX's operators in a model.
pub const OPSET: i64 = 17;
/// Name of the output of a network without a scale.
pub const LOGITS: &str = "logits";
/// Name of the output of a network with a scale.
pub const OUTPUTS: &str = "outputs";
/// Version of ONNX's format for [`OPSET`].
const IR_VERSION: i64 = 8;

/// A network to export.
#[derive(Clone, Copy, Debug)]
pub struct OnnxNetwork<'a> {
    /// The network.
    pub graph: &'a Graph,
    /// Parameters and buffers of the network.
    pub state: &'a StateDict,
    /// Alpha of each slot; [`Graph::alphas`] is their number.
    pub alphas: &'a [f32],
    /// Shape of a sample for the user: `[F]`, `[C, L]` or `[C, H, W]`.
    pub sample: &'a [usize],
    /// Normalisation by the model, if it takes samples as they are stored.
    pub preprocessing: Option<Preprocessing<'a>>,
    /// Scale and shift of each output, for a network whose outputs are standardised numbers.
    pub outputs: Option<&'a [(f32, f32)]>,
    /// Keys and values of the model's metadata.
    pub metadata: &'a [(String, String)],
}

/// Normalisation by a model: v · scale + shift for a stored value v.
#[derive(Clone, Copy, Debug)]
pub struct Preprocessing<'a> {
    /// Whether stored values are bytes, else f32.
    pub bytes: bool,
    /// Scale and shift per channel.
    pub constants: &'a [(f32, f32)],
}

/// Reason why a network cannot be exported.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OnnxError {
    /// An operation without a rule for export.
    #[error(
        "cannot export `{operation}` to ONNX: only networks without recurrent layers, embeddings \
         or further inputs are exported"
    )]
    Unsupported {
        /// Name of the operation.
        operation: &'static str,
    },
    /// A tensor that is missing, or has another form.
    #[error("cannot export tensor `{name}`: expected f32 of {expected} elements, got {got}")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// Number of elements.
        expected: usize,
        /// Element type and shape, or `nothing`.
        got: String,
    },
    /// A number of alphas, channels or outputs that differs from the network's.
    #[error("cannot export: expected {expected} {what}, got {got}")]
    Count {
        /// Kind of value.
        what: &'static str,
        /// Expected number.
        expected: usize,
        /// Actual number.
        got: usize,
    },
}

/// Encodes a network as the bytes of an `.onnx` file.
///
/// # Errors
/// [`OnnxError`] for an operation that is not exported, or for a state, alphas or constants that do
/// not fit the graph.
pub fn encode(exported: &OnnxNetwork<'_>) -> Result<Vec<u8>, OnnxError> {
    let entry = |(key, value): &(String, String)| StringStringEntryProto {
        key: key.clone(),
        value: value.clone(),
    };
    let model = ModelProto {
        ir_version: IR_VERSION,
        producer_name: "meristem".into(),
        producer_version: env!("CARGO_PKG_VERSION").into(),
        doc_string: String::new(),
        graph: Some(OnnxBuilder::new(exported)?.finish()?),
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: OPSET }],
        metadata_props: exported.metadata.iter().map(entry).collect(),
    };
    Ok(model.encode_to_vec())
}

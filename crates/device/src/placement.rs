//! The placement log (V4): the input and output tensors of each operation, and where they are.
//!
//! Events of target `meristem::placement` at debug level, one for each operation. Without a
//! subscriber it costs one check of a cached flag per operation.

use crate::ground::Use;
use crate::tensor::Tensor;
use tracing::Level;

/// Target of the log's events.
pub(crate) const TARGET: &str = "meristem::placement";

/// Logs the arguments of a launch by their positions: inputs and outputs.
pub(crate) fn log_launch(operation: &'static str, tensors: &[(&Tensor, Use)]) {
    if !tracing::enabled!(target: TARGET, Level::DEBUG) {
        return;
    }
    let words = |usage: Use| {
        let of_use = tensors.iter().enumerate().filter(|(_, (_, used))| *used == usage);
        let words: Vec<String> =
            of_use.map(|(i, (tensor, _))| format!("{i}: {}", tensor.placement())).collect();
        words.join("; ")
    };
    let (inputs, outputs) = (words(Use::Read), words(Use::Write));
    tracing::debug!(target: TARGET, operation, inputs, outputs);
}

/// Logs a tensor that an operation created, from another one or without input.
pub(crate) fn log_made(operation: &'static str, input: Option<&Tensor>, output: &Tensor) {
    if tracing::enabled!(target: TARGET, Level::DEBUG) {
        let inputs = input.map(Tensor::placement).unwrap_or_default();
        tracing::debug!(target: TARGET, operation, inputs, outputs = output.placement());
    }
}

impl Tensor {
    /// Description of a tensor in the placement log: element type, shape, memory format, device and
    /// stream (V4).
    pub fn placement(&self) -> String {
        let (device, stream) = (self.device().id(), self.stream().name());
        let (shape, dtype, format) = (self.shape(), self.dtype(), self.format());
        format!("{dtype} {shape} {format} on {device}, stream `{stream}`")
    }
}

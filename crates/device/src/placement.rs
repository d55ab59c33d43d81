//! The placement log (V4): which operation got and gave which tensors, and where they are.
//!
//! Events of target `meristem::placement` at debug level, one for each operation. While nobody listens it
//! costs one look at a cached flag for each operation.

use crate::hazard::Use;
use crate::tensor::Tensor;
use tracing::Level;

/// The target of the log's events.
pub(crate) const TARGET: &str = "meristem::placement";

/// Logs the arguments of a launch by their positions: what it reads, and what it writes.
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

/// Logs a tensor that an operation made, from another one or from nothing.
pub(crate) fn log_made(operation: &'static str, input: Option<&Tensor>, output: &Tensor) {
    if tracing::enabled!(target: TARGET, Level::DEBUG) {
        let inputs = input.map(Tensor::placement).unwrap_or_default();
        tracing::debug!(target: TARGET, operation, inputs, outputs = output.placement());
    }
}

impl Tensor {
    /// The words of the placement log for a tensor: element type, shape, memory format, device and stream (V4).
    pub fn placement(&self) -> String {
        let (device, stream) = (self.device().id(), self.stream().name());
        let (shape, dtype, format) = (self.shape(), self.dtype(), self.format());
        format!("{dtype} {shape} {format} on {device}, stream `{stream}`")
    }
}

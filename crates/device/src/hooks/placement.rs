//! The placement log (V4): the input and output tensors of each operation, with their devices and
//! streams.
//!
//! Events of target `meristem::placement` at debug level, one for each operation. Without a
//! subscriber it costs one check of a cached flag per operation.

use tracing::Level;

/// Target of the log's events.
const TARGET: &str = "meristem::placement";

/// Logs an operation with the texts of its inputs and outputs, which `describe` returns.
#[inline]
pub(crate) fn log_placement(operation: &'static str, describe: impl FnOnce() -> (String, String)) {
    if tracing::enabled!(target: TARGET, Level::DEBUG) {
        let (inputs, outputs) = describe();
        tracing::debug!(target: TARGET, operation, inputs, outputs);
    }
}

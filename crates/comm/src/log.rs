//! The placement log (V4): the input and output tensors of each collective of each rank, and where
//! they are.
//!
//! Events of target `meristem::placement::comm` at debug level, in addition to those of the
//! collective's launches. Without a subscriber it costs one check of a cached flag per operation.

use crate::communicator::Communicator;
use meristem_device::Tensor;
use tracing::Level;

/// The target of the log's events: a part of `meristem::placement`.
const TARGET: &str = "meristem::placement::comm";

/// Logs the tensors of a collective of one rank.
pub(crate) fn log(
    operation: &'static str,
    comm: &Communicator,
    inputs: &[&Tensor],
    outputs: &[&Tensor],
) {
    if !tracing::enabled!(target: TARGET, Level::DEBUG) {
        return;
    }
    let words = |tensors: &[&Tensor]| {
        tensors.iter().map(|tensor| tensor.placement()).collect::<Vec<_>>().join("; ")
    };
    let (inputs, outputs) = (words(inputs), words(outputs));
    let (rank, ranks, transport) = (comm.rank(), comm.size(), comm.transport());
    tracing::debug!(target: TARGET, operation, rank, ranks, transport, inputs, outputs);
}

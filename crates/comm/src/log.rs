//! Log targets of this crate, and the placement log (V4): the devices and streams of the input and
//! output tensors of each collective, per rank.

use meristem_device::Tensor;
use tracing::Level;

use crate::transport::Transport;

/// Target for groups, failures and libraries.
pub(crate) const COMM_LOG: &str = "meristem::comm";

/// Target of the placement log, below `meristem::placement`.
const PLACEMENT_LOG: &str = "meristem::placement::comm";

/// Logs the tensors of one rank's collective at debug level, in addition to the tensors of its
/// launches. Without a subscriber this costs one check of a cached flag.
pub(crate) fn placement(
    operation: &'static str,
    transport: &dyn Transport,
    inputs: &[&Tensor],
    outputs: &[&Tensor],
) {
    if !tracing::enabled!(target: PLACEMENT_LOG, Level::DEBUG) {
        return;
    }
    let words = |tensors: &[&Tensor]| {
        tensors.iter().map(|tensor| tensor.placement()).collect::<Vec<_>>().join("; ")
    };
    let (inputs, outputs) = (words(inputs), words(outputs));
    let (rank, ranks, transport) = (transport.rank(), transport.size(), transport.name());
    tracing::debug!(target: PLACEMENT_LOG, operation, rank, ranks, transport, inputs, outputs);
}

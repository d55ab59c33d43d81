//! Conversion of the state of a gradient exchange to tensors of a checkpoint and back.

use meristem_comm::{ExchangeState, Kept};
use meristem_nn::{HostData, HostTensor, StateDict};

/// Inserts the state as `{prefix}residual.NAME`, `{prefix}velocity.NAME` and `{prefix}split.NAME`,
/// each only if it is not empty. The exchange's step is left to the caller.
pub fn kept_into(state: ExchangeState, prefix: &str, tensors: &mut StateDict) {
    for (name, Kept { residual, velocity, split }) in state.kept {
        for (part, bytes) in [("residual", residual), ("velocity", velocity), ("split", split)] {
            if !bytes.is_empty() {
                tensors.insert(format!("{prefix}{part}.{name}"), HostTensor::bytes(bytes));
            }
        }
    }
}

/// Rebuilds the state from the tensors that [`kept_into`] inserted.
pub fn kept_from(step: u64, prefix: &str, tensors: &StateDict) -> ExchangeState {
    let mut state = ExchangeState { step, ..ExchangeState::default() };
    for (name, tensor) in tensors.iter() {
        let place = name.strip_prefix(prefix).and_then(|rest| rest.split_once('.'));
        let (Some((part, name)), HostData::U8(bytes)) = (place, &tensor.data) else { continue };
        let kept = state.kept.entry(name.to_string()).or_default();
        match part {
            "residual" => kept.residual.clone_from(bytes),
            "velocity" => kept.velocity.clone_from(bytes),
            _ => kept.split.clone_from(bytes),
        }
    }
    state
}

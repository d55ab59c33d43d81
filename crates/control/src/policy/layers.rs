//! Layers that both forms of the policy network have.

use meristem_nn::Result;
use meristem_nn::graph::{GraphBuilder, Init, LstmNodes, NodeId};

/// Encoder of the observation `x`, and the LSTM over the steps. `keep` and `state` are further
/// inputs of the LSTM.
pub(super) fn recurrent(
    b: &mut GraphBuilder,
    x: NodeId,
    hidden: usize,
    (keep, state): (NodeId, NodeId),
) -> Result<NodeId> {
    let x = linear(b, x, ("encoder.0", hidden, std::f32::consts::SQRT_2))?;
    let x = layer_norm(b, x, "encoder.1")?;
    let x = b.relu(x);
    let y = b.lstm(LstmNodes { x, keep, state }, "lstm")?;
    let y = layer_norm(b, y, "norm")?;
    b.add(x, y)
}

pub(super) fn linear(
    b: &mut GraphBuilder,
    x: NodeId,
    (name, out, gain): (&str, usize, f32),
) -> Result<NodeId> {
    b.linear(x, name, out, true, Some(Init::Orthogonal { gain }))
}

/// PyTorch's `LayerNorm` over the features, as a group norm of one group. Another operation would
/// round differently and change the outputs of policies in files.
fn layer_norm(b: &mut GraphBuilder, x: NodeId, name: &str) -> Result<NodeId> {
    b.group_norm(x, name, 1, 1.0)
}

pub(super) fn mlp(
    b: &mut GraphBuilder,
    x: NodeId,
    name: &str,
    (out, gain): (usize, f32),
) -> Result<NodeId> {
    let middle = (3 * b.dims(x).c / 4).max(1);
    let x = linear(b, x, (&format!("{name}.0"), middle, std::f32::consts::SQRT_2))?;
    let x = b.relu(x);
    linear(b, x, (&format!("{name}.2"), out, gain))
}

//! Operations between a module and its host: blends, straight-through, and the `norm` blueprint's
//! mix.

use crate::graph::{BlendMode, BlendOperands, NodeId, ParamId};
use crate::ops::PlanTarget;
use crate::ops::blend::{Blend, BlendOp};
use crate::plan::builder::{EmitBackward, PlanBuilder};
use crate::plan::value::ValueId;

/// `StraightThrough`: the host's value under another name, which keeps it bit for bit; the gradient
/// goes unchanged to both.
pub(super) fn straight_through(
    b: &mut PlanBuilder<'_>,
    node: NodeId,
    host: NodeId,
    module: NodeId,
) -> EmitBackward {
    let value = b.node(host);
    b.bind(node, value);
    Box::new(move |b, dy| [host, module].into_iter().for_each(|x| b.pass_gradient(node, x, dy)))
}

/// `Blend`.
pub(super) fn blend(
    b: &mut PlanBuilder<'_>,
    node: NodeId,
    mode: BlendMode,
    alpha: usize,
    inputs: BlendOperands,
) -> EmitBackward {
    let BlendOperands { host, module, input, gate } = inputs;
    let alpha = b.alpha(alpha);
    let gate_value = gate.map_or(ValueId::NONE, |g| b.node(g));
    // Only MULTIPLY reads the module's input.
    let reads_input = mode == BlendMode::Multiply;
    let input_value = if reads_input { b.node(input) } else { ValueId::NONE };
    let reads = [b.node(host), b.node(module), input_value, gate_value, alpha];
    let y = b.output(node);
    let blend = Blend { mode, len: b.shape(node).len(), samples: b.batch() };
    b.emit(BlendOp::Forward(blend), &reads, &[y]);
    Box::new(move |b, dy| {
        let [h, m, x, g, a] = reads;
        // The gradients of ADD depend on alpha alone: the CPU need not keep the values.
        let kept = mode != BlendMode::Add || b.options.target == PlanTarget::Cuda;
        let [h, m] = [h, m].map(|value| if kept { value } else { ValueId::NONE });
        let reads = [h, m, x, g, a, dy];
        let inputs = [Some(host), Some(module), reads_input.then_some(input), gate];
        b.send_gradients(node, inputs, |b, targets| {
            let accumulate = targets.map(|t| t.accumulate);
            b.emit(BlendOp::Gradient { blend, accumulate }, &reads, &targets.map(|t| t.value));
        });
    })
}

/// `TanhMix`: `x + tanh(s)·(y − x)`.
pub(super) fn tanh_mix(
    b: &mut PlanBuilder<'_>,
    node: NodeId,
    inputs: [NodeId; 2],
    mix: ParamId,
) -> EmitBackward {
    let [x, y] = inputs.map(|input| b.node(input));
    let s = b.param(mix);
    let out = b.output(node);
    let len = b.shape(node).len();
    b.emit(BlendOp::TanhMix { len }, &[x, y, s], &[out]);
    Box::new(move |b, dout| {
        let ds = b.param_gradient(mix);
        b.send_gradients(node, inputs, |b, [dx, dy]| {
            let op = BlendOp::TanhMixGradient { len, accumulate: [dx.accumulate, dy.accumulate] };
            b.emit(op, &[x, y, s, dout], &[dx.value, dy.value, ds]);
        });
    })
}

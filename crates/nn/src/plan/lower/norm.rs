//! Batch norm with its fusions, group norm, layer norm and RMS norm.

use crate::error::{Error, Result};
use crate::graph::{BufferId, NodeId, NodeOp, ParamId};
use crate::kernels::norm::Activation;
use crate::ops::PlanTarget;
use crate::ops::norm::{BatchNorm, GroupNorm, LayerNorm, NormOp};
use crate::plan::builder::{EmitBackward, PlanBuilder, PooledGradient};
use crate::plan::fuse::NormUnit;
use crate::plan::value::ValueId;

use super::conv::ConvNode;

/// A batch norm node.
#[derive(Clone, Copy)]
pub(super) struct NormNode {
    x: NodeId,
    pub(super) of: BatchNorm,
    /// γ and β.
    pub(super) params: [ParamId; 2],
    /// Running mean and variance.
    running: [BufferId; 2],
    /// Batches counted.
    pub(super) batches: BufferId,
    pub(super) momentum: f32,
}

impl NormNode {
    /// The batch norm of a unit; `None` if there is another operation (`fuse` makes no such units).
    ///
    /// # Errors
    /// [`Error::OneValuePerChannel`].
    pub(super) fn at(b: &PlanBuilder<'_>, unit: &NormUnit) -> Result<Option<Self>> {
        let NodeOp::BatchNorm { x, weight, bias, running, num_batches_tracked, eps, momentum } =
            b.graph.nodes[unit.norm.index()].op
        else {
            return Ok(None);
        };
        let shape = b.shape(x);
        if b.options.mode.is_training() && shape.batch * shape.pixels() == 1 {
            let parameter = b.graph.params[weight.index()].name.clone();
            return Err(Error::OneValuePerChannel { parameter });
        }
        let act = if unit.relu { Activation::Relu } else { Activation::None };
        let of = BatchNorm { shape, eps, act, pool: unit.pool };
        let params = [weight, bias];
        Ok(Some(Self { x, of, params, running, batches: num_batches_tracked, momentum }))
    }

    /// Running mean and variance, and the statistics that normalise: the batch's in training,
    /// otherwise the running ones.
    pub(super) fn statistics(&self, b: &mut PlanBuilder<'_>) -> ([ValueId; 2], [ValueId; 2]) {
        let running = self.running.map(|id| b.buffer(id));
        let c = self.of.shape.c;
        let own = b.options.mode.is_training().then(|| [b.arena(c), b.arena(c)]);
        (running, own.unwrap_or(running))
    }
}

/// A batch norm unit: statistics (computed by the convolution if there is one), then one pass that
/// normalises, rectifies and pools.
pub(super) fn batch_norm(b: &mut PlanBuilder<'_>, unit: &NormUnit) -> Result<Option<EmitBackward>> {
    let unit = *unit;
    let Some(node) = NormNode::at(b, &unit)? else { return Ok(None) };
    let NormNode { x, of: norm, params: [weight, bias], batches, momentum, .. } = node;
    let shape = norm.shape;
    let (training, count) = (b.options.mode.is_training(), shape.batch * shape.pixels());
    let conv = unit.conv.and_then(|conv| ConvNode::at(b, conv));
    let (running, [mean, var]) = node.statistics(b);
    let [gamma, beta] = [weight, bias].map(|id| b.param(id));
    let input = match conv {
        Some(conv) => conv.forward(b, training.then_some([mean, var])),
        None => b.node(x),
    };
    if training {
        if conv.is_none() {
            b.emit(NormOp::Statistics(shape), &[input], &[mean, var]);
        }
        let batches = b.buffer(batches);
        let op = NormOp::UpdateRunning { channels: shape.c, momentum, count };
        b.emit(op, &[mean, var], &[running[0], running[1], batches]);
    }
    let y = b.output(unit.output);
    let saves_codes = unit.pool && b.backward() && b.needs_gradient(unit.output);
    let codes = if saves_codes { b.arena_bytes(norm.output().len()) } else { ValueId::NONE };
    let reads = [input, mean, var, gamma, beta];
    b.emit(NormOp::Forward(norm), &reads, &[y, codes]);
    if unit.again {
        b.compute_again(unit.output, NormOp::Forward(norm), &reads);
    }
    Ok(Some(Box::new(move |b, dy| {
        let [dgamma, dbeta] = [weight, bias].map(|id| b.param_gradient(id));
        let (norm, PooledGradient { dout, codes, out }) = match b.pooled(unit.output) {
            Some(pooled) => (BatchNorm { pool: true, ..norm }, pooled),
            None => (norm, PooledGradient { dout: dy, codes, out: y }),
        };
        // A GPU does not need the output: the kernel of the sums reads the raw input anyway.
        let out =
            if norm.pool && b.options.target == PlanTarget::Cpu { out } else { ValueId::NONE };
        let coefficients = b.arena(norm.coefficients_len());
        let reads = [input, mean, var, gamma, beta, dout, codes, out];
        b.emit(NormOp::GradientSums(norm), &reads, &[coefficients, dgamma, dbeta]);
        let reads = [input, mean, beta, coefficients, dout, codes];
        let op = |accumulate| NormOp::InputGradient { norm, accumulate };
        match conv {
            Some(conv) => {
                let dx = b.stored(shape.len());
                b.emit(op(false), &reads, &[dx]);
                conv.backward(b, dx);
            }
            None => b.send_gradient(unit.output, x, &reads, op),
        }
    })))
}

/// `GroupNorm`.
pub(super) fn group_norm(b: &mut PlanBuilder<'_>, node: NodeId) -> Option<EmitBackward> {
    let NodeOp::GroupNorm { x, weight, bias, groups, eps } = b.graph.nodes[node.index()].op else {
        return None;
    };
    let shape = b.shape(node);
    let norm = GroupNorm { shape, groups, eps };
    let [gamma, beta] = [weight, bias].map(|id| b.param(id));
    let input = b.node(x);
    let y = b.output(node);
    let [mean, invstd] = [(); 2].map(|()| b.arena(shape.batch * groups));
    b.emit(NormOp::GroupForward(norm), &[input, gamma, beta], &[y, mean, invstd]);
    Some(Box::new(move |b, dy| {
        let [dgamma, dbeta] = [weight, bias].map(|id| b.param_gradient(id));
        b.send_gradients(node, [x], |b, [dx]| {
            let op = NormOp::GroupGradient { norm, accumulate: dx.accumulate };
            b.emit(op, &[input, gamma, mean, invstd, dy], &[dx.value, dgamma, dbeta]);
        });
    }))
}

/// `LayerNorm` or, without a bias, `RmsNorm`.
pub(super) fn layer_norm(
    b: &mut PlanBuilder<'_>,
    node: NodeId,
    x: NodeId,
    (weight, bias): (ParamId, Option<ParamId>),
    eps: f32,
) -> EmitBackward {
    let shape = b.shape(node);
    let norm = LayerNorm { shape, eps, centred: bias.is_some() };
    let (gamma, beta) = (b.param(weight), b.optional_param(bias));
    let input = b.node(x);
    let y = b.output(node);
    let mean = if norm.centred { b.arena(norm.rows()) } else { ValueId::NONE };
    let invstd = b.arena(norm.rows());
    b.emit(NormOp::LayerForward(norm), &[input, gamma, beta], &[y, mean, invstd]);
    Box::new(move |b, dy| {
        let (dgamma, dbeta) = (b.param_gradient(weight), b.optional_param_gradient(bias));
        b.send_gradients(node, [x], |b, [dx]| {
            let op = NormOp::LayerGradient { norm, accumulate: dx.accumulate };
            b.emit(op, &[input, gamma, mean, invstd, dy], &[dx.value, dgamma, dbeta]);
        });
    })
}

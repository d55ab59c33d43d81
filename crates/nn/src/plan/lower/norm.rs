//! Batch norm with its fusions, and group norm.

use crate::error::{Error, Result};
use crate::graph::{BufferId, NodeId, Op, ParamId};
use crate::kernels::norm::Activation;
use crate::ops::Target;
use crate::ops::norm::{BatchNorm, GroupNorm, Op as NormOp};
use crate::plan::builder::{Backward, Builder, PooledGradient};
use crate::plan::fuse::NormUnit;
use crate::plan::value::ValueId;

use super::conv::Conv;

/// A batch norm node.
#[derive(Clone, Copy)]
pub(super) struct Norm {
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

impl Norm {
    /// The batch norm of a unit; `None` if there is another operation (`fuse` makes no such units).
    ///
    /// # Errors
    /// [`Error::OneValuePerChannel`].
    pub(super) fn at(b: &Builder<'_>, unit: &NormUnit) -> Result<Option<Self>> {
        let Op::BatchNorm { x, weight, bias, running, num_batches_tracked, eps, momentum } =
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

    /// Running mean and variance, and those that it goes by: of the batch in training.
    pub(super) fn statistics(&self, b: &mut Builder<'_>) -> ([ValueId; 2], [ValueId; 2]) {
        let running = self.running.map(|id| b.buffer(id));
        let c = self.of.shape.c;
        let own = b.options.mode.is_training().then(|| [b.arena(c), b.arena(c)]);
        (running, own.unwrap_or(running))
    }
}

/// A batch norm unit: statistics (riding on the convolution if there is one), then one pass of
/// normalise, ReLU and max pooling.
pub(super) fn batch_norm(b: &mut Builder<'_>, unit: &NormUnit) -> Result<Option<Backward>> {
    let unit = *unit;
    let Some(node) = Norm::at(b, &unit)? else { return Ok(None) };
    let Norm { x, of: norm, params: [weight, bias], batches, momentum, .. } = node;
    let shape = norm.shape;
    let (training, count) = (b.options.mode.is_training(), shape.batch * shape.pixels());
    let conv = unit.conv.and_then(|conv| Conv::at(b, conv));
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
    let saves_codes = unit.pool && b.backward() && b.wants(unit.output);
    let codes = if saves_codes { b.arena_bytes(norm.output().len()) } else { ValueId::NONE };
    b.emit(NormOp::Forward(norm), &[input, mean, var, gamma, beta], &[y, codes]);
    Ok(Some(Box::new(move |b, dy| {
        let [dgamma, dbeta] = [weight, bias].map(|id| b.param_gradient(id));
        let (norm, PooledGradient { dout, codes, out }) = match b.pooled(unit.output) {
            Some(pooled) => (BatchNorm { pool: true, ..norm }, pooled),
            None => (norm, PooledGradient { dout: dy, codes, out: y }),
        };
        // A GPU has the raw input at hand: its sums are a kernel's that reads it anyway.
        let out = if norm.pool && b.options.target == Target::Cpu { out } else { ValueId::NONE };
        let coefficients = b.arena(norm.coefficients_len());
        let reads = [input, mean, var, gamma, beta, dout, codes, out];
        b.emit(NormOp::GradientSums(norm), &reads, &[coefficients, dgamma, dbeta]);
        let reads = [input, mean, beta, coefficients, dout, codes];
        let op = |accumulate| NormOp::InputGradient { norm, accumulate };
        match conv {
            Some(conv) => {
                let dx = b.arena(shape.len());
                b.emit(op(false), &reads, &[dx]);
                conv.backward(b, dx);
            }
            None => b.send_gradient([unit.output, x], &reads, op),
        }
    })))
}

/// `GroupNorm`.
pub(super) fn group_norm(b: &mut Builder<'_>, node: NodeId) -> Option<Backward> {
    let Op::GroupNorm { x, weight, bias, groups, eps } = b.graph.nodes[node.index()].op else {
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

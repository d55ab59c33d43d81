//! Batch norm with its fusions, and group norm.

use meristem_device::DType;

use crate::error::{Error, Result};
use crate::graph::{BufferId, NodeId, Op, ParamId};
use crate::kernels::ImageShape;
use crate::kernels::norm::{self, Activation};
use crate::ops::norm::{BatchNorm, GroupNorm, Op as Norm};
use crate::plan::builder::{Backward, Builder};
use crate::plan::fuse::NormUnit;
use crate::plan::value::{Space, Span, ValueId};

use super::conv::Conv;

/// Parameters and buffers of a batch norm node.
#[derive(Clone, Copy, Debug)]
struct Node {
    x: NodeId,
    weight: ParamId,
    bias: ParamId,
    running: [BufferId; 3],
    momentum: f32,
    eps: f32,
}

fn node_at(b: &Builder<'_>, id: NodeId) -> Option<Node> {
    let &Op::BatchNorm {
        x,
        weight,
        bias,
        running_mean,
        running_var,
        num_batches_tracked,
        eps,
        momentum,
    } = &b.graph.nodes[id.index()].op
    else {
        return None;
    };
    let running = [running_mean, running_var, num_batches_tracked];
    Some(Node { x, weight, bias, running, momentum, eps })
}

/// A batch norm unit: statistics (riding on the convolution if there is one), then one pass of
/// normalise, ReLU and max pooling.
pub(super) fn batch_norm(b: &mut Builder<'_>, unit: &NormUnit) -> Result<Backward> {
    let unit = *unit;
    let Some(node) = node_at(b, unit.norm) else {
        // `fuse` makes units of batch norms only.
        return Ok(Box::new(|_, _| {}));
    };
    let shape = b.shape(node.x);
    let act = if unit.relu { Activation::Relu } else { Activation::None };
    let bn = BatchNorm { shape, eps: node.eps, act, pool: unit.pool };
    let training = b.options.mode.is_training();
    if training && shape.batch * shape.pixels() == 1 {
        let name = b.graph.params[node.weight.index()].name.clone();
        return Err(Error::OneValuePerChannel { parameter: name });
    }
    let conv = unit.conv.and_then(|conv| Conv::at(b, conv));
    let running = [node.running[0], node.running[1]].map(|id| {
        let span = Span::of(b.layout.buffer(id), Space::State);
        b.fixed(span)
    });
    let stats = if training { [b.arena(shape.c), b.arena(shape.c)] } else { running };
    let x = match conv {
        Some(conv) => conv.forward(b, training.then_some(stats)),
        None => b.node(node.x),
    };
    if training {
        emit_statistics(b, &node, shape, (conv.is_none().then_some(x), stats, running));
    }
    let [gamma, beta] = [node.weight, node.bias].map(|id| b.param(id));
    let reads = [x, stats[0], stats[1], gamma, beta];
    let y = b.output(unit.output);
    let saves_codes = unit.pool && b.backward() && b.wants(unit.output);
    let codes = if saves_codes { b.arena_bytes(bn.output().len()) } else { ValueId::NONE };
    let scratch = b.scratch(bn.scratch_len());
    b.emit(Norm::Forward(bn), &reads, &[y, codes, scratch]);
    Ok(Box::new(move |b, dy| {
        let [dgamma, dbeta] = [node.weight, node.bias].map(|id| b.param_gradient(id));
        let scratch = b.scratch(bn.scratch_len());
        let (bn, dy, codes) = match b.pooled(unit.output) {
            Some(pooled) => (BatchNorm { pool: true, ..bn }, pooled.dout, pooled.codes),
            None => (bn, dy, codes),
        };
        let [x, mean, var, gamma, beta] = reads;
        let reads = [x, mean, var, gamma, beta, dy, codes];
        let emit = |b: &mut Builder<'_>, dx: ValueId, accumulate: bool| {
            let op = Norm::Gradient { norm: bn, accumulate };
            b.emit(op, &reads, &[dx, dgamma, dbeta, scratch]);
        };
        match conv {
            Some(conv) => {
                let dx = b.arena(bn.shape.len());
                emit(b, dx, false);
                conv.backward(b, dx);
            }
            // The kernel always writes dx: where nobody wants it, it is scratch.
            None if !b.wants(node.x) => {
                let dx = b.arena(bn.shape.len());
                emit(b, dx, false);
            }
            None => {
                b.send_gradients(unit.output, [node.x], |b, [dx]| emit(b, dx.value, dx.accumulate))
            }
        }
    }))
}

/// Emits the batch statistics (of `x`, unless the convolution gathered them) and the update of the
/// running ones.
fn emit_statistics(
    b: &mut Builder<'_>,
    node: &Node,
    shape: ImageShape,
    (x, stats, running): (Option<ValueId>, [ValueId; 2], [ValueId; 2]),
) {
    if let Some(x) = x {
        let scratch = b.scratch(norm::batch::stats_scratch_len(shape.c));
        b.emit(Norm::Statistics(shape), &[x], &[stats[0], stats[1], scratch]);
    }
    let counter = b.layout.buffer(node.running[2]);
    let counted = Space::Counters(counter.group);
    let batches = b.fixed(Span::new(counted, DType::I64, counter.start, 1));
    let op = Norm::UpdateRunning {
        channels: shape.c,
        momentum: node.momentum,
        count: shape.batch * shape.pixels(),
    };
    b.emit(op, &stats, &[running[0], running[1], batches]);
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
    let saved = [(); 2].map(|()| b.arena(shape.batch * groups));
    let scratch = b.scratch(norm::group::scratch_len(shape.c));
    b.emit(Norm::GroupForward(norm), &[input, gamma, beta], &[y, saved[0], saved[1], scratch]);
    Some(Box::new(move |b, dy| {
        let [dgamma, dbeta] = [weight, bias].map(|id| b.param_gradient(id));
        let scratch = b.scratch(norm::group::scratch_len(shape.c));
        b.send_gradients(node, [x], |b, [dx]| {
            let op = Norm::GroupGradient { norm, accumulate: dx.accumulate };
            let reads = [input, gamma, saved[0], saved[1], dy];
            b.emit(op, &reads, &[dx.value, dgamma, dbeta, scratch]);
        });
    }))
}

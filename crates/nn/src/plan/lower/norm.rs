//! Batch norm with its fusions, and group norm.

use crate::error::{Error, Result};
use crate::graph::{BufferId, NodeId, Op, ParamId};
use crate::kernels::norm::{
    self, Activation, BatchNormBackward, BatchNormForward, BatchNormGrads, BatchStats,
    GroupNormBackward, GroupNormForward, GroupNormGrads, GroupNormSaved, Running,
};
use crate::kernels::{GradOut, ImageShape};
use crate::plan::builder::{Backward, Builder};
use crate::plan::fuse::NormUnit;
use crate::plan::step::{Call, Context};
use crate::plan::value::{Space, Span, ValueId};

use super::conv::Conv;
use super::wanted;

/// What the steps of one batch norm have in common.
#[derive(Clone, Copy, Debug)]
struct BatchNorm {
    /// Of the raw input.
    shape: ImageShape,
    eps: f32,
    act: Activation,
    pool: bool,
}

impl BatchNorm {
    fn output(&self) -> ImageShape {
        norm::batch::output(&self.shape, self.pool)
    }

    fn scratch_len(&self) -> usize {
        norm::batch::scratch_len(self.shape.c)
    }

    fn inputs<'a>(&self, [x, mean, var, gamma, beta]: [&'a [f32]; 5]) -> BatchNormForward<'a> {
        let Self { eps, act, pool, .. } = *self;
        BatchNormForward { x, mean, var, gamma, beta, eps, act, pool }
    }
}

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
    let bytes = bn.output().len().div_ceil(size_of::<f32>());
    let codes = if saves_codes { b.arena(bytes) } else { ValueId::NONE };
    let scratch = b.scratch(bn.scratch_len());
    b.emit(Forward(bn), &reads, &[y, codes, scratch]);
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
            b.emit(Gradient { bn, accumulate }, &reads, &[dx, dgamma, dbeta, scratch]);
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
        b.emit(Statistics(shape), &[x], &[stats[0], stats[1], scratch]);
    }
    let counter = b.layout.buffer(node.running[2]);
    let call = UpdateRunning {
        momentum: node.momentum,
        count: shape.batch * shape.pixels(),
        group: counter.group.index(),
        counter: counter.start,
    };
    b.emit(call, &stats, &running);
}

#[derive(Debug)]
struct Statistics(ImageShape);

impl Call for Statistics {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([x], [mean, var, scratch]) = cx.operands.split();
        norm::batch_stats(cx.isa, &self.0, x, BatchStats { mean, var }, scratch);
    }
}

#[derive(Debug)]
struct UpdateRunning {
    momentum: f32,
    count: usize,
    group: usize,
    counter: usize,
}

impl Call for UpdateRunning {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([mean, var], [running_mean, running_var]) = cx.operands.split();
        // Counted as an i64 below: an f32 stops counting at 2^24.
        let running = Running { mean: running_mean, var: running_var };
        norm::update_running(self.momentum, self.count, mean, var, running);
        cx.operands.count(self.group, self.counter);
    }
}

#[derive(Debug)]
struct Forward(BatchNorm);

impl Call for Forward {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let (reads, [y, codes, scratch]) = cx.operands.split::<5, 3>();
        let codes: &mut [u8] = bytemuck::cast_slice_mut(codes);
        let codes = (!codes.is_empty()).then(|| &mut codes[..y.len()]);
        let of = self.0.inputs(reads);
        norm::batch_norm_act_forward(cx.isa, &self.0.shape, &of, y, codes, scratch);
    }
}

#[derive(Debug)]
struct Gradient {
    bn: BatchNorm,
    accumulate: bool,
}

impl Call for Gradient {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let (reads, [dx, dgamma, dbeta, scratch]) = cx.operands.split::<7, 4>();
        let [x, mean, var, gamma, beta, dout, codes] = reads;
        let codes: &[u8] = bytemuck::cast_slice(codes);
        let codes = codes.get(..dout.len()).unwrap_or_default();
        let forward = self.bn.inputs([x, mean, var, gamma, beta]);
        let dx = GradOut { values: dx, accumulate: self.accumulate };
        let of = BatchNormBackward { forward, dout, codes };
        let to = BatchNormGrads { dx, dgamma, dbeta };
        norm::batch_norm_act_backward(cx.isa, &self.bn.shape, &of, to, scratch);
    }
}

/// What the steps of one group norm have in common.
#[derive(Clone, Copy, Debug)]
struct GroupNorm {
    shape: ImageShape,
    groups: usize,
    eps: f32,
}

#[derive(Debug)]
struct GroupForward(GroupNorm);

impl Call for GroupForward {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([x, gamma, beta], [y, mean, invstd, scratch]) = cx.operands.split();
        let GroupNorm { shape, groups, eps } = self.0;
        let of = GroupNormForward { x, gamma, beta, groups, eps };
        let saved = GroupNormSaved { mean, invstd };
        norm::group_norm_forward(cx.isa, &shape, &of, y, saved, scratch);
    }
}

#[derive(Debug)]
struct GroupGradient {
    norm: GroupNorm,
    accumulate: bool,
}

impl Call for GroupGradient {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([x, gamma, mean, invstd, dout], [dx, dgamma, dbeta, scratch]) = cx.operands.split();
        let GroupNorm { shape, groups, .. } = self.norm;
        let of = GroupNormBackward { x, gamma, groups, mean, invstd, dout };
        let to = GroupNormGrads { dx: wanted(dx, self.accumulate), dgamma, dbeta };
        norm::group_norm_backward(cx.isa, &shape, &of, to, scratch);
    }
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
    b.emit(GroupForward(norm), &[input, gamma, beta], &[y, saved[0], saved[1], scratch]);
    Some(Box::new(move |b, dy| {
        let [dgamma, dbeta] = [weight, bias].map(|id| b.param_gradient(id));
        let scratch = b.scratch(norm::group::scratch_len(shape.c));
        b.send_gradients(node, [x], |b, [dx]| {
            let call = GroupGradient { norm, accumulate: dx.accumulate };
            let reads = [input, gamma, saved[0], saved[1], dy];
            b.emit(call, &reads, &[dx.value, dgamma, dbeta, scratch]);
        });
    }))
}

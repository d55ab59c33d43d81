//! Stages: convolutions whose neighbours are computed where raw outputs are read.

use super::conv::Conv;
use super::norm::Norm;
use crate::error::Result;
use crate::graph::{NodeId, Op};
use crate::ops::conv::Product;
use crate::ops::norm::{BatchNorm, Op as NormOp};
use crate::ops::stage::{Head, Op as StageOp, Stage};
use crate::plan::builder::{Backward, Builder};
use crate::plan::fuse::{NormUnit, Unit};
use crate::plan::stages::{Left, Loaded};
use crate::plan::value::ValueId;

/// Emits the first step of a training plan that has stages.
pub(in crate::plan) fn begin(b: &mut Builder<'_>, units: &[Unit]) {
    if !b.backward() {
        return;
    }
    let stages = units.iter().filter_map(|unit| match unit {
        Unit::Norm(NormUnit { stage: true, conv: Some(conv), .. }) => Conv::at(b, *conv),
        _ => None,
    });
    let mut group = None;
    // One more for the sums of each norm, which its own stage or a classifier takes.
    let tickets = stages.map(|conv| {
        group.get_or_insert(b.graph.params[conv.weight.index()].group.index());
        let stage = Stage::new(conv.product, None);
        stage.tickets().iter().sum::<usize>() + 1
    });
    let tickets = tickets.sum();
    if let Some(group) = group {
        b.begin_stages(tickets, group);
    }
}

/// A stage after its forward step.
#[derive(Clone, Copy)]
struct Convolved {
    unit: NormUnit,
    conv: Conv,
    stage: Stage,
    /// Norm before it, if that is computed on load.
    before: Option<Loaded>,
    /// Images that it reads, and parameters of that norm.
    reads: [ValueId; 6],
    /// Raw output, and the norm behind it.
    z: ValueId,
    behind: Loaded,
}

/// A convolution with the batch norm behind it.
pub(super) fn convolution(b: &mut Builder<'_>, unit: &NormUnit) -> Result<Option<Backward>> {
    let Some(norm) = Norm::at(b, unit)? else { return Ok(None) };
    let Some(conv) = unit.conv.and_then(|conv| Conv::at(b, conv)) else { return Ok(None) };
    let x = b.node(conv.x);
    let before = b.stages.loaded(x);
    let [m, v, g, s] = before.map_or([ValueId::NONE; 4], |of| of.parameters);
    let stage = Stage::new(conv.product, before.map(|of| of.norm));
    let reads = [x, m, v, g, s, b.param(conv.weight)];
    let z = b.output(conv.node);
    let (running, statistics) = norm.statistics(b);
    let [mean, var] = statistics;
    if b.backward() {
        let (batches, tickets) = (b.buffer(norm.batches), b.tickets(stage.tickets()[0]));
        let op = StageOp::Forward { stage, momentum: Some(norm.momentum) };
        b.emit(op, &reads, &[z, mean, var, running[0], running[1], batches, tickets]);
    } else {
        b.emit(StageOp::Forward { stage, momentum: None }, &reads, &[z]);
    }
    let [gamma, beta] = norm.params.map(|id| b.param(id));
    let parameters = [mean, var, gamma, beta];
    let behind = Loaded { norm: norm.of, parameters, params: norm.params };
    if unit.on_load {
        b.bind(unit.output, z);
        b.stages.load(z, behind);
    } else {
        let y = b.output(unit.output);
        let reads = [z, mean, var, gamma, beta];
        b.emit(NormOp::Forward(norm.of), &reads, &[y, ValueId::NONE]);
    }
    let of = Convolved { unit: *unit, conv, stage, before, reads, z, behind };
    Ok(Some(Box::new(move |b, dy| of.backward(b, dy))))
}

impl Convolved {
    fn backward(self, b: &mut Builder<'_>, dy: ValueId) {
        let Self { unit, conv, stage, before, reads, z, behind } = self;
        let (norm, dy) = match b.pooled(unit.output) {
            Some(pooled) => (BatchNorm { pool: true, ..behind.norm }, pooled.dout),
            None => (behind.norm, dy),
        };
        let left = match b.stages.left(unit.output) {
            Some(left) => left,
            None => sums(b, norm, z, &behind, dy),
        };
        let Left { coefficients, uniform } = left;
        let dweight = b.param_gradient(conv.weight);
        let tickets = b.tickets(stage.tickets()[1]);
        let [mean, _, _, beta] = behind.parameters;
        let reads = [&reads[..], &[z, mean, beta, coefficients, dy]].concat();
        b.send_gradients(unit.output, [conv.x], |b, [dx]| {
            let data = dx.data();
            let [dgamma, dbeta, coefficients] = match before {
                Some(before) => norm_gradient(b, &before),
                None => [ValueId::NONE; 3],
            };
            let op = StageOp::Backward { stage, behind: norm, uniform, data };
            b.emit(op, &reads, &[dx.value, dweight, dgamma, dbeta, coefficients, tickets]);
            if before.is_some() {
                b.stages.leave(conv.x, Left { coefficients, uniform: false });
            }
        });
    }
}

/// dγ, dβ and coefficients of a norm.
fn norm_gradient(b: &mut Builder<'_>, of: &Loaded) -> [ValueId; 3] {
    let [dgamma, dbeta] = of.params.map(|id| b.param_gradient(id));
    [dgamma, dbeta, b.arena(3 * of.norm.shape.c)]
}

/// Emits the sums of a norm's gradient, where nobody has left them.
fn sums(b: &mut Builder<'_>, norm: BatchNorm, z: ValueId, of: &Loaded, dy: ValueId) -> Left {
    let [dgamma, dbeta, coefficients] = norm_gradient(b, of);
    let ticket = b.tickets(1);
    let [mean, var, gamma, beta] = of.parameters;
    let writes = [dgamma, dbeta, coefficients, ticket];
    b.emit(StageOp::Sums(norm), &[z, mean, var, gamma, beta, dy], &writes);
    Left { coefficients, uniform: false }
}

/// `GlobalAvgPool` of a stage's images, then a linear layer.
pub(super) fn head(b: &mut Builder<'_>, pool: NodeId, linear: NodeId) -> Option<Backward> {
    let Op::GlobalAvgPool(x) = b.graph.nodes[pool.index()].op else { return None };
    let (conv, z) = (Conv::at(b, linear)?, b.node(x));
    let loaded = b.stages.loaded(z)?;
    let Product { shape, precision, .. } = conv.product;
    let head = Head { norm: loaded.norm, classes: shape.out_c, precision };
    let ([mean, var, gamma, beta], channels) = (loaded.parameters, loaded.norm.shape.c);
    let (weight, bias) = (b.param(conv.weight), b.optional_param(conv.bias));
    let means = b.arena(b.batch() * channels);
    let y = b.output(linear);
    b.emit(StageOp::Head(head), &[z, mean, var, gamma, beta, weight, bias], &[means, y]);
    Some(Box::new(move |b, dlogits| {
        let dy = b.arena(b.batch() * channels);
        let [dgamma, dbeta, coefficients] = norm_gradient(b, &loaded);
        let (dweight, dbias) =
            (b.param_gradient(conv.weight), b.optional_param_gradient(conv.bias));
        let writes = [dy, dweight, dbias, dgamma, dbeta, coefficients, b.tickets(1)];
        let reads = [z, mean, var, gamma, beta, weight, means, dlogits];
        b.emit(StageOp::HeadGradient(head), &reads, &writes);
        b.seed(x, dy);
        b.stages.leave(x, Left { coefficients, uniform: true });
    }))
}

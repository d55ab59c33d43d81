//! Fused convolutions: the batch norm and ReLU before a convolution are computed while it loads its
//! input.

use super::conv::ConvNode;
use super::norm::NormNode;
use crate::error::Result;
use crate::graph::{NodeId, NodeOp};
use crate::ops::conv::ConvProduct;
use crate::ops::fused::{ClassifierHead, FusedConv, FusedOp};
use crate::ops::norm::{BatchNorm, NormOp};
use crate::plan::builder::{EmitBackward, PlanBuilder};
use crate::plan::fuse::{NormUnit, Unit};
use crate::plan::fused_state::{Loaded, PendingGradient};
use crate::plan::value::ValueId;

/// Emits the first step of a training plan that has fused convolutions.
pub(in crate::plan) fn begin(b: &mut PlanBuilder<'_>, units: &[Unit]) {
    if !b.backward() {
        return;
    }
    let convolutions = units.iter().filter_map(|unit| match unit {
        Unit::Norm(NormUnit { fused_convolution: true, conv: Some(conv), .. }) => {
            ConvNode::at(b, *conv)
        }
        _ => None,
    });
    let mut group = None;
    // Tickets, see `ops::fused`; one more per norm, for the step that computes its gradient sums.
    let tickets = convolutions.map(|conv| {
        group.get_or_insert(b.graph.params[conv.weight.index()].group.index());
        let fused = FusedConv::new(conv.product, None);
        fused.tickets().iter().sum::<usize>() + 1
    });
    let tickets = tickets.sum();
    if let Some(group) = group {
        b.begin_fused(tickets, group);
    }
}

/// A fused convolution after its forward step.
#[derive(Clone, Copy)]
struct Convolved {
    unit: NormUnit,
    conv: ConvNode,
    fused: FusedConv,
    /// Norm before it, if that is computed on load.
    before: Option<Loaded>,
    /// Operands: images, parameters of the norm before, weight.
    reads: [ValueId; 6],
    /// Raw output, and the norm after it.
    z: ValueId,
    after: Loaded,
}

/// A convolution with the batch norm after it.
pub(super) fn convolution(
    b: &mut PlanBuilder<'_>,
    unit: &NormUnit,
) -> Result<Option<EmitBackward>> {
    let Some(norm) = NormNode::at(b, unit)? else { return Ok(None) };
    let Some(conv) = unit.conv.and_then(|conv| ConvNode::at(b, conv)) else { return Ok(None) };
    let x = b.node(conv.x);
    let before = b.fused.loaded(x);
    let [m, v, g, s] = before.map_or([ValueId::NONE; 4], |of| of.parameters);
    let fused = FusedConv::new(conv.product, before.map(|of| of.norm));
    let reads = [x, m, v, g, s, b.param(conv.weight)];
    let z = b.output(conv.node);
    let (running, statistics) = norm.statistics(b);
    let [mean, var] = statistics;
    if b.backward() {
        let (batches, tickets) = (b.buffer(norm.batches), b.tickets(fused.tickets()[0]));
        let op = FusedOp::Forward { conv: fused, momentum: Some(norm.momentum) };
        b.emit(op, &reads, &[z, mean, var, running[0], running[1], batches, tickets]);
    } else {
        b.emit(FusedOp::Forward { conv: fused, momentum: None }, &reads, &[z]);
    }
    let [gamma, beta] = norm.params.map(|id| b.param(id));
    let parameters = [mean, var, gamma, beta];
    let after = Loaded { norm: norm.of, parameters, params: norm.params };
    if unit.on_load {
        b.bind(unit.output, z);
        b.fused.load(z, after);
    } else {
        let y = b.output(unit.output);
        let reads = [z, mean, var, gamma, beta];
        b.emit(NormOp::Forward(norm.of), &reads, &[y, ValueId::NONE]);
    }
    let of = Convolved { unit: *unit, conv, fused, before, reads, z, after };
    Ok(Some(Box::new(move |b, dy| of.backward(b, dy))))
}

impl Convolved {
    fn backward(self, b: &mut PlanBuilder<'_>, dy: ValueId) {
        let Self { unit, conv, fused, before, reads, z, after } = self;
        let (norm, dy) = match b.pooled(unit.output) {
            Some(pooled) => (BatchNorm { pool: true, ..after.norm }, pooled.dout),
            None => (after.norm, dy),
        };
        // The next fused convolution, or the classifier, may have computed the sums already.
        let pending = match b.fused.pending(unit.output) {
            Some(pending) => pending,
            None => sums(b, norm, z, &after, dy),
        };
        let PendingGradient { coefficients, uniform } = pending;
        let dweight = b.param_gradient(conv.weight);
        let tickets = b.tickets(fused.tickets()[1]);
        let [mean, _, _, beta] = after.parameters;
        let reads = [&reads[..], &[z, mean, beta, coefficients, dy]].concat();
        b.send_gradients(unit.output, [conv.x], |b, [dx]| {
            let data = dx.fused_mode();
            let [dgamma, dbeta, coefficients] = match before {
                Some(before) => norm_gradient(b, &before),
                None => [ValueId::NONE; 3],
            };
            let op = FusedOp::Backward { conv: fused, after: norm, uniform, data };
            b.emit(op, &reads, &[dx.value, dweight, dgamma, dbeta, coefficients, tickets]);
            if before.is_some() {
                b.fused.set_pending(conv.x, PendingGradient { coefficients, uniform: false });
            }
        });
    }
}

/// dγ, dβ and coefficients of a norm.
fn norm_gradient(b: &mut PlanBuilder<'_>, of: &Loaded) -> [ValueId; 3] {
    let [dgamma, dbeta] = of.params.map(|id| b.param_gradient(id));
    [dgamma, dbeta, b.arena(3 * of.norm.shape.c)]
}

/// Emits the sums of a norm's gradient.
fn sums(
    b: &mut PlanBuilder<'_>,
    norm: BatchNorm,
    z: ValueId,
    of: &Loaded,
    dy: ValueId,
) -> PendingGradient {
    let [dgamma, dbeta, coefficients] = norm_gradient(b, of);
    let ticket = b.tickets(1);
    let [mean, var, gamma, beta] = of.parameters;
    let writes = [dgamma, dbeta, coefficients, ticket];
    b.emit(FusedOp::Sums(norm), &[z, mean, var, gamma, beta, dy], &writes);
    PendingGradient { coefficients, uniform: false }
}

/// `GlobalAvgPool` of a fused convolution's images, then a linear layer.
pub(super) fn head(b: &mut PlanBuilder<'_>, pool: NodeId, linear: NodeId) -> Option<EmitBackward> {
    let NodeOp::GlobalAvgPool(x) = b.graph.nodes[pool.index()].op else { return None };
    let (conv, z) = (ConvNode::at(b, linear)?, b.node(x));
    let loaded = b.fused.loaded(z)?;
    let ConvProduct { shape, precision, .. } = conv.product;
    let head = ClassifierHead { norm: loaded.norm, classes: shape.out_c, precision };
    let ([mean, var, gamma, beta], channels) = (loaded.parameters, loaded.norm.shape.c);
    let (weight, bias) = (b.param(conv.weight), b.optional_param(conv.bias));
    let means = b.arena(b.batch() * channels);
    let y = b.output(linear);
    b.emit(FusedOp::Head(head), &[z, mean, var, gamma, beta, weight, bias], &[means, y]);
    Some(Box::new(move |b, dlogits| {
        let dy = b.stored(b.batch() * channels);
        let [dgamma, dbeta, coefficients] = norm_gradient(b, &loaded);
        let (dweight, dbias) =
            (b.param_gradient(conv.weight), b.optional_param_gradient(conv.bias));
        let writes = [dy, dweight, dbias, dgamma, dbeta, coefficients, b.tickets(1)];
        let reads = [z, mean, var, gamma, beta, weight, means, dlogits];
        b.emit(FusedOp::HeadGradient(head), &reads, &writes);
        b.seed(x, dy);
        b.fused.set_pending(x, PendingGradient { coefficients, uniform: true });
    }))
}

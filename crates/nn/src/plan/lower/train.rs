//! Steps of a run around the graph: loss, clipping, the optimisers, and results for the caller.

use std::ops::Range;
use std::sync::Arc;

use meristem_device::DType;

use crate::graph::{GroupId, HYPERPARAMETERS, NodeId, NodeOp, OptimiserKind};
use crate::kernels::muon::MuonMatrix;
use crate::kernels::ppo::PpoLoss;
use crate::kernels::sample::Sampler;
use crate::layout::packing;
use crate::metrics;
use crate::ops::loss::BatchLoss;
use crate::ops::ppo::PpoPass;
use crate::ops::{
    self, ElementwiseOp, LossOp, OperandRole, OptimOp, PpoOp, RowsOp, SampleOp, Spec,
};
use crate::plan::Phase;
use crate::plan::builder::PlanBuilder;
use crate::plan::value::{PlanValue, ValueId};
use crate::precision::ValueType;
use crate::space::{Space, SpaceSpan};

/// Emits the mean loss of the graph's output with the targets; returns its gradient.
pub(in crate::plan) fn loss(b: &mut PlanBuilder<'_>) -> ValueId {
    let (reads, gradient) = (loss_reads(b), output_like(b));
    let (groups, log) = (b.graph.groups.len(), b.options.batch_log);
    let counts = b.fixed(metrics::TRAIN);
    let ring = b.fixed(metrics::log_span(groups, log));
    let mut writes = vec![gradient, counts, ring];
    let of = batch_loss(b);
    if of.has_score_sums() {
        writes.push(b.fixed(metrics::train_score_span(groups, log)));
    }
    b.emit(LossOp::Train { of, log }, &reads, &writes);
    b.as_values(gradient)
}

/// Emits the loss of proximal policy optimisation over the graph's output; returns its gradient.
pub(in crate::plan) fn policy_loss(
    b: &mut PlanBuilder<'_>,
    loss: &Arc<PpoLoss>,
    pass: PpoPass,
) -> ValueId {
    let (value, gradient) = (b.node(b.graph.output), output_like(b));
    let (loss, rows) = (Arc::clone(loss), b.batch());
    emit_with_extra_inputs(b, PpoOp::Objective { loss, pass, rows }, &[value], &[gradient]);
    b.as_values(gradient)
}

/// Emits a copy of the graph's output to the caller's memory, in the forward pass.
pub(in crate::plan) fn deliver_output(b: &mut PlanBuilder<'_>) {
    let (output, len) = (b.node(b.graph.output), b.shape(b.graph.output).len());
    let to = b.fixed(SpaceSpan::new(Space::Output(0), DType::F32, 0, len));
    deliver_f32(b, output, to);
}

/// Emits a copy of the output's gradient from the input after the graph's; returns the copy, to
/// which later steps may add.
pub(in crate::plan) fn given_gradient(b: &mut PlanBuilder<'_>) -> ValueId {
    let (len, input) = (b.shape(b.graph.output).len(), b.graph.inputs());
    let given = b.fixed(SpaceSpan::new(Space::Input(input), DType::F32, 0, len));
    if b.options.values() != ValueType::F32 {
        return b.as_values(given);
    }
    let gradient = output_like(b);
    b.emit(pass(len), &[given], &[gradient]);
    gradient
}

/// Emits a copy of a value to memory of the caller, which is f32.
fn deliver_f32(b: &mut PlanBuilder<'_>, from: ValueId, to: ValueId) {
    let PlanValue { dtype, len, .. } = b.values[from.index()];
    if dtype == DType::F32 {
        b.emit_f32(pass(len), &[from], &[to]);
    } else {
        b.emit(ElementwiseOp::Widen { len }, &[from], &[to]);
    }
}

/// An f32 value of the length of the output.
fn output_like(b: &mut PlanBuilder<'_>) -> ValueId {
    b.arena(b.shape(b.graph.output).len())
}

/// Emits loss and sums of the score of the graph's output, for the given rows of the scores.
/// `reference` has the samples' losses of row 0: written when row 0 is scored, which is the first,
/// and read for all other rows.
pub(in crate::plan) fn score(b: &mut PlanBuilder<'_>, rows: &[usize], reference: ValueId) {
    let (reads, rows) = (loss_reads(b), rows.to_vec());
    let of = batch_loss(b);
    let len = metrics::scores_len(&rows, of.has_score_sums());
    let scores = b.fixed(SpaceSpan::new(Space::Scores, DType::F64, 0, len));
    let own = b.arena(b.batch());
    b.emit(LossOp::Evaluate { of, rows }, &reads, &[scores, reference, own]);
}

fn batch_loss(b: &PlanBuilder<'_>) -> BatchLoss {
    let (batch, outputs) = (b.batch(), b.graph.classes());
    BatchLoss { formula: b.options.loss.formula(), batch, outputs }
}

/// The graph's output, the targets, and class weights if the formula has them.
fn loss_reads(b: &mut PlanBuilder<'_>) -> Vec<ValueId> {
    let mut reads = vec![b.node(b.graph.output), targets(b)];
    if batch_loss(b).reads_weights() {
        let len = b.options.loss.class_weights().map(<[f32]>::len);
        let weights = len.map(|len| SpaceSpan::new(Space::ClassWeights, DType::F32, 0, len));
        reads.push(weights.map_or(ValueId::NONE, |span| b.fixed(span)));
    }
    reads
}

fn targets(b: &mut PlanBuilder<'_>) -> ValueId {
    let dtype = b.options.loss.target_dtype();
    let len = if dtype == DType::U32 { b.batch() } else { b.batch() * b.graph.classes() };
    b.fixed(SpaceSpan::new(Space::Targets, dtype, 0, len))
}

/// Emits norms and clip coefficient of every group that has a gradient, then their updates. A
/// parameter that no gradient reaches is left alone, as PyTorch leaves one whose `grad` is `None`:
/// no decay, no momentum.
pub(in crate::plan) fn update(b: &mut PlanBuilder<'_>) {
    let groups = 0..b.graph.groups.len();
    let groups = groups.filter_map(|group| Some((group, b.group_gradient(group)?)));
    let groups: Vec<(usize, ValueId)> = groups.collect();
    b.begin(Phase::Measure);
    let coefficients: Vec<ValueId> =
        groups.iter().map(|(group, gradient)| measure(b, *group, *gradient)).collect();
    b.begin(Phase::Update);
    for ((group, gradient), clip) in groups.into_iter().zip(coefficients) {
        let (id, size) = (GroupId(group), b.layout.groups[group]);
        let memories =
            [(Space::Values(id), size.values), (Space::OptimiserState(id), size.moments)];
        let [values, moments] =
            memories.map(|(space, len)| b.fixed(SpaceSpan::new(space, DType::F32, 0, len)));
        let optimiser = b.graph.groups[group].optimiser.kind();
        let before = (id == GroupId::HOST && b.graph.step_factors.is_some()).then(|| {
            let kept = b.arena(size.values);
            b.emit_f32(pass(size.values), &[values], &[kept]);
            kept
        });
        for variant in 0..=b.graph.groups[group].variants.len() {
            let (runs, matrices) = updated(b, (group, variant), optimiser);
            if runs.iter().all(Range::is_empty) && matrices.is_empty() {
                continue;
            }
            let numbers = hyperparameters(b, group, variant);
            let steps = b.layout.steps[group].clone().map_or(ValueId::NONE, |steps| {
                b.fixed(SpaceSpan::new(Space::Counters(id), DType::I64, steps.start, steps.len()))
            });
            let op = OptimOp::Update { len: size.values, optimiser, runs, matrices };
            b.emit(op, &[gradient, clip, numbers], &[values, moments, steps]);
        }
        if let Some(before) = before {
            shorten(b, size.values, before, values);
        }
    }
}

/// Emits the plan steps that scale the update of each parameter by its factor f: a parameter that
/// was p and is p' becomes `f·p' + (1 − f)·p`, which is p' itself with f = 1, and p with f = 0.
fn shorten(b: &mut PlanBuilder<'_>, len: usize, before: ValueId, values: ValueId) {
    let [factors, rests] =
        [0, len].map(|start| b.fixed(SpaceSpan::new(Space::StepFactors, DType::F32, start, len)));
    let mixed = b.arena(len);
    let product = |accumulate| ElementwiseOp::Product { len, accumulate };
    b.emit_f32(product(false), &[values, factors], &[mixed]);
    b.emit_f32(product(true), &[before, rests], &[mixed]);
    b.emit_f32(pass(len), &[mixed], &[values]);
}

fn pass(len: usize) -> ElementwiseOp {
    ElementwiseOp::Pass { len, accumulate: false }
}

/// Ranges and matrices of the update of a group's parameters of one variant. If the optimiser
/// counts steps, there is one range for each parameter of the group (empty if another variant or
/// Muon updates it, or no gradient reaches it): range i has step counter i.
fn updated(
    b: &PlanBuilder<'_>,
    (group, variant): (usize, usize),
    optimiser: OptimiserKind,
) -> (Vec<Range<usize>>, Vec<MuonMatrix>) {
    if !optimiser.counts_steps() {
        return (joined(&tensors(b, group, Some(variant))), vec![]);
    }
    let (mut runs, mut matrices) = (vec![], vec![]);
    let params = b.graph.params.iter().zip(&b.layout.params).zip(&b.trained);
    for ((param, place), trained) in params.filter(|((p, _), _)| p.group.index() == group) {
        let is_matrix = !optimiser.counts_steps_of(param.kind);
        let trained = *trained && param.variant == variant;
        if trained && is_matrix {
            matrices.push(packing(param).matrix(place.start));
        }
        let end = if trained && !is_matrix { place.range().end } else { place.start };
        runs.push(place.start..end);
    }
    (runs, matrices)
}

/// Emits norm and clip coefficient of a group; returns the coefficient.
fn measure(b: &mut PlanBuilder<'_>, group: usize, gradient: ValueId) -> ValueId {
    let len = b.layout.groups[group].values;
    let op = OptimOp::Measure { len, tensors: tensors(b, group, None), norm_factor: 1.0 };
    let numbers = hyperparameters(b, group, 0);
    let (row, coefficient) = (b.fixed(metrics::group_span(group)), b.arena(1));
    b.keep([coefficient]);
    b.emit(op, &[gradient, numbers], &[row, coefficient]);
    coefficient
}

/// The numbers of an optimiser of a group.
fn hyperparameters(b: &mut PlanBuilder<'_>, group: usize, variant: usize) -> ValueId {
    let before = b.graph.groups[..group].iter().map(|group| group.optimisers().count());
    let start = (before.sum::<usize>() + variant) * HYPERPARAMETERS;
    b.fixed(SpaceSpan::new(Space::Hyperparameters, DType::F64, start, HYPERPARAMETERS))
}

/// Emits copies to the caller's memory: of the output, or of the draws from it, then of every
/// LSTM's last state. A plan that draws also copies all inputs except states.
pub(in crate::plan) fn deliver(b: &mut PlanBuilder<'_>, draw: Option<&Arc<Sampler>>) {
    b.begin(Phase::Deliver);
    let output = b.node(b.graph.output);
    let (mut results, first) = match draw {
        None => (vec![output], 0),
        Some(sampler) => {
            let (sampler, rows) = (Arc::clone(sampler), b.batch());
            (vec![], emit_with_extra_inputs(b, SampleOp::Draw { sampler, rows }, &[output], &[]))
        }
    };
    results.extend(b.last_states.clone());
    if draw.is_some() {
        for (i, node) in b.graph.nodes.iter().enumerate() {
            let is_copied = !matches!(node.op, NodeOp::State(_));
            results.extend(is_copied.then(|| b.input(NodeId(i))).flatten());
        }
    }
    for (n, from) in (first..).zip(results) {
        let PlanValue { dtype, len, .. } = b.values[from.index()];
        let dtype = if dtype == DType::U32 { dtype } else { DType::F32 };
        let to = b.fixed(SpaceSpan::new(Space::Output(n), dtype, 0, len));
        if dtype == DType::U32 {
            b.emit(RowsOp::CopyIndices { len }, &[from], &[to]);
        } else {
            deliver_f32(b, from, to);
        }
    }
}

/// Emits a step that also reads the inputs after the graph's and writes the first outputs; returns
/// the number of these outputs.
fn emit_with_extra_inputs(
    b: &mut PlanBuilder<'_>,
    op: impl Into<ops::StepOp>,
    reads: &[ValueId],
    writes: &[ValueId],
) -> usize {
    let op = op.into();
    let (signature, first) = (op.signature(b.options.target, b.options.values()), b.graph.inputs());
    let mut fixed = |space, spec: &Spec| b.fixed(SpaceSpan::new(space, spec.dtype, 0, spec.len));
    let inputs = signature.reads.iter().skip(reads.len()).zip(first..);
    let inputs: Vec<_> = inputs.map(|(spec, n)| fixed(Space::Input(n), spec)).collect();
    // Scratch is the builder's.
    let kept = signature.writes.iter().filter(|spec| spec.role != OperandRole::Scratch);
    let outputs = kept.skip(writes.len()).enumerate();
    let outputs: Vec<_> = outputs.map(|(n, spec)| fixed(Space::Output(n), spec)).collect();
    b.emit(op, &[reads, &inputs].concat(), &[writes, &outputs].concat());
    outputs.len()
}

/// The parameters of a group, or of one of its variants, that a gradient reaches, in the group's
/// layout.
fn tensors(b: &PlanBuilder<'_>, group: usize, variant: Option<usize>) -> Vec<Range<usize>> {
    let params = b.graph.params.iter().zip(&b.layout.params).zip(&b.trained);
    params
        .filter(|((p, _), trained)| p.group.index() == group && **trained)
        .filter(|((p, _), _)| variant.is_none_or(|variant| p.variant == variant))
        .map(|((_, place), _)| place.range())
        .collect()
}

/// Joins ranges with nothing between them but the padding up to a whole vector.
fn joined(ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = vec![];
    for range in ranges {
        match runs.last_mut() {
            Some(last) if crate::layout::padded(last.end) == range.start => last.end = range.end,
            _ => runs.push(range.clone()),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_joined_and_gaps_are_kept() {
        let runs = joined(&[0..32, 32..40, 48..64, 80..81]);
        assert_eq!(runs, [0..64, 80..81]);
        assert!(joined(&[]).is_empty());
    }
}

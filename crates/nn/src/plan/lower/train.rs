//! Steps of a run around the graph: loss, clipping, the optimisers, and results for the caller.

use std::ops::Range;
use std::sync::Arc;

use meristem_device::DType;

use crate::graph::{GroupId, NodeId, Op};
use crate::kernels::ppo::PpoLoss;
use crate::kernels::sample::Sampler;
use crate::metrics;
use crate::ops::ppo::Pass;
use crate::ops::{self, Role, Spec, elementwise, loss, optim, ppo, rows, sample};
use crate::plan::Phase;
use crate::plan::builder::Builder;
use crate::plan::value::{Value, ValueId};
use crate::space::{Space, Span};

/// Emits the mean cross-entropy of the graph's output with the labels; returns its gradient.
pub(in crate::plan) fn cross_entropy(b: &mut Builder<'_>) -> ValueId {
    let (value, targets, gradient) = (b.node(b.graph.output), targets(b), output_like(b));
    let log = b.options.batch_log;
    let counts = b.fixed(metrics::TRAIN);
    let ring = b.fixed(metrics::log_span(b.graph.groups.len(), log));
    let op = loss::Op::Train { logits: logits(b), log };
    b.emit(op, &[value, targets], &[gradient, counts, ring]);
    gradient
}

/// Emits the loss of proximal policy optimisation over the graph's output; returns its gradient.
pub(in crate::plan) fn policy_loss(
    b: &mut Builder<'_>,
    loss: &Arc<PpoLoss>,
    pass: Pass,
) -> ValueId {
    let (value, gradient) = (b.node(b.graph.output), output_like(b));
    let (loss, rows) = (Arc::clone(loss), b.batch());
    emit_given(b, ppo::Op::Objective { loss, pass, rows }, &[value], &[gradient]);
    gradient
}

fn output_like(b: &mut Builder<'_>) -> ValueId {
    b.arena(b.shape(b.graph.output).len())
}

/// Emits loss and hits of the graph's output, for these rows of the scores. `first` has the losses
/// of row 0, which comes before all others.
pub(in crate::plan) fn score(b: &mut Builder<'_>, rows: &[usize], first: ValueId) {
    let value = b.node(b.graph.output);
    let (targets, rows) = (targets(b), rows.to_vec());
    let scores = b.fixed(Span::new(Space::Scores, DType::F64, 0, metrics::scores_len(&rows)));
    let own = b.arena(b.batch());
    let op = loss::Op::Evaluate { logits: logits(b), rows };
    b.emit(op, &[value, targets], &[scores, first, own]);
}

fn logits(b: &Builder<'_>) -> loss::Logits {
    loss::Logits { batch: b.batch(), classes: b.graph.classes() }
}

fn targets(b: &mut Builder<'_>) -> ValueId {
    b.fixed(Span::new(Space::Targets, DType::U32, 0, b.batch()))
}

/// Emits norms and clip coefficient of every group that has a gradient, then their updates. A
/// parameter that no gradient reaches is left alone, as PyTorch leaves one whose `grad` is `None`:
/// no decay, no momentum.
pub(in crate::plan) fn update(b: &mut Builder<'_>) {
    let groups = 0..b.graph.groups.len();
    let groups = groups.filter_map(|group| Some((group, b.group_gradient(group)?)));
    let groups: Vec<(usize, ValueId)> = groups.collect();
    b.begin(Phase::Measure);
    let coefficients: Vec<ValueId> =
        groups.iter().map(|(group, gradient)| measure(b, *group, *gradient)).collect();
    b.begin(Phase::Update);
    for ((group, gradient), clip) in groups.into_iter().zip(coefficients) {
        let (id, size) = (GroupId(group), b.layout.groups[group]);
        let memories = [(Space::Values(id), size.values), (Space::Momentum(id), size.moments)];
        let [values, moments] =
            memories.map(|(space, len)| b.fixed(Span::new(space, DType::F32, 0, len)));
        let steps = b.layout.steps[group].map_or(ValueId::NONE, |step| {
            b.fixed(Span::new(Space::Counters(id), DType::I64, step, 1))
        });
        let (len, runs) = (size.values, joined(&tensors(b, group)));
        let op = optim::Op::Update { len, optimiser: b.graph.groups[group].optimiser, runs };
        b.emit(op, &[gradient, clip], &[values, moments, steps]);
    }
}

/// Emits norm and clip coefficient of a group; returns the coefficient.
fn measure(b: &mut Builder<'_>, group: usize, gradient: ValueId) -> ValueId {
    let len = b.layout.groups[group].values;
    let norm_max = b.graph.groups[group].optimiser.clip_norm();
    let op = optim::Op::Measure { len, tensors: tensors(b, group), norm_max };
    let (row, coefficient) = (b.fixed(metrics::group_span(group)), b.arena(1));
    b.keep([coefficient]);
    b.emit(op, &[gradient], &[row, coefficient]);
    coefficient
}

/// Emits copies to the caller's memory: of the output, or of what is drawn from it, then of every
/// LSTM's last state; where something is drawn, also of the inputs that have rows.
pub(in crate::plan) fn deliver(b: &mut Builder<'_>, draw: Option<&Arc<Sampler>>) {
    b.begin(Phase::Deliver);
    let output = b.node(b.graph.output);
    let (mut results, first) = match draw {
        None => (vec![output], 0),
        Some(sampler) => {
            let (sampler, rows) = (Arc::clone(sampler), b.batch());
            (vec![], emit_given(b, sample::Op::Draw { sampler, rows }, &[output], &[]))
        }
    };
    results.extend(b.last_states.clone());
    if draw.is_some() {
        for (i, node) in b.graph.nodes.iter().enumerate() {
            let has_rows = !matches!(node.op, Op::State(_));
            results.extend(has_rows.then(|| b.input(NodeId(i))).flatten());
        }
    }
    for (n, from) in (first..).zip(results) {
        let Value { dtype, len, .. } = b.values[from.index()];
        let to = b.fixed(Span::new(Space::Output(n), dtype, 0, len));
        let op: ops::Op = match dtype {
            DType::U32 => rows::Op::CopyIndices { len }.into(),
            _ => elementwise::Op::Pass { len, accumulate: false }.into(),
        };
        b.emit(op, &[from], &[to]);
    }
}

/// Emits a step that reads and writes more than what is named here: the inputs that follow the
/// graph's, and the first outputs, whose number is returned.
fn emit_given(
    b: &mut Builder<'_>,
    op: impl Into<ops::Op>,
    reads: &[ValueId],
    writes: &[ValueId],
) -> usize {
    let op = op.into();
    let (signature, first) = (op.signature(b.options.target), b.graph.inputs());
    let mut fixed = |space, spec: &Spec| b.fixed(Span::new(space, spec.dtype, 0, spec.len));
    let inputs = signature.reads.iter().skip(reads.len()).zip(first..);
    let inputs: Vec<_> = inputs.map(|(spec, n)| fixed(Space::Input(n), spec)).collect();
    // Scratch is the builder's.
    let kept = signature.writes.iter().filter(|spec| spec.role != Role::Scratch);
    let outputs = kept.skip(writes.len()).enumerate();
    let outputs: Vec<_> = outputs.map(|(n, spec)| fixed(Space::Output(n), spec)).collect();
    b.emit(op, &[reads, &inputs].concat(), &[writes, &outputs].concat());
    outputs.len()
}

/// The parameters of a group that a gradient reaches, in the group's layout.
fn tensors(b: &Builder<'_>, group: usize) -> Vec<Range<usize>> {
    let params = b.graph.params.iter().zip(&b.layout.params).zip(&b.trained);
    params
        .filter(|((p, _), trained)| p.group.index() == group && **trained)
        .map(|((_, place), _)| place.range())
        .collect()
}

/// Joins ranges that follow each other up to a whole vector.
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

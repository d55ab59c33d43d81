//! What a training step does around the graph: loss, clipping and the optimiser's step.

use std::ops::Range;

use crate::graph::SgdConfig;
use crate::kernels::loss;
use crate::kernels::optim::{self, SgdStep};
use crate::network::metrics::BatchResult;
use crate::plan::builder::Builder;
use crate::plan::step::{Call, Context};
use crate::plan::value::{Space, Span, ValueId};

/// Softmax cross-entropy: adds loss and hits to the metrics, and in training gives the gradient of
/// the batch mean.
#[derive(Debug)]
struct CrossEntropy {
    classes: usize,
    /// In evaluation: the rows of metrics to add to, counted from the run's.
    rows: Vec<usize>,
}

impl Call for CrossEntropy {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([logits], [dlogits]) = cx.operands.split();
        let training = !dlogits.is_empty();
        let dlogits = training.then_some(dlogits);
        let targets = cx.targets;
        let sums = loss::softmax_cross_entropy(cx.isa, self.classes, logits, targets, dlogits);
        let batch =
            BatchResult { loss_sum: sums.loss, correct: sums.correct, samples: targets.len() };
        match training {
            true => cx.metrics.add_train(batch),
            false => self.rows.iter().for_each(|row| cx.metrics.add_eval(cx.config + row, batch)),
        }
    }
}

/// Emits the loss of the graph's output. In training its gradient becomes the output's; in evaluation
/// it goes to these rows of the metrics, counted from the one that the plan is run with.
pub(in crate::plan) fn cross_entropy(b: &mut Builder<'_>, rows: &[usize]) {
    let output = b.graph.output;
    let logits = b.node(output);
    let training = b.backward();
    let dlogits = if training { b.arena(b.shape(output).len()) } else { ValueId::NONE };
    let classes = b.graph.classes();
    let rows = rows.to_vec();
    b.emit_effect(CrossEntropy { classes, rows }, &[logits], &[dlogits]);
    if training {
        b.seed(output, dlogits);
    }
}

/// One group's update: L2 norm over its tensors in f64, clipping, SGD.
#[derive(Debug)]
struct Update {
    group: usize,
    sgd: SgdConfig,
    /// One range per tensor.
    tensors: Vec<Range<usize>>,
    /// The same elements in as few ranges as possible; lanes between two tensors are zero and stay so.
    runs: Vec<Range<usize>>,
}

impl Call for Update {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([gradient], [values, momentum]) = cx.operands.split();
        let squares =
            self.tensors.iter().map(|t| optim::grad_norm_sq(cx.isa, &gradient[t.clone()]));
        let norm = cx.metrics.add_group(self.group, squares);
        let step = SgdStep {
            lr: self.sgd.lr,
            momentum: self.sgd.momentum,
            weight_decay: self.sgd.weight_decay,
            clip: optim::clip_coefficient(norm, self.sgd.clip_norm),
            // With a momentum of zeros PyTorch's first step is no special case.
            first: false,
        };
        for run in &self.runs {
            let [values, momentum] = [&mut *values, &mut *momentum].map(|s| &mut s[run.clone()]);
            optim::sgd_step(cx.isa, &step, values, &gradient[run.clone()], momentum);
        }
    }
}

/// Emits the update of every group that has a gradient. A parameter that no gradient reaches is left
/// alone, as PyTorch leaves one whose `grad` is `None`: no decay, no momentum.
pub(in crate::plan) fn updates(b: &mut Builder<'_>) {
    for group in 0..b.graph.groups.len() {
        let Some(gradient) = b.group_gradient(group) else { continue };
        let params = b.graph.params.iter().zip(&b.layout.params).zip(&b.trained);
        let tensors: Vec<_> = params
            .filter(|((p, _), trained)| p.group.index() == group && **trained)
            .map(|((_, place), _)| place.range())
            .collect();
        let id = crate::graph::GroupId(group);
        let whole = |space| Span { space, start: 0, len: b.layout.groups[group].values };
        let [values, momentum] = [Space::Values(id), Space::Momentum(id)].map(whole);
        let [values, momentum] = [values, momentum].map(|span| b.fixed(span));
        let sgd = b.graph.groups[group].sgd;
        let call = Update { group, sgd, runs: joined(&tensors), tensors };
        b.emit_effect(call, &[gradient], &[values, momentum]);
    }
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

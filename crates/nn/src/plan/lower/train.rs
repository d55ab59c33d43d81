//! What a training step does around the graph: loss, clipping and the optimiser's step.

use std::ops::Range;

use crate::graph::Optimiser;
use crate::kernels::loss;
use crate::kernels::optim;
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

/// Calls the caller's function.
#[derive(Debug)]
struct CallObjective;

impl Call for CallObjective {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let ([output], [gradient]) = cx.operands.split();
        match &mut cx.objective {
            Some(objective) => objective(output, gradient),
            // Never: such plans are run by `execute_objective` only.
            None => gradient.fill(0.0),
        }
    }
}

/// Emits the caller's function of the graph's output, whose result becomes the output's gradient.
pub(in crate::plan) fn objective(b: &mut Builder<'_>) {
    let output = b.graph.output;
    let (value, gradient) = (b.node(output), b.arena(b.shape(output).len()));
    b.emit_effect(CallObjective, &[value], &[gradient]);
    b.seed(output, gradient);
}

/// One group's update: L2 norm over its tensors in f64 and clipping, unless that was done; the optimiser's step.
#[derive(Debug)]
struct Update {
    group: usize,
    optimiser: Optimiser,
    /// Adam's counter of steps.
    step: Option<usize>,
    /// One range per tensor.
    tensors: Vec<Range<usize>>,
    /// The same elements in as few ranges as possible; lanes between two tensors are zero and stay so.
    runs: Vec<Range<usize>>,
}

impl Call for Update {
    fn run(&self, cx: &mut Context<'_, '_>) {
        let steps = self.step.map_or(0, |step| cx.operands.count(self.group, step));
        let ([gradient], [values, moments]) = cx.operands.split();
        let clip = match cx.clipped {
            true => 1.0,
            false => {
                let squares =
                    self.tensors.iter().map(|t| optim::grad_norm_sq(cx.isa, &gradient[t.clone()]));
                let norm = cx.metrics.add_group(self.group, squares);
                optim::clip_coefficient(norm, self.optimiser.clip_norm())
            }
        };
        let step = optim::GroupStep { optimiser: &self.optimiser, clip, steps };
        for run in &self.runs {
            optim::group_step(cx.isa, &step, run.clone(), values, gradient, moments);
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
        let size = b.layout.groups[group];
        let memories = [(Space::Values(id), size.values), (Space::Momentum(id), size.moments)];
        let [values, moments] = memories.map(|(space, len)| b.fixed(Span { space, start: 0, len }));
        let (optimiser, step) = (b.graph.groups[group].optimiser, b.layout.steps[group]);
        let call = Update { group, optimiser, step, runs: joined(&tensors), tensors };
        b.emit_update(call, &[gradient], &[values, moments]);
    }
}

/// Joins ranges that follow each other up to a whole vector.
pub(crate) fn joined(ranges: &[Range<usize>]) -> Vec<Range<usize>> {
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

//! Collects steps while a graph is lowered, forward and then backward.
//!
//! Backward needs no tape: lowering a node emits its forward steps and returns a closure that,
//! when the plan is built, emits its backward steps. The first gradient that reaches a value
//! overwrites its destination, every later one is added (`accumulate`).

use meristem_device::DType;

use super::fused_state::FusedState;
use super::step::{Draft, Phase, ValueList};
use super::value::{PlanValue, ValueHome, ValueId};
use super::{PlanMode, PlanOptions};
use crate::graph::{BufferId, Graph, NodeId, NodeOp, ParamId};
use crate::kernels::BatchShape;
use crate::layout::ParamLayout;
use crate::ops::{ElementwiseOp, FusedOp, NormOp, OperandForm, OperandRole, Spec, StepOp, fused};
use crate::precision::ValueType;
use crate::space::{Space, SpaceSpan};

/// Emits the backward steps of a lowered node, given the gradient of its output.
pub(crate) type EmitBackward = Box<dyn FnOnce(&mut PlanBuilder<'_>, ValueId)>;

/// Destination of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GradientTarget {
    /// Destination, [`ValueId::NONE`] where no gradient is wanted.
    pub(crate) value: ValueId,
    /// Add to the elements in place.
    pub(crate) accumulate: bool,
}

impl GradientTarget {
    const NONE: Self = Self { value: ValueId::NONE, accumulate: false };

    /// Whether a fused convolution overwrites this target, adds to it, or leaves it out.
    pub(crate) fn fused_mode(self) -> fused::InputGradient {
        match (self.value == ValueId::NONE, self.accumulate) {
            (true, _) => fused::InputGradient::Unwanted,
            (false, false) => fused::InputGradient::Overwrite,
            (false, true) => fused::InputGradient::Accumulate,
        }
    }
}

/// Gradient of a pooled output, with the operands that route it back through 2×2 max pooling and
/// ReLU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PooledGradient {
    /// Gradient of the pooled output.
    pub(crate) dout: ValueId,
    /// A u8 for each output: the position of its maximum in the window, or the code of an output
    /// that ReLU sets to zero.
    pub(crate) codes: ValueId,
    /// The pooled output.
    pub(crate) out: ValueId,
}

/// A plan being built.
pub(crate) struct PlanBuilder<'g> {
    pub(crate) graph: &'g Graph,
    pub(crate) layout: &'g ParamLayout,
    pub(crate) options: PlanOptions,
    pub(crate) values: Vec<PlanValue>,
    pub(crate) steps: Vec<Draft>,
    /// Phase of the steps that are emitted now.
    phase: Phase,
    /// Value of each lowered node.
    nodes: Vec<Option<ValueId>>,
    /// Whether a node depends on a parameter, or on an input with a requested gradient.
    needs_gradient: Vec<bool>,
    /// Gradient of each node's value. Several nodes may hold one gradient.
    grads: Vec<Option<ValueId>>,
    /// Gradients that norm units take in place of their outputs' gradients, see `fuse`.
    pooled: Vec<(NodeId, PooledGradient)>,
    /// Values that backward computes again, rather than keeping them, see `fuse`.
    again: Vec<(NodeId, NormOp, ValueList)>,
    /// Gradient of each group's parameters, in the layout of its values.
    group_grads: Vec<Option<ValueId>>,
    /// Parameters that got a gradient.
    pub(crate) trained: Vec<bool>,
    /// Row of the alphas that blends read.
    alpha_row: usize,
    /// State of each LSTM after the last step.
    pub(crate) last_states: Vec<ValueId>,
    /// State of fused convolutions.
    pub(crate) fused: FusedState,
    /// Values of another element type than a step reads, and their conversions.
    converted: Vec<(ValueId, ValueId)>,
}

impl<'g> PlanBuilder<'g> {
    pub(crate) fn new(graph: &'g Graph, layout: &'g ParamLayout, options: PlanOptions) -> Self {
        let mut builder = Self {
            graph,
            layout,
            options,
            values: vec![],
            steps: vec![],
            phase: Phase::Forward,
            nodes: vec![None; graph.nodes.len()],
            needs_gradient: vec![],
            grads: vec![None; graph.nodes.len()],
            pooled: vec![],
            again: vec![],
            group_grads: vec![None; graph.groups.len()],
            trained: vec![false; graph.params.len()],
            alpha_row: 0,
            last_states: vec![],
            fused: FusedState::default(),
            converted: vec![],
        };
        builder.needs_gradient = builder.gradients_needed();
        builder
    }

    fn gradients_needed(&self) -> Vec<bool> {
        let mut needed: Vec<bool> = vec![];
        for node in &self.graph.nodes {
            let is_needed = match node.op {
                NodeOp::Input(_) | NodeOp::State(_) => self.options.mode == PlanMode::Gradient,
                NodeOp::Indices(_) | NodeOp::Detach(_) => false,
                ref op => op.has_params() || op.inputs().iter().any(|x| needed[x.index()]),
            };
            needed.push(is_needed);
        }
        needed
    }

    /// Batch size.
    pub(crate) fn batch(&self) -> usize {
        self.options.batch
    }

    /// Whether a backward pass will follow.
    pub(crate) fn backward(&self) -> bool {
        self.options.mode.is_training()
    }

    /// Shape of a node's value over the batch.
    pub(crate) fn shape(&self, node: NodeId) -> BatchShape {
        let node = &self.graph.nodes[node.index()];
        let batch = match node.op {
            NodeOp::State(_) => self.options.sequences(),
            _ => self.options.batch,
        };
        let d = node.dims;
        BatchShape { batch, h: d.h, w: d.w, c: d.c }
    }

    fn value(&mut self, home: ValueHome, dtype: DType, len: usize) -> ValueId {
        self.values.push(PlanValue { home, dtype, len, from_start: false, to_end: false });
        ValueId(self.values.len() as u32 - 1)
    }

    /// A new arena value of `len` f32.
    pub(crate) fn arena(&mut self, len: usize) -> ValueId {
        self.value(ValueHome::Arena, DType::F32, len)
    }

    /// A new arena value for `len` elements of an activation or of its gradient, in the type
    /// [`PlanOptions::values`].
    pub(crate) fn stored(&mut self, len: usize) -> ValueId {
        self.value(ValueHome::Arena, self.options.values().dtype(), len)
    }

    /// A new arena value of `len` u8.
    pub(crate) fn arena_bytes(&mut self, len: usize) -> ValueId {
        self.value(ValueHome::Arena, DType::U8, len)
    }

    /// A new arena value of `len` u32.
    pub(crate) fn arena_words(&mut self, len: usize) -> ValueId {
        self.value(ValueHome::Arena, DType::U32, len)
    }

    /// A value in the caller's memory.
    pub(crate) fn fixed(&mut self, span: SpaceSpan) -> ValueId {
        self.value(ValueHome::Fixed(span), span.dtype, span.len)
    }

    /// The value of an input node, in the caller's memory; `None` for other nodes.
    pub(crate) fn input(&mut self, node: NodeId) -> Option<ValueId> {
        let (n, dtype) = match self.graph.nodes[node.index()].op {
            NodeOp::Input(n) | NodeOp::State(n) => (n, DType::F32),
            NodeOp::Indices(n) => (n, DType::U32),
            _ => return None,
        };
        let len = self.shape(node).len();
        Some(self.fixed(SpaceSpan::new(Space::Input(n), dtype, 0, len)))
    }

    /// Extends the lifetime of values to the end of the plan, for the caller to read.
    pub(crate) fn keep(&mut self, values: impl IntoIterator<Item = ValueId>) {
        values.into_iter().for_each(|value| self.values[value.index()].to_end = true);
    }

    /// A new arena value that the caller writes before a run.
    pub(crate) fn given(&mut self, len: usize) -> ValueId {
        let value = self.arena(len);
        self.values[value.index()].from_start = true;
        value
    }

    /// Blends lowered from now on read this row of the alphas; 0 at first.
    pub(crate) fn read_alphas_of(&mut self, row: usize) {
        self.alpha_row = row;
    }

    /// The alpha of a slot, in device memory: changing it needs no new plan.
    pub(crate) fn alpha(&mut self, slot: usize) -> ValueId {
        let start = self.alpha_row * self.graph.alphas + slot;
        self.fixed(SpaceSpan::new(Space::Alphas, DType::F32, start, 1))
    }

    /// The packed values of a parameter.
    pub(crate) fn param(&mut self, id: ParamId) -> ValueId {
        self.fixed(SpaceSpan::for_place(self.layout.param(id), Space::Values, DType::F32))
    }

    /// Running statistics, or a counter.
    pub(crate) fn buffer(&mut self, id: BufferId) -> ValueId {
        let place = self.layout.buffer(id);
        self.fixed(if self.graph.buffers[id.index()].counter {
            SpaceSpan::for_place(place, Space::Counters, DType::I64)
        } else {
            SpaceSpan::for_place(place, Space::RunningStats, DType::F32)
        })
    }

    /// The packed values of a parameter that may be absent.
    pub(crate) fn optional_param(&mut self, id: Option<ParamId>) -> ValueId {
        id.map_or(ValueId::NONE, |id| self.param(id))
    }

    /// The value of a node that was lowered before.
    pub(crate) fn node(&self, node: NodeId) -> ValueId {
        self.nodes[node.index()].unwrap_or(ValueId::NONE)
    }

    /// Makes [`PlanBuilder::node_in_backward`] compute a norm's output again.
    pub(crate) fn compute_again(&mut self, node: NodeId, op: NormOp, reads: &[ValueId]) {
        self.again.push((node, op, ValueList::from_slice(reads)));
    }

    /// The value of a node, for a backward step: the kept value, or one that a step computes again.
    pub(crate) fn node_in_backward(&mut self, node: NodeId) -> ValueId {
        let Some(at) = self.again.iter().position(|(of, ..)| *of == node) else {
            return self.node(node);
        };
        let (_, op, reads) = self.again[at].clone();
        let value = self.arena(self.shape(node).len());
        self.emit(op, &reads, &[value, ValueId::NONE]);
        value
    }

    /// Sets a node's value.
    pub(crate) fn bind(&mut self, node: NodeId, value: ValueId) {
        self.nodes[node.index()] = Some(value);
    }

    /// A new arena value for a node's output.
    pub(crate) fn output(&mut self, node: NodeId) -> ValueId {
        let value = self.stored(self.shape(node).len());
        self.bind(node, value);
        value
    }

    /// Steps emitted from now on belong to this phase, which is not before the present one.
    pub(crate) fn begin(&mut self, phase: Phase) {
        debug_assert!(phase >= self.phase, "{phase:?} after {:?}", self.phase);
        self.phase = phase;
    }

    /// Adds a step, and appends the scratch of its signature to its writes. The step is dropped if
    /// no step or caller uses its results.
    ///
    /// # Panics
    /// If operands do not match the signature: checked here, once for all runs.
    pub(crate) fn emit(&mut self, op: impl Into<StepOp>, reads: &[ValueId], writes: &[ValueId]) {
        self.emit_with(self.options.values(), op.into(), reads, writes);
    }

    /// As [`PlanBuilder::emit`], for a step over parameters or results, which are f32.
    pub(crate) fn emit_f32(
        &mut self,
        op: impl Into<StepOp>,
        reads: &[ValueId],
        writes: &[ValueId],
    ) {
        self.emit_with(ValueType::F32, op.into(), reads, writes);
    }

    fn emit_with(&mut self, values: ValueType, op: StepOp, reads: &[ValueId], writes: &[ValueId]) {
        let signature = op.signature(self.options.target, values);
        let fitting = |(at, id): (usize, &ValueId)| match signature.reads.get(at) {
            Some(spec) => self.fitting(*id, spec),
            None => *id,
        };
        let reads: ValueList = reads.iter().enumerate().map(fitting).collect();
        let mut writes = ValueList::from_slice(writes);
        let scratch = signature.writes.iter().filter(|spec| spec.role == OperandRole::Scratch);
        writes.extend(scratch.map(|spec| self.arena(spec.len)));
        let forms =
            |ids: &[ValueId]| -> Vec<OperandForm> { ids.iter().map(|id| self.form(*id)).collect() };
        let misfit = signature.misfit(&forms(&reads), &forms(&writes));
        assert_eq!(misfit, None, "operands of {op:?}");
        self.steps.push(Draft { op, values, reads, writes, phase: self.phase });
    }

    /// The value as a step reads it. Inputs and parameters of the caller are f32, and so are the
    /// operands of losses: where values have another type, a step before converts them, once.
    fn fitting(&mut self, id: ValueId, spec: &Spec) -> ValueId {
        match (self.form(id).0, spec.dtype) {
            (DType::F32, DType::BF16) => self.as_values(id),
            (DType::BF16, DType::F32) => self.as_f32(id),
            _ => id,
        }
    }

    /// The value converted to f32, once. No later step may write `id`.
    pub(crate) fn as_f32(&mut self, id: ValueId) -> ValueId {
        self.converted(id, (DType::F32, |len| ElementwiseOp::Widen { len }))
    }

    /// The f32 value converted to [`PlanOptions::values`], once. No later step may write `id`.
    pub(crate) fn as_values(&mut self, id: ValueId) -> ValueId {
        let to = self.options.values().dtype();
        self.converted(id, (to, |len| ElementwiseOp::Narrow { len }))
    }

    fn converted(&mut self, id: ValueId, (to, op): (DType, fn(usize) -> ElementwiseOp)) -> ValueId {
        let (dtype, len) = self.form(id);
        if dtype == to || len == 0 {
            return id;
        }
        if let Some((_, known)) = self.converted.iter().find(|(from, _)| *from == id) {
            return *known;
        }
        let value = self.value(ValueHome::Arena, to, len);
        self.emit(op(len), &[id], &[value]);
        self.converted.push((id, value));
        value
    }

    fn form(&self, id: ValueId) -> OperandForm {
        self.values.get(id.index()).map_or((DType::F32, 0), |value| (value.dtype, value.len))
    }

    /// Whether the gradient of this node's value is needed.
    pub(crate) fn needs_gradient(&self, node: NodeId) -> bool {
        self.needs_gradient[node.index()]
    }

    /// The gradient of a node's value, if one has reached it.
    pub(crate) fn gradient(&self, node: NodeId) -> Option<ValueId> {
        self.grads[node.index()]
    }

    /// Hands the norm unit with output `norm_output` the gradient of the pooled output.
    pub(crate) fn give_pooled(&mut self, norm_output: NodeId, gradient: PooledGradient) {
        self.pooled.push((norm_output, gradient));
    }

    /// The gradient that [`PlanBuilder::give_pooled`] handed to this unit.
    pub(crate) fn pooled(&self, norm_output: NodeId) -> Option<PooledGradient> {
        self.pooled.iter().find(|(node, _)| *node == norm_output).map(|(_, gradient)| *gradient)
    }

    /// Sets the gradient of a node's value: of the output, with which the backward pass begins, or
    /// of a node whose only reader has computed it.
    pub(crate) fn seed(&mut self, node: NodeId, gradient: ValueId) {
        self.grads[node.index()] = Some(gradient);
    }

    /// The gradient of a parameter, to be added to. The group's gradient is zeroed before its first
    /// use.
    pub(crate) fn param_gradient(&mut self, id: ParamId) -> ValueId {
        self.trained[id.index()] = true;
        let place = self.layout.param(id);
        let whole = match self.group_grads[place.group.index()] {
            Some(whole) => whole,
            None => {
                let whole = self.new_group_gradient(place.group.index());
                let len = self.values[whole.index()].len;
                self.emit(ElementwiseOp::Fill { len, value: 0.0 }, &[], &[whole]);
                whole
            }
        };
        self.value(ValueHome::Part { of: whole, start: place.start }, DType::F32, place.len)
    }

    /// Memory for the gradient of a group's parameters, not yet zeroed: the calling function emits
    /// the step that zeroes it.
    fn new_group_gradient(&mut self, group: usize) -> ValueId {
        let whole = self.arena(self.layout.groups[group].values);
        self.group_grads[group] = Some(whole);
        self.keep([whole]);
        whole
    }

    /// As [`PlanBuilder::param_gradient`], for a parameter that may be absent.
    pub(crate) fn optional_param_gradient(&mut self, id: Option<ParamId>) -> ValueId {
        id.map_or(ValueId::NONE, |id| self.param_gradient(id))
    }

    /// Begins a training plan of fused convolutions with `tickets` tickets (see
    /// [`ops::fused`](crate::ops::fused)): one step zeroes them and the gradient of `group`.
    pub(crate) fn begin_fused(&mut self, tickets: usize, group: usize) {
        let all = self.value(ValueHome::Arena, DType::U32, tickets);
        let gradient = self.new_group_gradient(group);
        let len = self.values[gradient.index()].len;
        self.fused.tickets = Some((all, 0));
        self.emit(FusedOp::Begin { gradient: len, tickets }, &[], &[gradient, all]);
    }

    /// The next `n` tickets.
    pub(crate) fn tickets(&mut self, n: usize) -> ValueId {
        match &mut self.fused.tickets {
            Some((of, taken)) => {
                let home = ValueHome::Part { of: *of, start: *taken };
                *taken += n;
                self.value(home, DType::U32, n)
            }
            // There are none outside of training.
            None => ValueId::NONE,
        }
    }

    /// The gradient of a group's parameters, if any of them got one.
    pub(crate) fn group_gradient(&self, group: usize) -> Option<ValueId> {
        self.group_grads[group]
    }

    /// Emits the backward steps of the node `of`, which write the gradients of `inputs` (none where
    /// absent). `emit` receives one target per input, in memory that overlaps no other operand of
    /// the step.
    pub(crate) fn send_gradients<const N: usize>(
        &mut self,
        of: NodeId,
        inputs: [impl Into<Option<NodeId>>; N],
        emit: impl FnOnce(&mut Self, [GradientTarget; N]),
    ) {
        let mut later: Vec<(NodeId, ValueId)> = vec![];
        let mut seen: Vec<NodeId> = vec![];
        let targets = inputs.map(|input| {
            let Some(node) = input.into().filter(|node| self.needs_gradient(*node)) else {
                return GradientTarget::NONE;
            };
            if seen.contains(&node) {
                // The same value is read twice: one step may not write one gradient twice.
                let value = self.stored(self.shape(node).len());
                later.push((node, value));
                return GradientTarget { value, accumulate: false };
            }
            seen.push(node);
            self.target(of, node)
        });
        emit(self, targets);
        for (node, value) in later {
            self.pass_gradient(of, node, value);
        }
    }

    /// Like [`PlanBuilder::send_gradients`], for a step that reads `reads` and writes the gradient
    /// of one input, if it is needed. The argument of `op` is whether the step adds to the
    /// gradient.
    pub(crate) fn send_gradient<T: Into<StepOp>>(
        &mut self,
        of: NodeId,
        input: NodeId,
        reads: &[ValueId],
        op: impl FnOnce(bool) -> T,
    ) {
        if self.needs_gradient(input) {
            let GradientTarget { value, accumulate } = self.target(of, input);
            self.emit(op(accumulate), reads, &[value]);
        }
    }

    /// The destination of a gradient that the node `of` sends to its input `node`.
    fn target(&mut self, of: NodeId, node: NodeId) -> GradientTarget {
        let Some(value) = self.grads[node.index()] else {
            let value = self.stored(self.shape(node).len());
            self.grads[node.index()] = Some(value);
            return GradientTarget { value, accumulate: false };
        };
        // Nodes after `of` no longer need their gradients (an input's gradient is the caller's); an
        // earlier node that holds the same gradient will still read it.
        let waits =
            |other: usize| other <= of.index() || self.graph.nodes[other].op.input().is_some();
        let shared = (0..self.grads.len())
            .any(|i| i != node.index() && self.grads[i] == Some(value) && waits(i))
            || self.pooled.iter().any(|(_, gradient)| gradient.dout == value);
        if !shared {
            return GradientTarget { value, accumulate: true };
        }
        let len = self.values[value.index()].len;
        let own = self.stored(len);
        self.emit(ElementwiseOp::Pass { len, accumulate: false }, &[value], &[own]);
        self.grads[node.index()] = Some(own);
        GradientTarget { value: own, accumulate: true }
    }

    /// Sends `gradient` from the node `of` unchanged to its input `node`: without a copy when it is
    /// the first to arrive.
    pub(crate) fn pass_gradient(&mut self, of: NodeId, node: NodeId, gradient: ValueId) {
        if !self.needs_gradient(node) {
            return;
        }
        if self.grads[node.index()].is_none() {
            self.grads[node.index()] = Some(gradient);
            return;
        }
        let GradientTarget { value, accumulate } = self.target(of, node);
        let len = self.values[value.index()].len;
        self.emit(ElementwiseOp::Pass { len, accumulate }, &[gradient], &[value]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Dims, GraphBuilder, SgdConfig};

    #[test]
    #[should_panic(expected = "[\"read 0\", \"16 of f32 (Required)\", \"17 of f32\"]")]
    fn a_step_whose_operands_do_not_fit_is_refused() {
        let sgd = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };
        let graph = GraphBuilder::new(Dims { c: 1, h: 1, w: 1 }, sgd).finish_at(NodeId(0));
        let layout = ParamLayout::new(&graph);
        let mut b = PlanBuilder::new(&graph, &layout, PlanOptions::new(1, PlanMode::Infer));
        let [x, y] = [17, 16].map(|len| b.arena(len));
        b.emit(ElementwiseOp::Pass { len: 16, accumulate: false }, &[x], &[y]);
    }
}

//! Graph to plan: a flat list of kernel calls over one arena whose offsets were assigned ahead.
//!
//! Running a plan allocates nothing, branches on no data and asks the device nothing. There is no
//! tape: backward is derived here, op by op (see `lower`, one file per family of operations), and
//! only for what leads to a parameter.
//!
//! The way of a graph: `fuse` groups nodes into units, `lower` emits each unit's steps into a
//! `builder`, dead steps are dropped, `arena` assigns memory from the values' lifetimes, and the
//! result is checked before it is handed out.

pub mod arena;
mod builder;
mod check;
mod fuse;
pub(crate) mod lower;
mod memory;
mod step;
mod tree;
mod value;

use std::ops::Range;

use smallvec::SmallVec;

use self::arena::Lifetime;
use self::builder::{Builder, Home, Value};
pub use self::memory::{GroupMemory, Memory};
use self::step::{Context, Draft, Operands, Step};
pub use self::tree::{AlphaPattern, flops};
use self::value::ValueId;
pub use self::value::{Space, Span};
use crate::error::{Error, Result};
use crate::graph::{Graph, ParamId};
use crate::kernels::Isa;
use crate::layout::Layout;
use crate::network::metrics::MetricsView;

/// What a plan computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Forward with batch statistics, mean cross-entropy, backward, clipping, SGD, metrics.
    Train,
    /// Forward with running statistics, cross-entropy, metrics.
    Evaluate,
    /// Forward with running statistics; the output stays in the arena.
    Infer,
    /// Forward with batch statistics, then the caller's own function from the output to its gradient,
    /// then backward. Gradients of parameters stay in the arena.
    Objective,
    /// Forward with batch statistics, then backward from a gradient of the output that the caller
    /// writes into the arena. Gradients of parameters and inputs stay in the arena.
    Gradient,
}

impl Mode {
    /// Whether there is a backward pass; batch norm then uses (and updates) the batch's statistics.
    pub fn is_training(self) -> bool {
        matches!(self, Mode::Train | Mode::Gradient | Mode::Objective)
    }
}

/// What is known of a plan besides its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanOptions {
    /// Samples; for sequences the rows of all steps, `[steps][sequences]`.
    pub batch: usize,
    /// Steps of the sequences that the samples are; 1 where each is on its own.
    pub steps: usize,
    /// What to compute.
    pub mode: Mode,
    /// Whether convolution, batch norm, ReLU and max pooling may become one pass. Off in tests that
    /// compare both.
    pub fuse: bool,
}

impl PlanOptions {
    /// With fusion, samples on their own.
    pub fn new(batch: usize, mode: Mode) -> Self {
        Self { batch, steps: 1, mode, fuse: true }
    }

    /// Sequences that the samples belong to.
    pub fn sequences(&self) -> usize {
        self.batch / self.steps.max(1)
    }
}

/// The caller's part of [`Mode::Objective`]: from the output, row by row, to the gradient of what is
/// to become small, which it overwrites.
pub type Objective<'f> = dyn FnMut(&[f32], &mut [f32]) + 'f;

/// A compiled graph for one batch size and mode.
#[derive(Debug)]
pub struct Plan {
    options: PlanOptions,
    arena_len: usize,
    steps: Vec<Step>,
    /// How many of the first steps are the forward pass, where a loss follows it.
    forward: usize,
    /// How many of the last steps are updates of the parameters.
    updates: usize,
    output: Span,
    output_gradient: Option<Span>,
    last_states: Vec<Span>,
    inputs: Vec<PlanInput>,
    group_gradients: Vec<Option<Span>>,
    layout: Layout,
    trained: Vec<bool>,
    alphas: usize,
}

/// An input of a plan.
#[derive(Debug)]
struct PlanInput {
    len: usize,
    gradient: Option<Span>,
}

impl Plan {
    /// Compiles a graph.
    ///
    /// # Errors
    /// [`Error::EmptyBatch`] for a batch of no samples or a graph with an empty value;
    /// [`Error::Steps`] for samples that are not whole sequences;
    /// [`Error::OneValuePerChannel`] where batch norm would have to train on one value per channel.
    pub fn compile(graph: &Graph, options: PlanOptions) -> Result<Self> {
        if options.batch == 0 || graph.nodes.iter().any(|n| n.dims.numel() == 0) {
            return Err(Error::EmptyBatch { batch: options.batch });
        }
        if options.steps == 0 || !options.batch.is_multiple_of(options.steps) {
            return Err(Error::Steps { batch: options.batch, steps: options.steps });
        }
        let layout = Layout::new(graph);
        let mut b = Builder::new(graph, &layout, options);
        let units = fuse::units(graph, options);
        let mut backward = vec![];
        for unit in &units {
            if let Some(emit) = lower::forward(&mut b, unit)? {
                backward.push((unit.output(), emit));
            }
        }
        let output_gradient = match options.mode {
            Mode::Train | Mode::Evaluate => {
                lower::train::cross_entropy(&mut b, &[0]);
                None
            }
            Mode::Infer => None,
            Mode::Objective => {
                lower::train::objective(&mut b);
                None
            }
            Mode::Gradient => {
                let given = b.given(b.shape(graph.output).len());
                b.seed(graph.output, given);
                Some(given)
            }
        };
        let output = b.node(graph.output);
        if matches!(options.mode, Mode::Infer | Mode::Gradient) {
            b.keep(output);
            b.keep_last_states();
        }
        if b.backward() {
            for (node, emit) in backward.into_iter().rev() {
                if let Some(gradient) = b.gradient(node).filter(|_| b.wants(node)) {
                    emit(&mut b, gradient);
                }
            }
        }
        if options.mode == Mode::Train {
            lower::train::updates(&mut b);
        }
        let inputs = inputs_of(&mut b);
        Ok(finish(b, output, output_gradient, inputs))
    }

    /// What it was compiled for.
    pub fn options(&self) -> PlanOptions {
        self.options
    }

    /// f32 elements of the arena.
    pub fn arena_len(&self) -> usize {
        self.arena_len
    }

    /// Number of kernel calls.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// One line a step: what it computes, reads and writes. For people.
    pub fn describe(&self) -> String {
        let line = |s: &Step| format!("{:?} {:?} -> {:?}\n", s.call, s.reads, s.writes);
        self.steps.iter().map(line).collect()
    }

    /// Where the output lies after a run in [`Mode::Infer`] or [`Mode::Gradient`].
    pub fn output(&self) -> Span {
        self.output
    }

    /// Where each LSTM's state after the last step lies, `[sequences, 2·hidden]`, after a run in
    /// [`Mode::Infer`] or [`Mode::Gradient`].
    pub fn last_states(&self) -> &[Span] {
        &self.last_states
    }

    /// Where the caller of [`Mode::Gradient`] writes the gradient of the output before a run.
    pub fn output_gradient(&self) -> Option<Range<usize>> {
        self.output_gradient.map(Span::range)
    }

    /// Where the gradient of an input lies in the arena after a run in [`Mode::Gradient`]; `None`
    /// when no gradient reaches it.
    pub fn input_gradient(&self, input: usize) -> Option<Range<usize>> {
        self.inputs.get(input)?.gradient.map(Span::range)
    }

    /// Where the packed gradient of a parameter lies in the arena after a run in
    /// [`Mode::Gradient`]; `None` when no gradient reaches it.
    pub fn parameter_gradient(&self, id: ParamId) -> Option<Range<usize>> {
        let place = self.layout.param(id);
        let group = self.group_gradients[place.group.index()]?;
        self.trained[id.index()].then(|| {
            let start = group.start + place.start;
            start..start + place.len
        })
    }

    /// Where the gradient of all parameters of a group lies in the arena, in the layout of its values;
    /// `None` when no gradient reaches any of them.
    pub fn group_gradient(&self, group: usize) -> Option<Range<usize>> {
        self.group_gradients[group].map(Span::range)
    }

    /// The elements of each parameter of a group that a gradient reaches, in the group's layout.
    pub(crate) fn trained(&self, group: usize) -> Vec<Range<usize>> {
        let params = self.layout.params.iter().zip(&self.trained);
        let trained = params.filter(|(place, trained)| place.group.index() == group && **trained);
        trained.map(|(place, _)| place.range()).collect()
    }

    /// By parameter of the graph: its group and its elements there, `None` where no gradient reaches it.
    pub(crate) fn trained_params(&self) -> impl Iterator<Item = Option<(usize, Range<usize>)>> {
        let params = self.layout.params.iter().zip(&self.trained);
        params.map(|(place, trained)| trained.then(|| (place.group.index(), place.range())))
    }

    /// The layout of parameters and buffers that the plan expects.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Runs a plan without a loss ([`Mode::Infer`], [`Mode::Gradient`]) on the calling thread.
    ///
    /// # Errors
    /// [`Error::PlanMemory`] when a memory is missing or has another length than the plan needs, or
    /// the plan has a loss.
    pub fn run(&self, isa: Isa, memory: &mut Memory<'_>) -> Result<()> {
        if !matches!(self.options.mode, Mode::Infer | Mode::Gradient) {
            let got = format!("a plan compiled for {:?}", self.options.mode);
            return Err(Error::PlanMemory { what: "mode", expected: "no loss".into(), got });
        }
        self.check_memory(memory)?;
        self.execute(isa, memory, &[], 0, &mut MetricsView::none());
        Ok(())
    }

    /// Runs a plan compiled for [`Mode::Objective`]. The memories have the plan's lengths.
    pub(crate) fn execute_objective(
        &self,
        isa: Isa,
        memory: &mut Memory<'_>,
        objective: &mut Objective<'_>,
    ) {
        for step in &self.steps {
            let operands =
                Operands { memory: &mut *memory, reads: &step.reads, writes: &step.writes };
            step.call.run(&mut Context {
                isa,
                operands,
                targets: &[],
                config: 0,
                clipped: false,
                metrics: &mut MetricsView::none(),
                objective: Some(&mut *objective),
            });
        }
    }

    fn check_memory(&self, memory: &Memory<'_>) -> Result<()> {
        let inputs: Vec<_> = self.inputs.iter().map(|i| i.len).collect();
        let expected = (self.arena_len, self.alphas, inputs, self.layout.groups.clone());
        let got = memory.lengths();
        let fits = got.0 >= expected.0 && got.1 >= expected.1;
        if !fits || got.2 != expected.2 || got.3 != expected.3 {
            let (expected, got) = (format!("{expected:?}"), format!("{got:?}"));
            return Err(Error::PlanMemory { what: "arena, alphas, inputs, groups", expected, got });
        }
        Ok(())
    }

    /// Runs all steps. The memories have the plan's lengths.
    pub(crate) fn execute<'m>(
        &self,
        isa: Isa,
        memory: &mut Memory<'m>,
        targets: &[u32],
        config: usize,
        metrics: &mut MetricsView<'m>,
    ) {
        run(&self.steps, &With { isa, targets, config, clipped: false }, memory, metrics);
    }

    /// Runs the forward pass of [`Mode::Train`]: of what outlives it, it changes running statistics.
    pub(crate) fn execute_forward<'m>(&self, isa: Isa, memory: &mut Memory<'m>) {
        let steps = &self.steps[..self.forward];
        run(steps, &With::new(isa), memory, &mut MetricsView::none());
    }

    /// Runs the steps of [`Mode::Train`] before the updates: gradients are where
    /// [`Plan::group_gradient`] says, and [`Plan::execute_updates`] uses what it finds there.
    pub(crate) fn execute_gradient<'m>(
        &self,
        isa: Isa,
        memory: &mut Memory<'m>,
        targets: &[u32],
        metrics: &mut MetricsView<'m>,
    ) {
        let (steps, _) = self.steps.split_at(self.steps.len() - self.updates);
        run(steps, &With { isa, targets, ..With::new(isa) }, memory, metrics);
    }

    /// Runs the rest of the steps of [`Mode::Train`]. Where gradients are `clipped`, they were measured, too.
    pub(crate) fn execute_updates<'m>(
        &self,
        (isa, clipped): (Isa, bool),
        memory: &mut Memory<'m>,
        metrics: &mut MetricsView<'m>,
    ) {
        let (_, updates) = self.steps.split_at(self.steps.len() - self.updates);
        run(updates, &With { isa, clipped, ..With::new(isa) }, memory, metrics);
    }
}

/// What steps are run with: see [`Context`].
struct With<'a> {
    isa: Isa,
    targets: &'a [u32],
    config: usize,
    clipped: bool,
}

impl With<'_> {
    fn new(isa: Isa) -> Self {
        Self { isa, targets: &[], config: 0, clipped: false }
    }
}

fn run<'m>(
    steps: &[Step],
    with: &With<'_>,
    memory: &mut Memory<'m>,
    metrics: &mut MetricsView<'m>,
) {
    let With { isa, targets, config, clipped } = *with;
    for step in steps {
        let operands = Operands { memory: &mut *memory, reads: &step.reads, writes: &step.writes };
        let metrics = &mut *metrics;
        let objective = None;
        step.call.run(&mut Context { isa, operands, targets, config, clipped, metrics, objective });
    }
}

/// The inputs with their gradients, which the caller of [`Mode::Gradient`] reads after a run.
fn inputs_of(b: &mut Builder<'_>) -> Vec<(usize, Option<ValueId>)> {
    let graph = b.graph;
    let mut inputs = vec![];
    for (i, node) in graph.nodes.iter().enumerate() {
        if node.op.input().is_some() {
            let id = crate::graph::NodeId(i);
            let gradient = b.gradient(id);
            if let Some(gradient) = gradient {
                b.keep(gradient);
            }
            inputs.push((b.shape(id).len(), gradient));
        }
    }
    inputs
}

/// Drops dead steps, assigns memory, resolves operands.
fn finish(
    b: Builder<'_>,
    output: ValueId,
    output_gradient: Option<ValueId>,
    inputs: Vec<(usize, Option<ValueId>)>,
) -> Plan {
    let groups = (0..b.graph.groups.len()).map(|g| b.group_gradient(g)).collect::<Vec<_>>();
    let Builder { graph, layout, options, values, steps, trained, last_states, .. } = b;
    let updates = steps.iter().rev().take_while(|step| step.update).count();
    let steps = without_dead(&values, steps);
    let forward = steps.iter().take_while(|step| !step.effect).count();
    let (spans, arena_len) = assign_memory(&values, &steps);
    let span = |id: ValueId| if id == ValueId::NONE { Span::EMPTY } else { spans[id.index()] };
    let all = |ids: &[ValueId]| ids.iter().map(|id| span(*id)).collect::<SmallVec<_>>();
    if cfg!(debug_assertions) {
        let problem = check::misuse(&values, &steps, &spans);
        assert_eq!(problem, None, "memory of a plan");
    }
    let steps = steps
        .into_iter()
        .map(|d| Step { call: d.call, reads: all(&d.reads), writes: all(&d.writes) })
        .collect();
    let inputs = inputs
        .into_iter()
        .map(|(len, gradient)| PlanInput { len, gradient: gradient.map(span) })
        .collect();
    Plan {
        options,
        arena_len,
        steps,
        forward,
        updates,
        output: span(output),
        output_gradient: output_gradient.map(span),
        last_states: match options.mode {
            Mode::Infer | Mode::Gradient => last_states.into_iter().map(span).collect(),
            _ => vec![],
        },
        inputs,
        group_gradients: groups.into_iter().map(|g| g.map(span)).collect(),
        layout: layout.clone(),
        trained,
        alphas: graph.alphas,
    }
}

/// The value whose memory this one lies in.
fn root(values: &[Value], mut id: ValueId) -> ValueId {
    while let Home::Part { of, .. } = values[id.index()].home {
        id = of;
    }
    id
}

/// The steps whose results are used: by a later such step, by the caller, or outside of the arena.
/// (A module under `StraightThrough` has a value that nobody reads, for instance.)
fn without_dead(values: &[Value], steps: Vec<Draft>) -> Vec<Draft> {
    let mut used: Vec<bool> = values.iter().map(|v| v.to_end).collect();
    let mut live = vec![];
    for step in steps.into_iter().rev() {
        let roots = |ids: &[ValueId]| -> Vec<ValueId> {
            ids.iter().filter(|v| **v != ValueId::NONE).map(|v| root(values, *v)).collect()
        };
        let writes = roots(&step.writes);
        let outside = |v: &ValueId| matches!(values[v.index()].home, Home::Fixed(_));
        if step.effect || writes.iter().any(|v| used[v.index()] || outside(v)) {
            roots(&step.reads).into_iter().for_each(|v| used[v.index()] = true);
            live.push(step);
        }
    }
    live.reverse();
    live
}

/// A span for every value, and the arena's length.
fn assign_memory(values: &[Value], steps: &[Draft]) -> (Vec<Span>, usize) {
    let mut lives: Vec<Option<Lifetime>> = vec![None; values.len()];
    let end = steps.len().saturating_sub(1);
    for (at, step) in steps.iter().enumerate() {
        for &id in step.reads.iter().chain(&step.writes).filter(|id| **id != ValueId::NONE) {
            let id = root(values, id);
            let value = &values[id.index()];
            let first = if value.from_start { 0 } else { at };
            let fresh = Lifetime { first, last: at, len: value.len };
            let life = lives[id.index()].get_or_insert(fresh);
            life.last = if value.to_end { end } else { at };
        }
    }
    // What only the caller touches (a gradient that no step reads) needs memory all the same.
    for (life, value) in lives.iter_mut().zip(values) {
        if life.is_none() && (value.from_start || value.to_end) {
            *life = Some(Lifetime { first: 0, last: end, len: value.len });
        }
    }
    let arena: Vec<usize> = (0..values.len())
        .filter(|&i| matches!(values[i].home, Home::Arena) && lives[i].is_some())
        .collect();
    let lifetimes: Vec<Lifetime> = arena.iter().filter_map(|&i| lives[i]).collect();
    let assignment = arena::assign(&lifetimes);
    let mut starts = vec![0; values.len()];
    for (&i, &offset) in arena.iter().zip(&assignment.offsets) {
        starts[i] = offset;
    }
    let spans = values.iter().enumerate().map(|(i, value)| match value.home {
        Home::Fixed(span) => span,
        Home::Arena => Span { space: Space::Arena, start: starts[i], len: value.len },
        Home::Part { of, start } => {
            let of = root(values, of);
            Span { space: Space::Arena, start: starts[of.index()] + start, len: value.len }
        }
    });
    (spans.collect(), assignment.len)
}

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
mod lower;
mod memory;
mod options;
mod step;
mod tree;
mod value;

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use smallvec::SmallVec;

use self::arena::Lifetime;
use self::builder::{Builder, Home, Value};
pub use self::memory::{GroupMemory, Memory};
pub use self::options::{Mode, Objective, PlanOptions};
use self::step::Draft;
pub use self::step::{Phase, SpaceUse, Step};
pub(crate) use self::step::{add_use, uses};
pub use self::tree::{AlphaPattern, flops};
use self::value::ValueId;
pub use self::value::{Space, Span};
use crate::error::{Error, Result};
use crate::graph::{Graph, ParamId};
use crate::kernels::Isa;
use crate::kernels::sample::Sampler;
use crate::layout::Layout;
use crate::ops::{Op, optim};

/// A compiled graph for one batch size and mode.
#[derive(Debug)]
pub struct Plan {
    options: PlanOptions,
    arena_len: usize,
    steps: Vec<Step>,
    /// Number of steps up to the end of each phase.
    phase_ends: [usize; Phase::COUNT],
    /// The memories that each row of phases uses, by its first and its last.
    uses: [[Vec<SpaceUse>; Phase::COUNT]; Phase::COUNT],
    output: Span,
    output_gradient: Option<Span>,
    last_states: Vec<Span>,
    /// By input, where its gradient lies.
    input_gradients: Vec<Option<Span>>,
    group_gradients: Vec<Option<Span>>,
    layout: Layout,
    trained: Vec<bool>,
}

impl Plan {
    /// Compiles a graph; to train means to make the cross-entropy small.
    ///
    /// # Errors
    /// [`Error::EmptyBatch`] for a batch of no samples or a graph with an empty value;
    /// [`Error::BatchTooLarge`] where a value would have no place in memory; [`Error::Steps`] for
    /// samples that are not whole sequences;
    /// [`Error::OneValuePerChannel`] where batch norm would have to train on one value per channel.
    pub fn compile(graph: &Graph, options: PlanOptions) -> Result<Self> {
        Self::compile_for(graph, options, &Objective::CrossEntropy)
    }

    /// As [`Plan::compile`], with another objective of [`Mode::Train`].
    ///
    /// # Errors
    /// As [`Plan::compile`].
    pub fn compile_for(graph: &Graph, options: PlanOptions, objective: &Objective) -> Result<Self> {
        Self::compile_with(graph, options, (objective, None))
    }

    /// Compiles a forward run of these rows that ends with a draw of actions, see
    /// [`ops::sample`](crate::ops::sample), in place of the output. Its inputs follow the graph's:
    /// the legality of places, the step. It leaves what was drawn as outputs 0 to 4, then the
    /// states, then copies of the inputs that have rows.
    ///
    /// # Errors
    /// As [`Plan::compile`].
    pub fn compile_draw(
        graph: &Graph,
        (batch, steps): (usize, usize),
        sampler: &Arc<Sampler>,
    ) -> Result<Self> {
        let options = PlanOptions { steps, ..PlanOptions::new(batch, Mode::Infer) };
        Self::compile_with(graph, options, (&Objective::CrossEntropy, Some(sampler)))
    }

    fn compile_with(
        graph: &Graph,
        options: PlanOptions,
        (objective, draw): (&Objective, Option<&Arc<Sampler>>),
    ) -> Result<Self> {
        check_batch(graph, options.batch)?;
        if options.steps == 0 || !options.batch.is_multiple_of(options.steps) {
            return Err(Error::Steps { batch: options.batch, steps: options.steps });
        }
        let layout = Layout::new(graph);
        let mut b = Builder::new(graph, &layout, options);
        let mut backward = vec![];
        for unit in &fuse::units(graph, options) {
            if let Some(emit) = lower::forward(&mut b, unit)? {
                backward.push((unit.output(), emit));
            }
        }
        b.begin(Phase::Backward);
        let mut output_gradient = None;
        match options.mode {
            Mode::Train => lower::train::objective(&mut b, objective),
            Mode::Evaluate => lower::train::score(&mut b, &[0]),
            Mode::Infer => {}
            Mode::Gradient => {
                let given = b.given(b.shape(graph.output).len());
                b.seed(graph.output, given);
                output_gradient = Some(given);
            }
        }
        if b.backward() {
            for (node, emit) in backward.into_iter().rev() {
                if let Some(gradient) = b.gradient(node).filter(|_| b.wants(node)) {
                    emit(&mut b, gradient);
                }
            }
        }
        let output = b.node(graph.output);
        match options.mode {
            Mode::Train => {
                b.begin(Phase::Measure);
                let coefficients = lower::train::measure(&mut b);
                b.begin(Phase::Update);
                lower::train::updates(&mut b, &coefficients);
            }
            Mode::Infer => {
                b.begin(Phase::Deliver);
                lower::train::deliver(&mut b, draw);
            }
            Mode::Evaluate | Mode::Gradient => {}
        }
        if matches!(options.mode, Mode::Infer | Mode::Gradient) {
            b.keep(output);
            b.keep_last_states();
        }
        let inputs = input_gradients_of(&mut b);
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
        let line = |s: &Step| format!("{:?} {:?} -> {:?}\n", s.op, s.reads, s.writes);
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
        (*self.input_gradients.get(input)?).map(Span::range)
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

    /// Where the gradient of all parameters of a group lies in the arena, in the layout of its
    /// values; `None` when no gradient reaches any of them.
    pub fn group_gradient(&self, group: usize) -> Option<Range<usize>> {
        self.group_gradients[group].map(Span::range)
    }

    /// By parameter of the graph: its group and its elements there, `None` where no gradient
    /// reaches it.
    pub(crate) fn trained_params(&self) -> impl Iterator<Item = Option<(usize, Range<usize>)>> {
        let params = self.layout.params.iter().zip(&self.trained);
        params.map(|(place, trained)| trained.then(|| (place.group.index(), place.range())))
    }

    /// The layout of parameters and buffers that the plan expects.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Bytes of a group's memory.
    fn group_bytes(&self, space: Space) -> Option<usize> {
        let size = |group: crate::graph::GroupId| self.layout.groups[group.index()];
        Some(match space {
            Space::Values(g) => size(g).values * size_of::<f32>(),
            Space::Momentum(g) => size(g).moments * size_of::<f32>(),
            Space::State(g) => size(g).state * size_of::<f32>(),
            Space::Counters(g) => size(g).counters * size_of::<i64>(),
            _ => return None,
        })
    }

    /// The steps of some phases, in order.
    pub fn steps(&self, phases: RangeInclusive<Phase>) -> &[Step] {
        let first = *phases.start() as usize;
        let start = if first == 0 { 0 } else { self.phase_ends[first - 1] };
        &self.steps[start..self.phase_ends[*phases.end() as usize].max(start)]
    }

    /// The memories that these steps use, in the order of first use.
    pub fn uses(&self, phases: RangeInclusive<Phase>) -> &[SpaceUse] {
        &self.uses[*phases.start() as usize][*phases.end() as usize]
    }

    /// Steps that clip the gradient where it lies, at `factor` times the norms that the optimisers
    /// allow: in place of [`Phase::Measure`], after which [`Phase::Update`] takes it as it is.
    pub(crate) fn clipping(&self, factor: f32) -> Vec<Step> {
        let mut steps = vec![];
        for step in self.steps(Phase::Measure..=Phase::Measure) {
            if let Op::Optim(optim::Op::Measure { len, tensors, norm_max }) = &step.op {
                let (len, tensors) = (*len, tensors.clone());
                let norm_max = norm_max * factor;
                let op = optim::Op::Measure { len, tensors: tensors.clone(), norm_max };
                steps.push(Step { op: op.into(), ..step.clone() });
                let writes = [step.reads[0], step.writes[1]];
                steps.push(Step::new(optim::Op::Clip { len, tensors }, &[], &writes));
            }
        }
        steps
    }

    /// Runs a plan without a loss ([`Mode::Infer`], [`Mode::Gradient`]) on the calling thread; its
    /// results stay in the arena.
    ///
    /// # Errors
    /// [`Error::PlanMemory`] when a memory is missing or has another length than the plan needs
    /// (arena and alphas may be longer), or the plan has a loss.
    pub fn run(&self, isa: Isa, memory: &mut Memory<'_>) -> Result<()> {
        if !matches!(self.options.mode, Mode::Infer | Mode::Gradient) {
            let got = format!("a plan compiled for {:?}", self.options.mode);
            return Err(Error::PlanMemory { what: "mode", expected: "no loss".into(), got });
        }
        let phases = Phase::Forward..=Phase::Backward;
        for of in self.uses(phases.clone()) {
            let (got, group) = (memory.bytes(of.space), self.group_bytes(of.space));
            let fits = match group {
                Some(bytes) => got == bytes,
                None if of.is_whole() => got == of.bytes,
                None => got >= of.bytes,
            };
            if !fits {
                let expected = format!("{:?} of {} bytes", of.space, group.unwrap_or(of.bytes));
                return Err(Error::PlanMemory { what: "memory", expected, got: got.to_string() });
            }
        }
        self.steps(phases).iter().for_each(|step| step.run(isa, memory));
        Ok(())
    }
}

/// Refuses a batch that a plan cannot have.
fn check_batch(graph: &Graph, batch: usize) -> Result<()> {
    let elements = graph.nodes.iter().map(|node| node.dims.numel());
    match (batch == 0, elements.clone().min(), elements.max()) {
        (true, ..) | (_, Some(0), _) => Err(Error::EmptyBatch { batch }),
        // The arena holds a few values for each node, and scratch of a few times the largest.
        (_, _, Some(most)) if batch > (isize::MAX as usize >> 12) / most / graph.nodes.len() => {
            Err(Error::BatchTooLarge { batch })
        }
        _ => Ok(()),
    }
}

/// The gradients of the inputs, which the caller of [`Mode::Gradient`] reads after a run.
fn input_gradients_of(b: &mut Builder<'_>) -> Vec<Option<ValueId>> {
    let graph = b.graph;
    let mut gradients = vec![];
    for (i, node) in graph.nodes.iter().enumerate() {
        if node.op.input().is_some() {
            let id = crate::graph::NodeId(i);
            let gradient = b.gradient(id);
            if let Some(gradient) = gradient {
                b.keep(gradient);
            }
            gradients.push(gradient);
        }
    }
    gradients
}

/// Drops dead steps, assigns memory, resolves operands.
fn finish(
    b: Builder<'_>,
    output: ValueId,
    output_gradient: Option<ValueId>,
    input_gradients: Vec<Option<ValueId>>,
) -> Plan {
    let groups = (0..b.graph.groups.len()).map(|g| b.group_gradient(g)).collect::<Vec<_>>();
    let Builder { layout, options, values, steps, trained, last_states, .. } = b;
    let steps = without_dead(&values, steps);
    let (spans, arena_len) = assign_memory(&values, &steps);
    let span = |id: ValueId| if id == ValueId::NONE { Span::EMPTY } else { spans[id.index()] };
    let all = |ids: &[ValueId]| ids.iter().map(|id| span(*id)).collect::<SmallVec<_>>();
    if cfg!(debug_assertions) {
        let problem = check::misuse(&values, &steps, &spans);
        assert_eq!(problem, None, "memory of a plan");
    }
    let ends = |phase: usize| steps.iter().filter(|step| step.phase as usize <= phase).count();
    let phase_ends: [usize; Phase::COUNT] = std::array::from_fn(ends);
    let steps: Vec<Step> = steps
        .into_iter()
        .map(|d| Step { op: d.op, reads: all(&d.reads), writes: all(&d.writes) })
        .collect();
    let start = |phase: usize| if phase == 0 { 0 } else { phase_ends[phase - 1] };
    let uses_of = |first: usize, last: usize| match first <= last {
        true => uses(&steps[start(first)..phase_ends[last]]),
        false => vec![],
    };
    let uses = std::array::from_fn(|first| std::array::from_fn(|last| uses_of(first, last)));
    Plan {
        options,
        arena_len,
        steps,
        phase_ends,
        uses,
        output: span(output),
        output_gradient: output_gradient.map(span),
        last_states: match options.mode {
            Mode::Infer | Mode::Gradient => last_states.into_iter().map(span).collect(),
            _ => vec![],
        },
        input_gradients: input_gradients.into_iter().map(|g| g.map(span)).collect(),
        group_gradients: groups.into_iter().map(|g| g.map(span)).collect(),
        layout: layout.clone(),
        trained,
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
        if writes.iter().any(|v| used[v.index()] || outside(v)) {
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
            let fresh = Lifetime { first, last: at, len: value.arena_len() };
            let life = lives[id.index()].get_or_insert(fresh);
            life.last = if value.to_end { end } else { at };
        }
    }
    // What only the caller touches (a gradient that no step reads) needs memory all the same.
    for (life, value) in lives.iter_mut().zip(values) {
        if life.is_none() && (value.from_start || value.to_end) {
            *life = Some(Lifetime { first: 0, last: end, len: value.arena_len() });
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
    let in_arena = |value: &Value, start: usize| {
        let start = start * meristem_device::DType::F32.size() / value.dtype.size();
        Span::new(Space::Arena, value.dtype, start, value.len)
    };
    let spans = values.iter().enumerate().map(|(i, value)| match value.home {
        Home::Fixed(span) => span,
        Home::Arena => in_arena(value, starts[i]),
        Home::Part { of, start } => in_arena(value, starts[root(values, of).index()] + start),
    });
    (spans.collect(), assignment.len)
}

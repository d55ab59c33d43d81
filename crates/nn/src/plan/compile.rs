//! Compiles a graph to its plan: units are lowered into a builder, dead steps dropped, memory
//! assigned, operands resolved.

use meristem_device::DType;
use smallvec::SmallVec;

use super::arena::{self, Lifetime};
use super::builder::PlanBuilder;
use super::programs::Programs;
use super::step::{Draft, Phase, PlanStep, uses};
use super::value::{PlanValue, ValueHome, ValueId, root};
use super::{Plan, PlanMode, PlanOptions, chain, check, fuse, lower};
use crate::error::{Error, Result};
use crate::graph::{Graph, GroupId, NodeId};
use crate::layout::ParamLayout;
use crate::ops::PlanTarget;
use crate::space::{Space, SpaceSpan};

impl Plan {
    /// Compiles a graph.
    ///
    /// # Errors
    /// [`Error::EmptyBatch`] for a batch of no samples or a graph with an empty value;
    /// [`Error::BatchTooLarge`] where a value would have no place in memory; [`Error::Steps`] for
    /// samples that are not whole sequences;
    /// [`Error::OneValuePerChannel`] where batch norm would have to train on one value per channel.
    pub fn compile(graph: &Graph, options: PlanOptions) -> Result<Self> {
        let graph = &*graph.without_idle_dropout(options.mode.is_training());
        check_batch(graph, options.batch)?;
        if options.steps == 0 || !options.batch.is_multiple_of(options.steps) {
            return Err(Error::Steps { batch: options.batch, steps: options.steps });
        }
        let layout = ParamLayout::new(graph);
        let mode = options.mode.clone();
        let mut b = PlanBuilder::new(graph, &layout, options);
        let mut backward = vec![];
        let units = fuse::units(graph, &b.options);
        lower::fused::begin(&mut b, &units);
        for unit in &units {
            if let Some(emit) = lower::forward(&mut b, unit)? {
                backward.push((unit.output(), emit));
            }
        }
        if mode == PlanMode::TrainByGradient {
            lower::train::deliver_output(&mut b);
        }
        b.begin(Phase::Backward);
        let mut gradient = None;
        let output_gradient = match &mode {
            PlanMode::Train => Some(lower::train::loss(&mut b)),
            PlanMode::TrainPolicy { loss, pass } => {
                Some(lower::train::policy_loss(&mut b, loss, *pass))
            }
            PlanMode::TrainByGradient => Some(lower::train::given_gradient(&mut b)),
            PlanMode::Gradient => {
                let given = b.given(b.shape(graph.output).len());
                gradient = Some(given);
                Some(b.as_values(given))
            }
            PlanMode::Evaluate | PlanMode::Infer | PlanMode::Draw(_) => None,
        };
        if let Some(seed) = output_gradient {
            b.seed(graph.output, seed);
            for (node, emit) in backward.into_iter().rev() {
                if let Some(gradient) = b.gradient(node).filter(|_| b.needs_gradient(node)) {
                    emit(&mut b, gradient);
                }
            }
        }
        match &mode {
            PlanMode::Train | PlanMode::TrainPolicy { .. } | PlanMode::TrainByGradient => {
                lower::dropout::count(&mut b);
                lower::train::update(&mut b)
            }
            PlanMode::Evaluate => {
                let reference = b.arena(b.batch());
                lower::train::score(&mut b, &[0], reference);
            }
            PlanMode::Infer => lower::train::deliver(&mut b, None),
            PlanMode::Draw(sampler) => lower::train::deliver(&mut b, Some(sampler)),
            PlanMode::Gradient => {}
        }
        Ok(finish(b, gradient))
    }
}

/// Returns an error for a batch that cannot be planned.
pub(super) fn check_batch(graph: &Graph, batch: usize) -> Result<()> {
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

/// Drops dead steps, assigns memory, resolves operands.
pub(super) fn finish(mut b: PlanBuilder<'_>, output_gradient: Option<ValueId>) -> Plan {
    let (graph, output) = (b.graph, b.node(b.graph.output));
    if b.options.mode.has_loss() {
        b.last_states.clear()
    } else {
        b.keep(std::iter::once(output).chain(b.last_states.clone()))
    }
    let inputs = (0..).zip(&graph.nodes).filter(|(_, node)| node.op.input().is_some());
    let inputs: Vec<_> = inputs.map(|(i, _)| b.gradient(NodeId(i))).collect();
    let input_gradients: Vec<_> =
        inputs.into_iter().map(|gradient| gradient.map(|of| b.as_f32(of))).collect();
    b.keep(input_gradients.iter().copied().flatten());
    let groups = (0..b.graph.groups.len()).map(|g| b.group_gradient(g)).collect::<Vec<_>>();
    let PlanBuilder { layout, options, mut values, mut steps, trained, last_states, .. } = b;
    steps = without_dead(&values, steps);
    if options.fuse && options.target == PlanTarget::Cpu {
        let host = groups[GroupId::HOST.0].unwrap_or(ValueId::NONE);
        steps = chain::with_chains(&mut values, steps, options.batch, host);
    }
    let (spans, arena_len) = assign_memory(&values, &steps);
    let span = |id: ValueId| if id == ValueId::NONE { SpaceSpan::EMPTY } else { spans[id.index()] };
    let all = |ids: &[ValueId]| ids.iter().map(|id| span(*id)).collect::<SmallVec<_>>();
    if cfg!(debug_assertions) {
        let problem = check::misuse(&values, &steps, &spans);
        assert_eq!(problem, None, "memory of a plan");
    }
    let ends = |phase: usize| steps.iter().filter(|step| step.phase as usize <= phase).count();
    let phase_ends: [usize; Phase::COUNT] = std::array::from_fn(ends);
    let steps: Vec<PlanStep> = steps
        .into_iter()
        .map(|d| PlanStep {
            op: d.op,
            values: d.values,
            reads: all(&d.reads),
            writes: all(&d.writes),
        })
        .collect();
    let start = |phase: usize| if phase == 0 { 0 } else { phase_ends[phase - 1] };
    let uses_of = |first: usize, last: usize| {
        if first <= last { uses(&steps[start(first)..phase_ends[last]]) } else { vec![] }
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
        last_states: last_states.into_iter().map(span).collect(),
        input_gradients: input_gradients.into_iter().map(|g| g.map(span)).collect(),
        group_gradients: groups.into_iter().map(|g| g.map(span)).collect(),
        layout: layout.clone(),
        trained,
        programs: Programs::default(),
    }
}

/// The steps with used results: results that a later kept step reads, that the caller reads, or
/// that are outside of the arena. (For instance, no step reads the value of a module under
/// `StraightThrough`.)
fn without_dead(values: &[PlanValue], steps: Vec<Draft>) -> Vec<Draft> {
    let mut used: Vec<bool> = values.iter().map(|v| v.to_end).collect();
    let mut live = vec![];
    for step in steps.into_iter().rev() {
        let roots = |ids: &[ValueId]| -> Vec<ValueId> {
            ids.iter().filter(|v| **v != ValueId::NONE).map(|v| root(values, *v)).collect()
        };
        let writes = roots(&step.writes);
        let outside = |v: &ValueId| matches!(values[v.index()].home, ValueHome::Fixed(_));
        if writes.iter().any(|v| used[v.index()] || outside(v)) {
            roots(&step.reads).into_iter().for_each(|v| used[v.index()] = true);
            live.push(step);
        }
    }
    live.reverse();
    live
}

/// A span for every value, and the arena's length.
fn assign_memory(values: &[PlanValue], steps: &[Draft]) -> (Vec<SpaceSpan>, usize) {
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
    // A value that only the caller touches (a gradient that no step reads) needs memory, too.
    for (life, value) in lives.iter_mut().zip(values) {
        if life.is_none() && (value.from_start || value.to_end) {
            *life = Some(Lifetime { first: 0, last: end, len: value.arena_len() });
        }
    }
    let arena: Vec<usize> = (0..values.len())
        .filter(|&i| matches!(values[i].home, ValueHome::Arena) && lives[i].is_some())
        .collect();
    let lifetimes: Vec<Lifetime> = arena.iter().filter_map(|&i| lives[i]).collect();
    let assignment = arena::assign(&lifetimes);
    let mut starts = vec![0; values.len()];
    for (&i, &offset) in arena.iter().zip(&assignment.offsets) {
        starts[i] = offset;
    }
    let in_arena = |value: &PlanValue, start: usize| {
        let start = start * DType::F32.size() / value.dtype.size();
        SpaceSpan::new(Space::Arena, value.dtype, start, value.len)
    };
    let spans = values.iter().enumerate().map(|(i, value)| match value.home {
        ValueHome::Fixed(span) => span,
        ValueHome::Arena => in_arena(value, starts[i]),
        ValueHome::Part { of, start } => in_arena(value, starts[root(values, of).index()] + start),
    });
    (spans.collect(), assignment.len)
}

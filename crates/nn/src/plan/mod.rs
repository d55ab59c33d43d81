//! Graph to plan: a flat list of steps over one arena, with offsets assigned at compile time.
//!
//! A run executes the same steps whatever the data, and waits for no device. The arena and the
//! caller's memories hold all tensors; scratch of processor kernels that run in several parts is
//! memory that workers keep (`kernels::parts`). There is no tape: backward is derived here, op by
//! op (see `lower`, one file per family of operations), and only for nodes that depend on a
//! parameter or, with `PlanMode::Gradient`, on an input.
//!
//! The way of a graph: `fuse` groups nodes into units, `lower` emits each unit's steps into a
//! `builder`, dead steps are dropped, runs of consecutive steps become a `chain` (for processors),
//! and `arena` assigns memory from the values' lifetimes. In debug builds `check` then examines the
//! result.

mod arena;
mod builder;
mod chain;
mod check;
mod compile;
mod fuse;
mod fused_state;
mod lower;
mod memory;
mod options;
pub(crate) mod programs;
mod step;
mod tree;
mod value;

use std::ops::{Range, RangeInclusive};

use meristem_device::Program;

pub(crate) use self::lower::dropout::batches_span;
pub use self::memory::{GroupMemory, PlanMemory};
pub use self::options::{PlanMode, PlanOptions};
use self::programs::{Binding, Programs};
pub use self::step::{Phase, PlanStep, SpaceUse};
pub(crate) use self::step::{add_use, uses};
pub(crate) use self::tree::{AlphaPattern, flops};
use crate::error::{Error, Result};
use crate::graph::ParamId;
use crate::kernels::Isa;
use crate::layout::ParamLayout;
use crate::ops::{OptimOp, StepOp};
pub use crate::space::{Space, SpaceSpan};

/// A compiled graph for one batch size and mode.
#[derive(Debug)]
pub struct Plan {
    options: PlanOptions,
    arena_len: usize,
    steps: Vec<PlanStep>,
    /// Number of steps up to the end of each phase.
    phase_ends: [usize; Phase::COUNT],
    /// The memories that consecutive phases use, by the first and the last phase.
    uses: [[Vec<SpaceUse>; Phase::COUNT]; Phase::COUNT],
    output: SpaceSpan,
    output_gradient: Option<SpaceSpan>,
    last_states: Vec<SpaceSpan>,
    /// Location of each input's gradient.
    input_gradients: Vec<Option<SpaceSpan>>,
    group_gradients: Vec<Option<SpaceSpan>>,
    layout: ParamLayout,
    trained: Vec<bool>,
    programs: Programs,
}

impl Plan {
    /// Options that it was compiled with.
    pub fn options(&self) -> &PlanOptions {
        &self.options
    }

    /// f32 elements of the arena.
    pub fn arena_len(&self) -> usize {
        self.arena_len
    }

    /// Number of steps.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// One line for each step: operation, reads, writes. For people.
    pub fn describe(&self) -> String {
        let line = |s: &PlanStep| format!("{:?} {:?} -> {:?}\n", s.op, s.reads, s.writes);
        self.steps.iter().map(line).collect()
    }

    /// Place of the output after a run in [`PlanMode::Infer`] or [`PlanMode::Gradient`].
    pub fn output(&self) -> SpaceSpan {
        self.output
    }

    /// Place of each LSTM's state after the last step, `[sequences, 2·hidden]`, after a run in
    /// [`PlanMode::Infer`] or [`PlanMode::Gradient`].
    pub fn last_states(&self) -> &[SpaceSpan] {
        &self.last_states
    }

    /// Place of the output's gradient, which the caller of [`PlanMode::Gradient`] writes before a
    /// run.
    pub fn output_gradient(&self) -> Option<Range<usize>> {
        self.output_gradient.map(SpaceSpan::range)
    }

    /// Place of an input's gradient in the arena after a run in [`PlanMode::Gradient`]; `None` when
    /// no gradient reaches it.
    pub fn input_gradient(&self, input: usize) -> Option<Range<usize>> {
        (*self.input_gradients.get(input)?).map(SpaceSpan::range)
    }

    /// Place of a parameter's packed gradient in the arena after a run in [`PlanMode::Gradient`];
    /// `None` when no gradient reaches it.
    pub fn parameter_gradient(&self, id: ParamId) -> Option<Range<usize>> {
        let place = self.layout.param(id);
        let group = self.group_gradients[place.group.index()]?;
        self.trained[id.index()].then(|| {
            let start = group.start + place.start;
            start..start + place.len
        })
    }

    /// Place of the gradient of all parameters of a group in the arena, in the layout of its
    /// values; `None` when no gradient reaches any of them.
    pub(crate) fn group_gradient(&self, group: usize) -> Option<Range<usize>> {
        self.group_gradients[group].map(SpaceSpan::range)
    }

    /// By parameter of the graph: its group and its elements there, `None` where no gradient
    /// reaches it.
    pub(crate) fn trained_params(&self) -> impl Iterator<Item = Option<(usize, Range<usize>)>> {
        let params = self.layout.params.iter().zip(&self.trained);
        params.map(|(place, trained)| trained.then(|| (place.group.index(), place.range())))
    }

    /// The layout of parameters and buffers that the plan expects.
    pub fn layout(&self) -> &ParamLayout {
        &self.layout
    }

    /// Bytes of a group's memory.
    fn group_bytes(&self, space: Space) -> Option<usize> {
        let size = |group: crate::graph::GroupId| self.layout.groups[group.index()];
        Some(match space {
            Space::Values(g) => size(g).values * size_of::<f32>(),
            Space::OptimiserState(g) => size(g).moments * size_of::<f32>(),
            Space::RunningStats(g) => size(g).running_stats * size_of::<f32>(),
            Space::Counters(g) => size(g).counters * size_of::<i64>(),
            _ => return None,
        })
    }

    /// The steps of some phases, in order.
    pub fn steps(&self, phases: RangeInclusive<Phase>) -> &[PlanStep] {
        let first = *phases.start() as usize;
        let start = if first == 0 { 0 } else { self.phase_ends[first - 1] };
        &self.steps[start..self.phase_ends[*phases.end() as usize].max(start)]
    }

    /// The memories that these steps use, in the order of first use.
    pub fn uses(&self, phases: RangeInclusive<Phase>) -> &[SpaceUse] {
        &self.uses[*phases.start() as usize][*phases.end() as usize]
    }

    /// The steps of some phases as calls of CUDA kernels. For each argument of the launch, `bound`
    /// has its space and the position of the space's first byte in the argument. The most recently
    /// used programs are cached.
    pub(crate) fn program(
        &self,
        phases: RangeInclusive<Phase>,
        bound: &[(SpaceUse, usize)],
    ) -> Program {
        let key = Binding::new(&phases, bound);
        self.programs.get(key, || programs::program(self.steps(phases), bound))
    }

    /// The CUDA kernels that a run of all phases calls, in order, and the bytes of each kernel's
    /// tensors: its memory traffic if it reads or writes each element once.
    pub fn traffic(&self) -> Vec<(&'static str, usize)> {
        let phases = Phase::Forward..=Phase::Deliver;
        let bound: Vec<_> = self.uses(phases.clone()).iter().map(|of| (*of, 0)).collect();
        programs::program(self.steps(phases), &bound).traffic().collect()
    }

    /// Steps that clip the gradient in place, at `factor` times the optimisers' clip norms. They
    /// replace [`Phase::Measure`]; [`Phase::Update`] then uses the gradient unchanged.
    pub(crate) fn clipping(&self, factor: f32) -> Vec<PlanStep> {
        let mut steps = vec![];
        for step in self.steps(Phase::Measure..=Phase::Measure) {
            if let StepOp::Optim(OptimOp::Measure { len, tensors, norm_factor }) = &step.op {
                let (len, tensors) = (*len, tensors.clone());
                let norm_factor = norm_factor * factor;
                let op = OptimOp::Measure { len, tensors: tensors.clone(), norm_factor };
                steps.push(PlanStep { op: op.into(), ..step.clone() });
                let writes = [step.reads[0], step.writes[1]];
                steps.push(PlanStep::new(OptimOp::Clip { len, tensors }, &[], &writes));
            }
        }
        steps
    }

    /// Runs a plan of [`PlanMode::Infer`] or [`PlanMode::Gradient`] on the calling thread; its
    /// results stay in the arena.
    ///
    /// # Errors
    /// [`Error::PlanMemory`] when a memory is missing or has another length than the plan needs
    /// (arena and alphas may be longer), or the plan is of another mode.
    pub fn run(&self, isa: Isa, memory: &mut PlanMemory<'_>) -> Result<()> {
        if !matches!(self.options.mode, PlanMode::Infer | PlanMode::Gradient) {
            let expected = "Infer or Gradient".into();
            let got = format!("a plan compiled for {:?}", self.options.mode);
            return Err(Error::PlanMemory { what: "mode", expected, got });
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

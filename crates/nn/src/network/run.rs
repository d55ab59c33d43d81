//! Launches of steps on a stream: the memories of the steps become the arguments of a launch.

use std::borrow::Cow;
use std::ops::RangeInclusive;
use std::sync::Arc;

use meristem_device::{Args, Launch, Launches, Program, Scratch, Stream, Tensor};
use smallvec::SmallVec;

use super::groups::GroupTensors;
use crate::error::{Error, Result};
use crate::kernels::Isa;
use crate::ops::PlanTarget;
use crate::plan::programs::program;
use crate::plan::{Phase, Plan, PlanMemory, PlanStep, Space, SpaceUse, add_use, uses};

/// Memory of a launch's arena.
#[derive(Clone, Copy, Debug)]
pub(super) enum Arena<'a> {
    /// In temporary memory, with no contents after the launch.
    Scratch(&'a Scratch),
    /// A tensor of the network.
    Kept(&'a Tensor),
}

/// Tensors for the spaces of a plan in one launch; tensors that its steps do not use may be absent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LaunchTensors<'a> {
    pub(super) arena: Option<Arena<'a>>,
    pub(super) groups: &'a [GroupTensors],
    pub(super) metrics: Option<&'a Tensor>,
    /// First element of the scores, in the metrics.
    pub(super) scores_start: usize,
    pub(super) inputs: &'a [&'a Tensor],
    pub(super) targets: Option<&'a Tensor>,
    pub(super) class_weights: Option<&'a Tensor>,
    pub(super) hyperparameters: Option<&'a Tensor>,
    pub(super) step_factors: Option<&'a Tensor>,
    pub(super) alphas: Option<&'a Tensor>,
    /// First alpha of the run's first row.
    pub(super) alphas_start: usize,
    pub(super) outputs: &'a [&'a Tensor],
}

impl<'a> LaunchTensors<'a> {
    /// The tensor of a space, and the first of its elements that belongs to it.
    fn tensor(&self, space: Space) -> Option<(&'a Tensor, usize)> {
        let whole = |tensor: Option<&'a Tensor>| Some((tensor?, 0));
        match space {
            Space::Arena => match self.arena? {
                Arena::Scratch(_) => None,
                Arena::Kept(tensor) => Some((tensor, 0)),
            },
            Space::Input(n) => whole(self.inputs.get(n).copied()),
            Space::Targets => whole(self.targets),
            Space::ClassWeights => whole(self.class_weights),
            Space::Hyperparameters => whole(self.hyperparameters),
            Space::StepFactors => whole(self.step_factors),
            Space::Alphas => Some((self.alphas?, self.alphas_start)),
            Space::Metrics => whole(self.metrics),
            Space::Scores => Some((self.metrics?, self.scores_start)),
            Space::Values(g) => whole(self.groups.get(g.index()).map(|group| &group.values)),
            Space::OptimiserState(g) => {
                whole(self.groups.get(g.index()).map(|group| &group.optimiser_state))
            }
            Space::RunningStats(g) => {
                whole(self.groups.get(g.index()).map(|group| &group.running_stats))
            }
            Space::Counters(g) => whole(self.groups.get(g.index()).map(|group| &group.counters)),
            Space::Output(n) => whole(self.outputs.get(n).copied()),
        }
    }
}

/// Steps of one launch: phases of a plan, then further steps.
#[derive(Clone, Debug, Default)]
pub(super) struct LaunchSteps {
    phases: Option<(Arc<Plan>, RangeInclusive<Phase>)>,
    then: Vec<PlanStep>,
}

impl LaunchSteps {
    /// Phases of a plan.
    pub(super) fn from_plan(plan: &Arc<Plan>, phases: RangeInclusive<Phase>) -> Self {
        Self { phases: Some((Arc::clone(plan), phases)), then: vec![] }
    }

    /// Steps of no plan.
    pub(super) fn steps(then: Vec<PlanStep>) -> Self {
        Self { phases: None, then }
    }

    /// The same phases, then these steps, which replace earlier ones after the phases.
    pub(super) fn then(self, then: Vec<PlanStep>) -> Self {
        Self { then, ..self }
    }

    fn uses(&self) -> Cow<'_, [SpaceUse]> {
        let of_plan = self.phases.as_ref().map(|(plan, phases)| plan.uses(phases.clone()));
        let mut all = Cow::Borrowed(of_plan.unwrap_or_default());
        if !self.then.is_empty() {
            uses(&self.then).into_iter().for_each(|of| add_use(all.to_mut(), of));
        }
        all
    }

    fn execute(&self, isa: Isa, memory: &mut PlanMemory<'_>) {
        let of_plan = self.phases.as_ref().map(|(plan, phases)| plan.steps(phases.clone()));
        of_plan.into_iter().flatten().chain(&self.then).for_each(|step| step.run(isa, memory));
    }

    /// The steps as calls of CUDA kernels. For each argument of the launch, `bound` has its space
    /// and the position of the space's first byte in the argument.
    fn program(&self, bound: &[(SpaceUse, usize)]) -> Program {
        match &self.phases {
            None => program(&self.then, bound),
            Some((plan, phases)) if self.then.is_empty() => plan.program(phases.clone(), bound),
            Some((plan, phases)) => {
                program(plan.steps(phases.clone()).iter().chain(&self.then), bound)
            }
        }
    }

    /// Enqueues the steps as one launch with their reads and writes: on a CUDA device, phases of a
    /// plan are one graph, which is kept. Waits for nothing.
    ///
    /// # Errors
    /// [`Error::PlanMemory`] for a tensor that is absent, of another type or too short; as
    /// [`Launch::run`](meristem_device::Launch::run).
    #[track_caller]
    pub(super) fn launch<'a>(
        self,
        (stream, operation): (&'a Stream, &'static str),
        isa: Isa,
        tensors: &LaunchTensors<'a>,
    ) -> Result<()> {
        if self.is_graph(stream) {
            let mut launches = Launches::default();
            self.add(&mut launches, (stream, operation), isa, tensors)?;
            return Ok(launches.run()?);
        }
        let (launch, kernel) = self.kernel((stream, operation), isa, tensors)?;
        Ok(launch.run(kernel)?)
    }

    /// Whether the steps are launched as a graph: on a CUDA device, if their program is kept by
    /// the plan, as the graph is kept for the program.
    fn is_graph(&self, stream: &Stream) -> bool {
        let on_cuda = PlanTarget::for_device(stream.device()) == PlanTarget::Cuda;
        on_cuda && self.phases.is_some() && self.then.is_empty()
    }

    /// The steps' program and its number of arguments, before there is a batch: its tensors are
    /// used from their first element on.
    pub(super) fn ahead(&self, tensors: &LaunchTensors<'_>) -> (Program, usize) {
        let start = |of: &SpaceUse| {
            tensors.tensor(of.space).map_or(0, |(tensor, start)| start * tensor.dtype().size())
        };
        let bound: Vec<_> = self.uses().iter().map(|of| (*of, start(of))).collect();
        (self.program(&bound), bound.len())
    }

    /// Adds the steps, as one launch, to independent launches.
    ///
    /// # Errors
    /// As [`LaunchSteps::launch`], and [`Launch::add`](meristem_device::Launch::add).
    #[track_caller]
    pub(super) fn add<'a>(
        self,
        to: &mut Launches<'a>,
        (stream, operation): (&'a Stream, &'static str),
        isa: Isa,
        tensors: &LaunchTensors<'a>,
    ) -> Result<()> {
        let (launch, kernel) = self.kernel((stream, operation), isa, tensors)?;
        Ok(launch.add(to, kernel)?)
    }

    /// The launch, and its kernel on the processor.
    #[track_caller]
    fn kernel<'a>(
        self,
        (stream, operation): (&'a Stream, &'static str),
        isa: Isa,
        tensors: &LaunchTensors<'a>,
    ) -> Result<(Launch<'a>, impl FnOnce(&mut Args<'_>) + Send + 'static)> {
        let mut launch = stream.launch(operation);
        let mut bound: SmallVec<[(SpaceUse, usize); 16]> = SmallVec::new();
        let mut temporary = false;
        for &of in &*self.uses() {
            if let (Space::Arena, Some(Arena::Scratch(scratch))) = (of.space, tensors.arena) {
                check_scratch(scratch, of)?;
                launch = launch.scratch(scratch);
                temporary = true;
                continue;
            }
            let (tensor, start) = find(tensors, of)?;
            bound.push((of, start * tensor.dtype().size()));
            launch = if of.written { launch.write(tensor) } else { launch.read(tensor) };
        }
        let launch = launch.gpu(|| self.program(&bound));
        let kernel = move |args: &mut Args<'_>| {
            let mut memory = PlanMemory::default();
            if temporary {
                memory.bind_mut(Space::Arena, args.scratch());
            }
            for (i, (SpaceUse { space, written, .. }, start)) in bound.into_iter().enumerate() {
                if written {
                    memory.bind_mut(space, &mut args.bytes_mut(i)[start..])
                } else {
                    memory.bind(space, &args.bytes(i)[start..])
                }
            }
            self.execute(isa, &mut memory);
        };
        Ok((launch, kernel))
    }
}

/// Checks that temporary memory is large enough for an arena.
fn check_scratch(scratch: &Scratch, of: SpaceUse) -> Result<()> {
    if scratch.bytes() >= of.bytes {
        return Ok(());
    }
    let expected = format!("at least {} bytes for {:?}", of.bytes, of.space);
    let got = format!("{} bytes", scratch.bytes());
    Err(Error::PlanMemory { what: "temporary memory of a launch", expected, got })
}

/// The tensor that is used, and the first of its elements that belongs to the space.
fn find<'a>(tensors: &LaunchTensors<'a>, of: SpaceUse) -> Result<(&'a Tensor, usize)> {
    let mismatch = |got: String| {
        let least = if of.is_whole() { "" } else { "at least " };
        let expected =
            format!("{:?} with {least}{} of {}", of.space, of.bytes / of.dtype.size(), of.dtype);
        Error::PlanMemory { what: "tensors of a launch", expected, got }
    };
    let (tensor, start) = tensors.tensor(of.space).ok_or_else(|| mismatch("none".into()))?;
    let (dtype, elements) = (tensor.dtype(), tensor.numel().saturating_sub(start));
    let bytes = elements * dtype.size();
    let typed = of.space == Space::Arena || dtype == of.dtype;
    let sized = if of.is_whole() { bytes == of.bytes } else { bytes >= of.bytes };
    if typed && sized {
        Ok((tensor, start))
    } else {
        Err(mismatch(format!("{elements} of {dtype}")))
    }
}

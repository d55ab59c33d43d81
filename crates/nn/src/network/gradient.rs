//! A training step in two halves, so that replicas of a network on several ranks can exchange their
//! gradients in between.

use std::collections::HashMap;
use std::sync::Arc;

use meristem_device::{DType, Launches, PlannedLaunch, Tensor, read_back_as};

use super::run::LaunchTensors;
use super::state::unpacked;
use super::{LaunchSteps, Network};
use crate::error::{Error, Result};
use crate::graph::{Graph, GroupId};
use crate::layout::packing;
use crate::ops::{DropoutOp, ElementwiseOp, PlanTarget, StepOp};
use crate::plan::{Phase, Plan, PlanMode, PlanStep, Space, SpaceSpan, batches_span};
use crate::state::{HostTensor, StateDict};

/// A gradient in an arena.
#[derive(Debug)]
pub(super) struct ArenaGradient {
    /// The plan that left it.
    plan: Arc<Plan>,
    /// Whether it was clipped.
    clipped: bool,
    /// Whether the arena is that of a loop of the program's own, where [`Network::backward`] left
    /// it.
    in_own_loop: bool,
}

impl Network {
    /// Prepares a training step in two halves, and an observation, of `batch` samples: compiles the
    /// plan, allocates memory that keeps the gradient, and on a CUDA device builds the graphs.
    /// `clips`: [`Network::clip`] comes before [`Network::apply`]. Waits for the device only as
    /// [`Launches::prepare`] does.
    ///
    /// # Errors
    /// As [`Network::prepare_training`] and [`Launches::prepare`].
    #[track_caller]
    pub fn prepare_halves(&mut self, batch: usize, clips: bool) -> Result<()> {
        let plan = self.kept_plan(batch)?;
        let observation = self.observation_of(batch)?;
        if PlanTarget::for_device(self.stream.device()) != PlanTarget::Cuda {
            return Ok(());
        }
        let halves = [Phase::Forward..=Phase::Backward, first_of_update(clips)..=Phase::Update];
        for phases in halves {
            let run = LaunchSteps::from_plan(&plan, phases);
            let (program, arguments) = run.ahead(&self.kept_tensors(&[], None));
            let (stream, operation) = (&self.stream, "prepare_halves");
            Launches::prepare(vec![PlannedLaunch { stream, operation, program, arguments }])?;
        }
        Ok(Launches::prepare(vec![self.ahead(observation)])?)
    }

    /// The first half of [`Network::train_step`]: forward, loss, backward, metrics of the batch.
    /// The gradient is of the batch's mean loss times `weight`. It stays on the device until the
    /// next pass of any kind, until a pass is prepared, or until [`Network::gradient_buffers`] or
    /// [`Network::trained_parameters`] is called. One launch; waits for nothing.
    ///
    /// # Errors
    /// As [`Network::train_step`].
    #[track_caller]
    pub fn differentiate(&mut self, inputs: &Tensor, targets: &Tensor, weight: f32) -> Result<()> {
        let batch = self.check_batch("differentiate", inputs, targets)?;
        let plan = self.kept_plan(batch)?;
        let scaled = match weight {
            1.0 => vec![],
            factor => each_gradient(&plan, |len| ElementwiseOp::Multiply { len, factor }),
        };
        let run = LaunchSteps::from_plan(&plan, Phase::Forward..=Phase::Backward).then(scaled);
        self.launch("differentiate", run, &self.kept_tensors(&[inputs], Some(targets)))?;
        self.gradient = Some(ArenaGradient { plan, clipped: false, in_own_loop: false });
        Ok(())
    }

    /// Replaces [`Network::differentiate`] if the program computes the loss: the gradient of the
    /// last [`Network::backward`] becomes that of the step. Launches nothing.
    ///
    /// # Errors
    /// [`Error::Argument`] unless there is the gradient of one backward pass.
    pub fn keep_gradient(&mut self) -> Result<()> {
        let plan = self.take_loop_gradient()?;
        self.gradient = Some(ArenaGradient { plan, clipped: false, in_own_loop: true });
        Ok(())
    }

    /// Replaces [`Network::differentiate`] on a replica without samples: sets the gradient to zero.
    /// One launch; waits for nothing.
    ///
    /// # Errors
    /// [`Error::OneValuePerChannel`], memory, a failed stream.
    pub fn differentiate_nothing(&mut self) -> Result<()> {
        let plan = self.kept_plan(self.options.batch_max)?;
        let mut steps = each_gradient(&plan, |len| ElementwiseOp::Fill { len, value: 0.0 });
        // The batch counts for dropout, as on the other ranks.
        let groups = plan.layout().dropout.iter().enumerate();
        let batches = groups.filter_map(|(g, at)| Some(batches_span(GroupId(g), (*at)?)));
        let values = plan.options().values();
        let count = |span| PlanStep { values, ..PlanStep::new(DropoutOp::Count, &[], &[span]) };
        steps.extend(batches.map(count));
        self.launch_steps("differentiate_nothing", steps)?;
        self.gradient = Some(ArenaGradient { plan, clipped: false, in_own_loop: false });
        Ok(())
    }

    /// Gradients with the names of their parameters, for every parameter with a gradient: views of
    /// the arena, f32, flat and packed as in [`layout`](crate::layout). They are clipped only after
    /// [`Network::clip`]. Launches of this stream may overwrite them with sums over ranks.
    ///
    /// # Errors
    /// [`Error::Argument`] without a gradient.
    pub fn gradients(&self) -> Result<Vec<(&str, Tensor)>> {
        let ArenaGradient { plan, in_own_loop, .. } =
            self.gradient.as_ref().ok_or_else(|| missing("gradients"))?;
        let arena = if *in_own_loop { &self.arena.activations } else { &self.arena.kept };
        views(self.graph(), plan, arena)
    }

    /// The contents of [`Network::gradients`] under their parameters' names and in their shapes;
    /// zero where none arrived. One read-back, which waits for the device.
    ///
    /// # Errors
    /// [`Error::Argument`] without a gradient, a failed stream.
    pub fn gradient_dict(&self) -> Result<StateDict> {
        read(&self.graph, &self.gradients()?)
    }

    /// The buffers into which [`Network::differentiate`] will write the gradients of a batch of the
    /// largest size: names and tensors as from [`Network::gradients`]. Compiles the training plan
    /// and allocates its memory; launches nothing. A gradient that waits for [`Network::apply`] is
    /// dropped.
    ///
    /// # Errors
    /// [`Error::OneValuePerChannel`], memory.
    pub fn gradient_buffers(&mut self) -> Result<Vec<(&str, Tensor)>> {
        let plan = self.kept_plan(self.options.batch_max)?;
        views(self.graph(), &plan, &self.arena.kept)
    }

    /// The parameters that training changes, with their names, in the order of
    /// [`Network::gradients`]: views of the network's memory, f32, flat and packed as in
    /// [`layout`](crate::layout). A launch's writes there take effect from the next step on.
    /// Launches nothing. A gradient that waits for [`Network::apply`] is dropped.
    ///
    /// # Errors
    /// As [`Network::gradient_buffers`].
    pub fn trained_parameters(&mut self) -> Result<Vec<(&str, Tensor)>> {
        let plan = self.kept_plan(self.options.batch_max)?;
        let mut all = vec![];
        for (param, place) in self.graph.params.iter().zip(plan.trained_params()) {
            let Some((group, place)) = place else { continue };
            let values = &self.groups[group].values;
            all.push((param.name.as_str(), values.view(place.start, [place.len()])?));
        }
        Ok(all)
    }

    /// Measures and clips the gradient now, not in [`Network::apply`]: the gradient of each group,
    /// at `factor` times the norm that the group's optimiser allows. For an exchange that keeps
    /// back a part of the gradient: clipping the accumulated sum of many steps when it is sent at
    /// last would lose most of it. One launch; waits for nothing.
    ///
    /// # Errors
    /// [`Error::Argument`] without a gradient, or clipped twice; a failed
    /// stream.
    pub fn clip(&mut self, factor: f32) -> Result<()> {
        let ArenaGradient { plan, clipped, in_own_loop } =
            self.gradient.as_ref().ok_or_else(|| missing("clip"))?;
        if *clipped {
            let expected = "one that was not clipped";
            return Err(Error::argument("clip", "gradient", expected, "clipped"));
        }
        let (plan, in_own_loop) = (Arc::clone(plan), *in_own_loop);
        let run = LaunchSteps::steps(plan.clipping(factor));
        self.launch("clip", run, &self.gradient_tensors(in_own_loop))?;
        self.gradient = Some(ArenaGradient { plan, clipped: true, in_own_loop });
        Ok(())
    }

    /// The second half of [`Network::train_step`]: metrics of the gradient and clipping, unless it
    /// was clipped, and the optimiser's step, with the contents of [`Network::gradients`]. One
    /// launch; waits for nothing.
    ///
    /// # Errors
    /// [`Error::Argument`] without a gradient; a failed stream.
    pub fn apply(&mut self) -> Result<()> {
        let &ArenaGradient { ref plan, clipped, in_own_loop } =
            self.gradient.as_ref().ok_or_else(|| missing("apply"))?;
        let run = LaunchSteps::from_plan(plan, first_of_update(clipped)..=Phase::Update);
        self.launch("apply", run, &self.gradient_tensors(in_own_loop))?;
        self.gradient = None;
        Ok(())
    }

    /// Tensors of a launch that uses a gradient in its arena.
    fn gradient_tensors(&self, in_own_loop: bool) -> LaunchTensors<'_> {
        if in_own_loop { self.loop_tensors(&[], &[]) } else { self.kept_tensors(&[], None) }
    }

    /// The training plan of this batch size, with memory that keeps its gradient.
    fn kept_plan(&mut self, batch: usize) -> Result<Arc<Plan>> {
        let plan = self.plan(batch, PlanMode::Train)?;
        self.arena.make_kept_room(&self.stream, plan.arena_len())?;
        Ok(plan)
    }
}

/// Views of an arena: gradients with the names of their parameters, for every parameter that a
/// gradient reaches.
pub(super) fn views<'g>(
    graph: &'g Graph,
    plan: &Plan,
    arena: &Tensor,
) -> Result<Vec<(&'g str, Tensor)>> {
    let mut all = vec![];
    for (param, place) in graph.params.iter().zip(plan.trained_params()) {
        let Some((group, place)) = place else { continue };
        let Some(whole) = plan.group_gradient(group) else { continue };
        let gradient = arena.view(whole.start + place.start, [place.len()])?;
        all.push((param.name.as_str(), gradient));
    }
    Ok(all)
}

/// The contents of [`views`] in the shapes of the parameters; zero for parameters without one. One
/// read-back, which waits for the device.
pub(super) fn read(graph: &Graph, views: &[(&str, Tensor)]) -> Result<StateDict> {
    let packed = read_back_as::<f32>(&views.iter().map(|(_, view)| view).collect::<Vec<_>>())?;
    let found: HashMap<&str, Vec<f32>> = views.iter().map(|(name, _)| *name).zip(packed).collect();
    let gradients = graph.params.iter().map(|param| {
        let none = || HostTensor::f32(&param.shape, vec![0.0; param.shape.iter().product()]);
        let unpacked = |packed: &Vec<f32>| unpacked(&param.shape, packing(param), packed);
        (param.name.clone(), found.get(&*param.name).map_or_else(none, unpacked))
    });
    Ok(StateDict(gradients.collect()))
}

/// A step for the gradient of each group of a training plan that has a gradient.
fn each_gradient<T: Into<StepOp>>(plan: &Plan, op: impl Fn(usize) -> T) -> Vec<PlanStep> {
    let groups = 0..plan.layout().groups.len();
    let step = |at: std::ops::Range<usize>| {
        let span = SpaceSpan::new(Space::Arena, DType::F32, at.start, at.len());
        PlanStep::new(op(at.len()), &[], &[span])
    };
    groups.filter_map(|group| plan.group_gradient(group)).map(step).collect()
}

/// First phase of the second half of a step; a gradient that was clipped is not measured again.
fn first_of_update(clipped: bool) -> Phase {
    if clipped { Phase::Update } else { Phase::Measure }
}

fn missing(operation: &'static str) -> Error {
    let expected = "a gradient, from `differentiate` or `keep_gradient`, and no step after it";
    Error::argument(operation, "gradient", expected, "none")
}

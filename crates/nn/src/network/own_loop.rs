//! A training step in three calls, with a loss that the caller computes: forward, backward, update.
//! For tasks without a dataset: reinforcement learning, distillation, contrastive pairs.
//!
//! The forward pass leaves its activations in a separate arena, where no other launch writes, so
//! evaluations and inference may come between the calls. The gradients of several backward passes
//! add up until the update, as in PyTorch: the next forward pass overwrites the arena, so it first
//! moves a gradient that waits there to a sum.

use std::sync::Arc;

use meristem_device::{DType, Expect, Launches, Owner, Tensor};

use super::run::{Arena, LaunchSteps, LaunchTensors};
use super::{Network, NetworkFleet};
use crate::error::{Error, Result};
use crate::ops::ElementwiseOp;
use crate::plan::{Phase, Plan, PlanMode, PlanStep, Space, SpaceSpan};

/// Results of earlier calls that later calls use.
#[derive(Debug, Default)]
pub(super) struct LoopState {
    /// The last forward pass, until its backward pass.
    pass: Option<KeptPass>,
    /// Plan of the last backward pass, whose gradient is in the arena.
    gradient: Option<Arc<Plan>>,
    /// Sums of the gradients of earlier backward passes since the last update, for each group that
    /// has a gradient, in order; empty if there is no earlier one.
    sums: Vec<Tensor>,
}

/// A forward pass whose activations are in the arena.
#[derive(Debug)]
struct KeptPass {
    plan: Arc<Plan>,
    /// Its inputs, which the backward pass reads again.
    inputs: Tensor,
}

/// A launch of the loop, with its tensors other than the network's.
struct LoopLaunch<'t> {
    operation: &'static str,
    run: LaunchSteps,
    inputs: Vec<&'t Tensor>,
    outputs: Vec<&'t Tensor>,
}

impl Network {
    /// The forward pass of a training step, with row 0 of the alphas: outputs `[N, outputs]`, a new
    /// tensor. Batch norm uses the statistics of the batch, and adds them to its running ones. The
    /// activations are kept for [`Network::backward`]; earlier ones are lost. `inputs` as for
    /// [`Network::train_step`]; its contents must not change before the backward pass, which reads
    /// them. One launch, or two if a gradient that waits for the update is moved out of the arena;
    /// waits for nothing.
    ///
    /// # Errors
    /// As [`Network::train_step`], and memory.
    #[track_caller]
    pub fn forward(&mut self, inputs: &Tensor) -> Result<Tensor> {
        Ok(NetworkFleet::new([self]).forward(&[inputs])?.swap_remove(0))
    }

    /// The backward pass of the last [`Network::forward`]. `gradient` is the derivative of a loss
    /// by the outputs, f32 `[N, outputs]`, on this network's stream. The gradient of the parameters
    /// stays on the device until [`Network::update`]; gradients of several passes add up. One
    /// launch; waits for nothing.
    ///
    /// # Errors
    /// [`Error::Argument`] without a forward pass whose backward pass is due;
    /// [`meristem_device::Error::Mismatch`] for a tensor of another form or stream; a failed
    /// stream.
    #[track_caller]
    pub fn backward(&mut self, gradient: &Tensor) -> Result<()> {
        NetworkFleet::new([self]).backward(&[gradient])
    }

    /// Ends a training step: metrics of the gradient, clipping, and the optimiser's step, with the
    /// sum of the gradients since the last update. A forward pass whose backward pass is due is
    /// dropped. At most two launches; waits for nothing.
    ///
    /// # Errors
    /// [`Error::Argument`] without a gradient; a failed stream.
    #[track_caller]
    pub fn update(&mut self) -> Result<()> {
        NetworkFleet::new([self]).update()
    }

    /// Samples of the forward pass whose backward pass is due, if any.
    pub fn forward_batch(&self) -> Option<usize> {
        Some(self.own_loop.pass.as_ref()?.plan.options().batch)
    }

    /// Whether a gradient waits for [`Network::update`].
    pub fn has_gradient(&self) -> bool {
        self.own_loop.gradient.is_some() || !self.own_loop.sums.is_empty()
    }

    /// Drops the gradients that wait for [`Network::update`], and the activations of a forward
    /// pass.
    pub fn drop_gradient(&mut self) {
        self.own_loop = LoopState::default();
    }

    /// The plan of a forward pass of `batch` samples, with room for its arena. A gradient that is
    /// in the arena is added to the sums first.
    fn forward_plan(&mut self, batch: usize) -> Result<Arc<Plan>> {
        let plan = self.plan(batch, PlanMode::TrainByGradient)?;
        self.sum_gradient()?;
        self.own_loop.pass = None;
        self.arena.make_activations_room(&self.stream, plan.arena_len())?;
        Ok(plan)
    }

    /// Adds the gradient in the arena to the sums.
    fn sum_gradient(&mut self) -> Result<()> {
        let Some(plan) = &self.own_loop.gradient else { return Ok(()) };
        let spans = group_gradients(plan);
        let accumulate = !self.own_loop.sums.is_empty();
        let sums = if accumulate {
            self.own_loop.sums.clone()
        } else {
            let empty = |span: &SpaceSpan| {
                Tensor::empty(&self.stream, [span.len], DType::F32, Owner::Activations)
            };
            spans.iter().map(empty).collect::<Result<_, _>>()?
        };
        let step = |(n, from): (usize, &SpaceSpan)| {
            let to = SpaceSpan::new(Space::Output(n), DType::F32, 0, from.len);
            PlanStep::new(ElementwiseOp::Pass { len: from.len, accumulate }, &[*from], &[to])
        };
        let run = LaunchSteps::steps(spans.iter().enumerate().map(step).collect());
        let outputs = sums.iter().collect();
        self.launch_loop(LoopLaunch { operation: "sum_gradient", run, inputs: vec![], outputs })?;
        // After the launch: sums that a failed one has not written would be added to.
        (self.own_loop.gradient, self.own_loop.sums) = (None, sums);
        Ok(())
    }

    /// The plan of an update, with the sum of all gradients in its arena.
    fn update_plan(&mut self) -> Result<Arc<Plan>> {
        let LoopState { pass, gradient, sums } = &self.own_loop;
        let plan = match (gradient, pass) {
            (Some(plan), _) => Arc::clone(plan),
            // Uses the arena of the forward pass: the gradient overwrites the activations.
            (None, Some(pass)) if !sums.is_empty() => Arc::clone(&pass.plan),
            _ => return Err(missing("update", "a gradient, from `backward`")),
        };
        let accumulate = gradient.is_some();
        let step = |(n, to): (usize, &SpaceSpan)| {
            let from = SpaceSpan::new(Space::Input(n), DType::F32, 0, to.len);
            PlanStep::new(ElementwiseOp::Pass { len: to.len, accumulate }, &[from], &[*to])
        };
        if !sums.is_empty() {
            let steps = group_gradients(&plan).iter().enumerate().map(step).collect();
            let (run, inputs) = (LaunchSteps::steps(steps), sums.iter().collect());
            let operation = "sum_gradient";
            self.launch_loop(LoopLaunch { operation, run, inputs, outputs: vec![] })?;
        }
        let gradient = Some(Arc::clone(&plan));
        self.own_loop = LoopState { pass: None, gradient, sums: vec![] };
        Ok(plan)
    }

    /// Takes the plan with the gradient of one backward pass in its arena.
    pub(super) fn take_loop_gradient(&mut self) -> Result<Arc<Plan>> {
        let LoopState { gradient, sums, .. } = &mut self.own_loop;
        let gradient = gradient.take_if(|_| sums.is_empty());
        gradient.ok_or_else(|| {
            missing("keep_gradient", "the gradient of one backward pass, from `backward`")
        })
    }

    /// The pass whose backward pass is due, for a gradient of this form.
    fn due_pass(&self, gradient: &Tensor) -> Result<&KeptPass> {
        let pass = self.own_loop.pass.as_ref();
        let pass = pass.ok_or_else(|| missing("backward", "a forward pass, from `forward`"))?;
        let shape = [pass.plan.options().batch, self.graph().classes()];
        let expect = Expect::stream(&self.stream).dtype(DType::F32).shape(shape).contiguous();
        expect.check("backward", "gradient", gradient)?;
        Ok(pass)
    }

    pub(super) fn loop_tensors<'a>(
        &'a self,
        inputs: &'a [&Tensor],
        outputs: &'a [&Tensor],
    ) -> LaunchTensors<'a> {
        let arena = Some(Arena::Kept(&self.arena.activations));
        LaunchTensors { arena, outputs, ..self.tensors(inputs, None, 0) }
    }

    #[track_caller]
    fn launch_loop(&self, launch: LoopLaunch<'_>) -> Result<()> {
        let LoopLaunch { operation, run, inputs, outputs } = launch;
        self.launch(operation, run, &self.loop_tensors(&inputs, &outputs))
    }
}

impl NetworkFleet<'_> {
    /// Forward passes of the first `inputs.len()` networks; see [`Network::forward`]. Returns the
    /// outputs of each, `[N, outputs]`.
    ///
    /// # Errors
    /// As [`NetworkFleet::train_step`], and memory.
    #[track_caller]
    pub fn forward(&mut self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        self.check("forward", "inputs", inputs.len(), 0..=self.len())?;
        let pairs = self.networks.iter().zip(inputs);
        let batches: Vec<usize> = pairs
            .map(|(network, inputs)| network.check_inputs("forward", inputs))
            .collect::<Result<_>>()?;
        let pairs = self.networks.iter_mut().zip(&batches);
        let plans: Vec<Arc<Plan>> =
            pairs.map(|(network, &batch)| network.forward_plan(batch)).collect::<Result<_>>()?;
        let outputs = self.new_outputs(&batches)?;
        let launches = inputs.iter().zip(&outputs).zip(&plans);
        let launches = launches.map(|((inputs, outputs), plan)| LoopLaunch {
            operation: "forward",
            run: LaunchSteps::from_plan(plan, Phase::Forward..=Phase::Forward),
            inputs: vec![inputs],
            outputs: vec![outputs],
        });
        self.run_loop(launches.collect())?;
        for ((network, inputs), plan) in self.networks.iter_mut().zip(inputs).zip(plans) {
            network.own_loop.pass = Some(KeptPass { plan, inputs: (*inputs).clone() });
        }
        Ok(outputs)
    }

    /// Backward passes of the first `gradients.len()` networks; see [`Network::backward`].
    ///
    /// # Errors
    /// As [`NetworkFleet::train_step`], and [`Network::backward`].
    #[track_caller]
    pub fn backward(&mut self, gradients: &[&Tensor]) -> Result<()> {
        self.check("backward", "gradients", gradients.len(), 0..=self.len())?;
        let pairs = self.networks.iter().zip(gradients);
        let passes: Vec<&KeptPass> =
            pairs.map(|(network, gradient)| network.due_pass(gradient)).collect::<Result<_>>()?;
        let launches = passes.iter().zip(gradients).map(|(pass, gradient)| LoopLaunch {
            operation: "backward",
            run: LaunchSteps::from_plan(&pass.plan, Phase::Backward..=Phase::Backward),
            inputs: vec![&pass.inputs, gradient],
            outputs: vec![],
        });
        self.run_loop(launches.collect())?;
        for network in self.networks.iter_mut().take(gradients.len()) {
            let pass = network.own_loop.pass.take();
            network.own_loop.gradient = pass.map(|pass| pass.plan);
        }
        Ok(())
    }

    /// Updates of all networks; see [`Network::update`].
    ///
    /// # Errors
    /// As [`Network::update`]: no network was updated, or a stream failed.
    #[track_caller]
    pub fn update(&mut self) -> Result<()> {
        if !self.networks.iter().all(|network| network.has_gradient()) {
            return Err(missing("update", "a gradient of every network, from `backward`"));
        }
        let plans = self.networks.iter_mut().map(|network| network.update_plan());
        let plans: Vec<Arc<Plan>> = plans.collect::<Result<_>>()?;
        let launches = plans.iter().map(|plan| LoopLaunch {
            operation: "update",
            run: LaunchSteps::from_plan(plan, Phase::Measure..=Phase::Update),
            inputs: vec![],
            outputs: vec![],
        });
        self.run_loop(launches.collect())?;
        self.networks.iter_mut().for_each(|network| network.drop_gradient());
        Ok(())
    }

    /// Outputs `[N, outputs]` of batches of the first `inputs.len()` networks in evaluation mode,
    /// with row `config` of the alphas; see [`Network::infer`]. New tensors; waits for nothing.
    ///
    /// # Errors
    /// As [`NetworkFleet::train_step`], and [`Network::infer`].
    #[track_caller]
    pub fn infer(&mut self, inputs: &[&Tensor], config: usize) -> Result<Vec<Tensor>> {
        self.check("infer", "inputs", inputs.len(), 0..=self.len())?;
        let pairs = self.networks.iter_mut().zip(inputs);
        let passes = pairs.map(|(network, inputs)| network.inference(inputs, config));
        let passes: Vec<_> = passes.collect::<Result<_>>()?;
        let batches: Vec<usize> = inputs.iter().map(|inputs| inputs.dims()[0]).collect();
        let outputs = self.new_outputs(&batches)?;
        let to: Vec<&Tensor> = outputs.iter().collect();
        let mut launches = Launches::default();
        for (((network, inputs), pass), output) in
            self.networks.iter().zip(inputs).zip(passes).zip(&to)
        {
            let [inputs, outputs] = [inputs, output].map(std::slice::from_ref);
            let tensors = LaunchTensors { outputs, ..network.tensors(inputs, None, config) };
            let at = (&network.stream, "infer");
            pass.run.add(&mut launches, at, network.options.isa, &tensors)?;
        }
        launches.run()?;
        Ok(outputs)
    }

    /// New tensors for the outputs of batches of the first networks.
    fn new_outputs(&self, batches: &[usize]) -> Result<Vec<Tensor>> {
        let pairs = self.networks.iter().zip(batches);
        let new = |(network, &batch): (&&mut Network, &usize)| {
            let shape = [batch, network.graph().classes()];
            Ok(Tensor::empty(&network.stream, shape, DType::F32, Owner::Other)?)
        };
        pairs.map(new).collect()
    }

    /// Launches a part of the loop on the first networks.
    #[track_caller]
    fn run_loop(&self, parts: Vec<LoopLaunch<'_>>) -> Result<()> {
        let mut launches = Launches::default();
        for (network, LoopLaunch { operation, run, inputs, outputs }) in
            self.networks.iter().zip(&parts)
        {
            let tensors = network.loop_tensors(inputs, outputs);
            let at = (&network.stream, *operation);
            run.clone().add(&mut launches, at, network.options.isa, &tensors)?;
        }
        Ok(launches.run()?)
    }
}

/// Location of the gradient of each group that has one.
fn group_gradients(plan: &Plan) -> Vec<SpaceSpan> {
    let groups = (0..plan.layout().groups.len()).filter_map(|group| plan.group_gradient(group));
    groups.map(|at| SpaceSpan::new(Space::Arena, DType::F32, at.start, at.len())).collect()
}

fn missing(operation: &'static str, expected: &'static str) -> Error {
    Error::argument(operation, "state", expected, "none")
}

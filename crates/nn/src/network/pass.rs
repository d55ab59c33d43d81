//! Passes of a network over batches: training, evaluation, inference. Each is one launch.

use std::ops::Range;
use std::sync::Arc;

use meristem_device::{DType, Expect, Extent, Launches, Owner, PlannedLaunch, Tensor};

use super::plans::RowPlan;
use super::run::{Arena, LaunchSteps, LaunchTensors};
use super::{LabelledBatch, Network};
use crate::error::{Error, Result};
use crate::ops::PlanTarget;
use crate::plan::{self, AlphaPattern, Phase, Plan, PlanMode, PlanStep};

/// Inputs and targets of a launch; an observation has no targets.
pub(super) type BatchTensors<'a> = (&'a [&'a Tensor], Option<&'a Tensor>);

/// A launch over a batch.
pub(super) struct BatchLaunch {
    pub(super) operation: &'static str,
    pub(super) run: LaunchSteps,
    /// First row of the alphas and scores.
    pub(super) config: usize,
    /// Whether dropout layers of a training plan drop elements.
    pub(super) drops: bool,
}

impl Network {
    /// Compiles the training plan of this batch size ahead, and makes the arena large enough for
    /// it: a training step of that size then only launches. On a CUDA device the first step also
    /// builds a graph, unless
    /// [`NetworkFleet::prepare_training`](super::NetworkFleet::prepare_training) has built it. Does
    /// not wait for the device.
    ///
    /// # Errors
    /// [`Error::EmptyBatch`], [`Error::OneValuePerChannel`], memory.
    pub fn prepare_training(&mut self, batch: usize) -> Result<()> {
        self.plan(batch, PlanMode::Train).map(drop)
    }

    /// One step of training: forward with row 0 of the alphas, mean [`Loss`](crate::Loss),
    /// backward, clipping and the optimiser's step per group, metrics. `inputs` is f32 (N, C, H,
    /// W), channels last, or f32 `[N, C]` if the graph takes vectors; `targets` is u32 `[N]` or f32
    /// `[N, outputs]`, as the loss says; both on this network's stream. Any N up to `batch_max`:
    /// the first batch of a new size compiles a plan, and on a CUDA device builds a graph; all
    /// others only launch. Waits for nothing.
    ///
    /// # Errors
    /// [`meristem_device::Error::Mismatch`] for a tensor of another form or stream;
    /// [`Error::OneValuePerChannel`], a failed stream.
    #[track_caller]
    pub fn train_step(&mut self, inputs: &Tensor, targets: &Tensor) -> Result<()> {
        let pass = self.training((inputs, targets))?;
        self.launch_batch(pass, (&[inputs], Some(targets)))
    }

    /// The launch of a training step over this batch. Checks the batch, and compiles the plan and
    /// enlarges the arena if necessary.
    pub(super) fn training(&mut self, (inputs, targets): LabelledBatch<'_>) -> Result<BatchLaunch> {
        let batch = self.check_batch("train_step", inputs, targets)?;
        self.training_of(batch)
    }

    /// The launch of a training step over `batch` samples, as [`Network::training`].
    pub(super) fn training_of(&mut self, batch: usize) -> Result<BatchLaunch> {
        let plan = self.plan(batch, PlanMode::Train)?;
        let run = LaunchSteps::from_plan(&plan, Phase::Forward..=Phase::Update);
        Ok(BatchLaunch { operation: "train_step", run, config: 0, drops: true })
    }

    /// Evaluates a batch with row `config` of the alphas: loss and score are added to that row of
    /// the metrics; parameters and buffers stay as they are. Tensors as for
    /// [`Network::train_step`]. Waits for nothing.
    ///
    /// # Errors
    /// As [`Network::train_step`], and [`Error::Argument`] for `config`.
    #[track_caller]
    pub fn eval_step(&mut self, inputs: &Tensor, targets: &Tensor, config: usize) -> Result<()> {
        let batch = self.check_batch("eval_step", inputs, targets)?;
        self.check_config("eval_step", config)?;
        let plan = self.plan(batch, PlanMode::Evaluate)?;
        let run = LaunchSteps::from_plan(&plan, Phase::Forward..=Phase::Backward);
        self.launch("eval_step", run, &self.tensors(&[inputs], Some(targets), config))
    }

    /// Evaluates a batch with all of these rows of the alphas in one launch: loss and score of each
    /// are added to its row of the metrics, equal bit for bit to one [`Network::eval_step`] a row.
    /// Layers before the first slot in which rows differ are computed once, and a module only for
    /// rows in which its alpha is not 0. The first batch of a new size, or after the
    /// alphas got another pattern of zeros and equal values, compiles a plan. Tensors as for
    /// [`Network::train_step`]. Waits for nothing.
    ///
    /// # Errors
    /// As [`Network::eval_step`], and memory.
    #[track_caller]
    pub fn eval_rows(
        &mut self,
        inputs: &Tensor,
        targets: &Tensor,
        configs: Range<usize>,
    ) -> Result<()> {
        let pass = self.evaluation((inputs, targets), &configs)?;
        self.launch_batch(pass, (&[inputs], Some(targets)))
    }

    /// The launch of an evaluation of this batch with these rows of the alphas. Checks the batch,
    /// and compiles the plan and enlarges the arena if necessary.
    pub(super) fn evaluation(
        &mut self,
        (inputs, targets): LabelledBatch<'_>,
        configs: &Range<usize>,
    ) -> Result<BatchLaunch> {
        let batch = self.check_batch("eval_rows", inputs, targets)?;
        self.evaluation_of(batch, configs)
    }

    /// The launch of an evaluation of `batch` samples, as [`Network::evaluation`].
    pub(super) fn evaluation_of(
        &mut self,
        batch: usize,
        configs: &Range<usize>,
    ) -> Result<BatchLaunch> {
        let pattern = self.pattern("eval_rows", configs)?;
        let options = self.options.plan(
            batch,
            PlanMode::Evaluate,
            PlanTarget::for_device(self.stream.device()),
        );
        let plan = self.topology.rows(RowPlan { options, pattern })?;
        self.make_room(&plan)?;
        let run = LaunchSteps::from_plan(&plan, Phase::Forward..=Phase::Backward);
        Ok(BatchLaunch { operation: "eval_rows", run, config: configs.start, drops: false })
    }

    /// Floating-point operations per sample ([`Graph::flops`](crate::graph::Graph::flops)) of one
    /// [`Network::eval_rows`] of these rows, and of one [`Network::eval_step`]. Does not access the
    /// device.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub fn eval_flops(&self, configs: Range<usize>) -> Result<(u64, u64)> {
        let pattern = self.pattern("eval_flops", &configs)?;
        let graph = self.graph();
        let one = AlphaPattern::all_on(graph.alphas);
        Ok((plan::flops(graph, &pattern), plan::flops(graph, &one)))
    }

    /// The pattern of these rows of the alphas.
    fn pattern(&self, operation: &'static str, configs: &Range<usize>) -> Result<AlphaPattern> {
        let (slots, most) = (self.graph().alphas, self.options.configs);
        if configs.is_empty() || configs.end > most {
            let expected = format!("a range that is not empty and ends at most at {most}");
            return Err(Error::argument(operation, "configs", expected, format!("{configs:?}")));
        }
        let table = &self.alpha_values[configs.start * slots..configs.end * slots];
        Ok(AlphaPattern::from_table(table, configs.len()))
    }

    /// Logits `[N, classes]` of a batch in evaluation mode, with row `config` of the alphas. A new
    /// tensor; waits for nothing.
    ///
    /// # Errors
    /// As [`Network::eval_step`], and memory.
    #[track_caller]
    pub fn infer(&mut self, inputs: &Tensor, config: usize) -> Result<Tensor> {
        let BatchLaunch { operation, run, .. } = self.inference(inputs, config)?;
        let shape = [inputs.dims()[0], self.graph().classes()];
        let logits = Tensor::empty(&self.stream, shape, DType::F32, Owner::Other)?;
        let inputs = [inputs];
        let tensors = LaunchTensors { outputs: &[&logits], ..self.tensors(&inputs, None, config) };
        self.launch(operation, run, &tensors)?;
        Ok(logits)
    }

    /// The launch of an inference of this batch with this row of the alphas. Checks the batch, and
    /// compiles the plan and enlarges the arena if necessary.
    pub(super) fn inference(&mut self, inputs: &Tensor, config: usize) -> Result<BatchLaunch> {
        let batch = self.check_inputs("infer", inputs)?;
        self.check_config("infer", config)?;
        let plan = self.plan(batch, PlanMode::Infer)?;
        let run = LaunchSteps::from_plan(&plan, Phase::Forward..=Phase::Deliver);
        Ok(BatchLaunch { operation: "infer", run, config, drops: false })
    }

    /// This network's tensors, the tensors of a batch, and the rows of alphas and scores from
    /// `config` on.
    pub(super) fn tensors<'a>(
        &'a self,
        inputs: &'a [&'a Tensor],
        targets: Option<&'a Tensor>,
        config: usize,
    ) -> LaunchTensors<'a> {
        LaunchTensors {
            arena: Some(self.arena.of_a_launch()),
            groups: &self.groups,
            metrics: Some(&self.metrics),
            scores_start: self.metrics_layout.scores_of(config),
            inputs,
            targets,
            class_weights: self.class_weights.as_ref(),
            hyperparameters: Some(&self.hyperparameters),
            step_factors: self.step_factors.as_ref(),
            alphas: Some(&self.alphas),
            alphas_start: config * self.graph().alphas,
            outputs: &[],
        }
    }

    #[track_caller]
    pub(super) fn launch(
        &self,
        operation: &'static str,
        run: LaunchSteps,
        tensors: &LaunchTensors<'_>,
    ) -> Result<()> {
        run.launch((&self.stream, operation), self.options.isa, tensors)
    }

    /// Launches a pass over a batch.
    #[track_caller]
    pub(super) fn launch_batch(&self, pass: BatchLaunch, batch: BatchTensors<'_>) -> Result<()> {
        let tensors = self.pass_tensors(&pass, batch);
        self.launch(pass.operation, pass.run, &tensors)
    }

    /// As [`Network::tensors`], for a pass over a batch.
    fn pass_tensors<'a>(
        &'a self,
        pass: &BatchLaunch,
        (inputs, targets): BatchTensors<'a>,
    ) -> LaunchTensors<'a> {
        let numbers = if pass.drops { &self.hyperparameters } else { &self.without_dropout };
        let tensors = self.tensors(inputs, targets, pass.config);
        LaunchTensors { hyperparameters: Some(numbers), ..tensors }
    }

    /// The pass as a planned launch, without the tensors of a batch.
    pub(super) fn ahead(&self, pass: BatchLaunch) -> PlannedLaunch<'_> {
        let (program, arguments) = pass.run.ahead(&self.pass_tensors(&pass, (&[], None)));
        let operation = pass.operation;
        PlannedLaunch { stream: &self.stream, operation, program, arguments }
    }

    /// Adds a pass over a batch to the launches of other networks.
    #[track_caller]
    pub(super) fn add<'a>(
        &'a self,
        to: &mut Launches<'a>,
        pass: BatchLaunch,
        batch: BatchTensors<'a>,
    ) -> Result<()> {
        let tensors = self.pass_tensors(&pass, batch);
        pass.run.add(to, (&self.stream, pass.operation), self.options.isa, &tensors)
    }

    /// Like [`Network::tensors`], for a launch that keeps the arena's contents, or uses contents
    /// that the previous launch kept.
    pub(super) fn kept_tensors<'a>(
        &'a self,
        inputs: &'a [&'a Tensor],
        targets: Option<&'a Tensor>,
    ) -> LaunchTensors<'a> {
        LaunchTensors {
            arena: Some(Arena::Kept(&self.arena.kept)),
            ..self.tensors(inputs, targets, 0)
        }
    }

    /// Launches steps that use nothing of a batch.
    #[track_caller]
    pub(super) fn launch_steps(&self, operation: &'static str, steps: Vec<PlanStep>) -> Result<()> {
        self.launch(operation, LaunchSteps::steps(steps), &self.kept_tensors(&[], None))
    }

    pub(super) fn plan(&mut self, batch: usize, mode: PlanMode) -> Result<Arc<Plan>> {
        let options = self.options.plan(batch, mode, PlanTarget::for_device(self.stream.device()));
        let plan = self.topology.plan(options)?;
        self.make_room(&plan)?;
        Ok(plan)
    }

    /// Makes the arena large enough for a plan.
    fn make_room(&mut self, plan: &Plan) -> Result<()> {
        self.gradient = None;
        self.arena.make_room(&self.stream, plan.arena_len())
    }

    /// Checks a batch of images, or of vectors if the graph takes vectors; returns its size.
    pub(super) fn check_inputs(&self, operation: &'static str, inputs: &Tensor) -> Result<usize> {
        let d = self.graph().input_dims();
        let batch = Extent::Between(1, self.options.batch_max);
        let expect = Expect::stream(&self.stream).dtype(DType::F32);
        let expect = if inputs.dims().len() == 2 && d.h * d.w == 1 {
            expect.shape([batch, d.c.into()]).contiguous()
        } else {
            expect.shape([batch, d.c.into(), d.h.into(), d.w.into()]).channels_last()
        };
        expect.check(operation, "inputs", inputs)?;
        Ok(inputs.dims().first().copied().unwrap_or(0))
    }

    /// Checks a labelled batch; returns its size.
    pub(super) fn check_batch(
        &self,
        operation: &'static str,
        inputs: &Tensor,
        targets: &Tensor,
    ) -> Result<usize> {
        let batch = self.check_inputs(operation, inputs)?;
        let dtype = self.options.loss.target_dtype();
        let expect = Expect::stream(&self.stream).dtype(dtype);
        let expect = if dtype == DType::U32 {
            expect.shape([batch])
        } else {
            expect.shape([batch, self.graph().classes()])
        };
        expect.contiguous().check(operation, "targets", targets)?;
        Ok(batch)
    }

    fn check_config(&self, operation: &'static str, config: usize) -> Result<()> {
        let configs = self.options.configs;
        if config >= configs {
            return Err(Error::argument(operation, "config", format!("below {configs}"), config));
        }
        Ok(())
    }
}

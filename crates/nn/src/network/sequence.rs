//! A network over sequences: recurrent, of several inputs, trained as a policy. The
//! controller's policy is one.
//!
//! One set of parameters, any number of plans: a single step of many sequences, or whole sequences.
//! Forward runs and training have an arena each, so that a gradient survives forward runs.

use std::sync::Arc;

use meristem_device::{DType, Expect, Owner, Stream, Tensor};

use super::gradient;
use super::groups::{self, GroupTensors};
use super::growth::{self, Fresh};
use super::plans::Recent;
use super::run::{Arena, LaunchSteps, LaunchTensors};
use super::state::GraphWeights;
use crate::error::{Error, Result};
use crate::graph::{DrawSource, Graph, Node, NodeOp};
use crate::kernels::Isa;
use crate::kernels::ppo::PpoLoss;
use crate::kernels::sample::{SampleStep, Sampler};
use crate::metrics::MetricsLayout;
use crate::ops::ppo::PpoPass;
use crate::ops::{PlanTarget, StateOp, gpu};
use crate::plan::{Phase, Plan, PlanMode, PlanOptions, PlanStep};
use crate::precision::{Precision, ValueType};
use crate::state::StateDict;

/// Largest number of plans that are kept. There are plans for a single step and for whole
/// sequences, each for a few numbers of rows; whole sequences have a plan for each of two passes.
const PLANS_MAX: usize = 12;

/// Options of a sequence network, without its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceOptions {
    /// Seed of the initial weights, and of the masks of dropout.
    pub seed: u64,
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// Owner of its memory in the device's report.
    pub owner: Owner,
    /// Element type of values in the memory of a CUDA device. If it is bf16, so are the factors of
    /// products. A processor has f32 only and ignores it.
    pub values: ValueType,
}

/// The inputs of a run: rows are `[steps][sequences]`.
#[derive(Clone, Copy, Debug)]
pub struct SequenceRun<'a> {
    /// Steps of every sequence.
    pub steps: usize,
    /// In the graph's order: f32 `[rows, features]` for an input (`[rows]` will do for one
    /// feature), u32 `[rows, count]` for indices, f32 `[sequences, 2·hidden]` for an LSTM's state.
    pub inputs: &'a [&'a Tensor],
}

/// A draw of actions from the output of each row: see [`Sampler`].
#[derive(Clone, Copy, Debug)]
pub struct SequenceDraw<'a> {
    /// Rules of the draw.
    pub sampler: &'a Arc<Sampler>,
    /// Legality, u32 `[rows, places · words]`, see [`Sampler::words`]; [`SampleStep`], u32 `[4]`.
    pub from: [&'a Tensor; 2],
    /// Choices, u32 `[rows, heads]`; masks, u8 `[rows, logits]`; log-probabilities and entropies,
    /// f32 `[rows, heads]`; values, f32 `[rows]`.
    pub to: [&'a Tensor; 5],
    /// Copies of the inputs that have one row for each step of each sequence (all except states),
    /// in the graph's order.
    pub seen: &'a [&'a Tensor],
}

/// A graph over sequences with its parameters and optimiser, on one stream.
#[derive(Debug)]
pub struct SequenceNetwork {
    stream: Stream,
    graph: Arc<Graph>,
    options: SequenceOptions,
    groups: Vec<GroupTensors>,
    plans: Recent<PlanOptions>,
    /// Memory of forward runs, and of training: a gradient survives forward runs.
    arenas: [Tensor; 2],
    /// Plan of the last gradient, which is in the second arena.
    gradient: Option<Arc<Plan>>,
    metrics: Tensor,
    /// Numbers of the optimisers, then of the dropout layers.
    hyperparameters: Tensor,
}

impl SequenceNetwork {
    /// A network with fresh parameters. Waits as [`Network::new`](super::Network::new).
    ///
    /// # Errors
    /// [`Error::Argument`] for a graph with alphas; memory.
    pub fn new(stream: &Stream, graph: Arc<Graph>, options: SequenceOptions) -> Result<Self> {
        if graph.alphas > 0 {
            let expected = "a graph without alphas";
            let got = format!("one with {} alphas", graph.alphas);
            return Err(Error::argument("SequenceNetwork::new", "graph", expected, got));
        }
        stream.device().load_kernels(&gpu::sources(&graph, options.values.precision()))?;
        let fresh = Fresh { seed: options.seed, env: 0, owner: options.owner };
        let groups = growth::build(stream, &graph, None, fresh)?;
        let draws = DrawSource { seed: options.seed, env: 0, first_sample: 0 };
        let hyperparameters = groups::hyperparameters(stream, &graph, draws, options.owner)?;
        let groups_len = graph.groups.len();
        let metrics_layout =
            MetricsLayout { groups: groups_len, configs: 0, log: 0, score_sums: false };
        let metrics = Tensor::zeros(stream, [metrics_layout.len()], DType::F64, options.owner)?;
        let arena = || Tensor::empty(stream, [0], DType::F32, options.owner);
        let network = Self {
            arenas: [arena()?, arena()?],
            stream: stream.clone(),
            graph,
            options,
            groups,
            plans: Recent::default(),
            gradient: None,
            metrics,
            hyperparameters,
        };
        let reset = StateOp::ResetMetrics(metrics_layout);
        let reset = LaunchSteps::steps(vec![PlanStep::new(reset, &[], &[metrics_layout.span()])]);
        network.launch("reset_metrics", reset, &network.tensors(true))?;
        Ok(network)
    }

    /// Runs forward: the value of every row goes to `output` `[rows, features]`, the state after
    /// the last step to `states`, one `[sequences, 2·hidden]` per LSTM. None of them may be an
    /// input. The first run of a new size compiles a plan and allocates its memory; later runs only
    /// launch. Waits for nothing.
    ///
    /// # Errors
    /// [`Error::Argument`]; [`meristem_device::Error::Mismatch`] for a tensor of another form or
    /// stream; memory, a failed stream.
    pub fn forward(
        &mut self,
        run: &SequenceRun<'_>,
        output: &Tensor,
        states: &[&Tensor],
    ) -> Result<()> {
        let rows = self.check_inputs("forward", run)?;
        let features = self.graph.classes();
        check(&self.stream, ("forward", "output"), output, DType::F32, [rows, features])?;
        let plan = self.plan(rows, run.steps, PlanMode::Infer)?;
        self.check_states("forward", &plan, states)?;
        let outputs: Vec<&Tensor> = std::iter::once(output).chain(states.iter().copied()).collect();
        let tensors =
            LaunchTensors { inputs: run.inputs, outputs: &outputs, ..self.tensors(false) };
        self.launch(
            "forward",
            LaunchSteps::from_plan(&plan, Phase::Forward..=Phase::Deliver),
            &tensors,
        )
    }

    /// Runs forward, draws an action for every row from the output, and copies the inputs; the
    /// state after the last step goes to `states`, as in [`SequenceNetwork::forward`]. One launch,
    /// which waits for nothing; a new size or sampler compiles a plan.
    ///
    /// # Errors
    /// As [`SequenceNetwork::forward`].
    pub fn act(
        &mut self,
        run: &SequenceRun<'_>,
        draw: &SequenceDraw<'_>,
        states: &[&Tensor],
    ) -> Result<()> {
        let rows = self.check_inputs("act", run)?;
        self.check_draw(run, draw, rows)?;
        let plan = self.plan(rows, run.steps, PlanMode::Draw(Arc::clone(draw.sampler)))?;
        self.check_states("act", &plan, states)?;
        let inputs: Vec<&Tensor> = run.inputs.iter().chain(&draw.from).copied().collect();
        let outputs: Vec<&Tensor> =
            draw.to.iter().chain(states).chain(draw.seen).copied().collect();
        let tensors = LaunchTensors { inputs: &inputs, outputs: &outputs, ..self.tensors(false) };
        self.launch("act", LaunchSteps::from_plan(&plan, Phase::Forward..=Phase::Deliver), &tensors)
    }

    /// Runs forward, the loss of proximal policy optimisation, backward, and measures the gradient
    /// ([`SequenceNetwork::metrics`]); the parameters stay as they are. One launch, which waits for
    /// nothing; a new size compiles a plan.
    ///
    /// `data` are the inputs of the loss, without the network's output; `results` are its outputs;
    /// see [`ops::ppo`](crate::ops::ppo).
    ///
    /// # Errors
    /// As [`SequenceNetwork::forward`]; [`Error::PlanMemory`] for data or results that are missing,
    /// or of another type or number of elements.
    pub fn differentiate(
        &mut self,
        run: &SequenceRun<'_>,
        loss: &Arc<PpoLoss>,
        pass: PpoPass,
        data: &[&Tensor],
        results: &[&Tensor],
    ) -> Result<()> {
        let rows = self.check_inputs("differentiate", run)?;
        self.gradient = None;
        let plan =
            self.plan(rows, run.steps, PlanMode::TrainPolicy { loss: Arc::clone(loss), pass })?;
        let inputs: Vec<&Tensor> = run.inputs.iter().chain(data).copied().collect();
        let tensors = LaunchTensors { inputs: &inputs, outputs: results, ..self.tensors(true) };
        self.launch(
            "differentiate",
            LaunchSteps::from_plan(&plan, Phase::Forward..=Phase::Measure),
            &tensors,
        )?;
        self.gradient = Some(plan);
        Ok(())
    }

    /// This network's tensors, with the arena of forward runs or of training.
    fn tensors(&self, training: bool) -> LaunchTensors<'_> {
        LaunchTensors {
            arena: Some(Arena::Kept(&self.arenas[usize::from(training)])),
            groups: &self.groups,
            metrics: Some(&self.metrics),
            hyperparameters: Some(&self.hyperparameters),
            ..LaunchTensors::default()
        }
    }

    #[track_caller]
    fn launch(
        &self,
        operation: &'static str,
        run: LaunchSteps,
        tensors: &LaunchTensors<'_>,
    ) -> Result<()> {
        run.launch((&self.stream, operation), self.options.isa, tensors)
    }

    /// Norm of the last gradient before clipping, as `last_norm` of each group of
    /// [`Metrics::parse`](crate::Metrics::parse), f64 on the device. The other figures add up over
    /// every time that a gradient was measured, and mean nothing here.
    pub fn metrics(&self) -> &Tensor {
        &self.metrics
    }

    /// The last gradients with the names of their parameters, for every parameter that a gradient
    /// reaches: views of the arena, f32, flat, before clipping. Launches of this stream may
    /// overwrite them with sums over ranks; [`SequenceNetwork::measure`] comes after that, then
    /// [`SequenceNetwork::apply`].
    ///
    /// # Errors
    /// [`Error::Argument`] without a gradient.
    pub fn gradients(&self) -> Result<Vec<(&str, Tensor)>> {
        let plan = self.gradient.as_ref().ok_or_else(|| missing("gradients"))?;
        gradient::views(&self.graph, plan, &self.arenas[1])
    }

    /// Recomputes the norm of the last gradient after the gradient was overwritten. Waits for
    /// nothing.
    ///
    /// # Errors
    /// As [`SequenceNetwork::gradients`].
    pub fn measure(&mut self) -> Result<()> {
        let plan = self.gradient.as_ref().ok_or_else(|| missing("measure"))?;
        let run = LaunchSteps::from_plan(plan, Phase::Measure..=Phase::Measure);
        self.launch("gradient norms", run, &self.tensors(true))
    }

    /// Clips the last gradient, group by group, and takes one optimiser step with it. Waits for
    /// nothing. A gradient that is not finite makes the parameters NaN or infinite: read
    /// [`SequenceNetwork::metrics`] first.
    ///
    /// # Errors
    /// [`Error::Argument`] without a gradient, a failed stream.
    pub fn apply(&mut self) -> Result<()> {
        let plan = self.gradient.take().ok_or_else(|| missing("apply"))?;
        let run = LaunchSteps::from_plan(&plan, Phase::Update..=Phase::Update);
        self.launch("apply", run, &self.tensors(true))
    }

    /// The last gradient of every parameter, under its name and in its shape, before clipping; zero
    /// where none arrived. One read-back, which waits for the device.
    ///
    /// # Errors
    /// [`Error::Argument`] without a gradient, a failed stream.
    pub fn gradient_dict(&self) -> Result<StateDict> {
        let plan = self.gradient.as_ref().ok_or_else(|| missing("gradient_dict"))?;
        gradient::read(&self.graph, &gradient::views(&self.graph, plan, &self.arenas[1])?)
    }

    /// Parameters and buffers. One read-back, which waits for the device.
    ///
    /// # Errors
    /// A failed stream.
    pub fn state_dict(&self) -> Result<StateDict> {
        self.weights().parameters()?.read_back()
    }

    /// Sets parameters and buffers, all or nothing, strict. Waits as
    /// [`Network::load_state_dict`](super::Network::load_state_dict).
    ///
    /// # Errors
    /// [`StateError`](crate::StateError) lists every tensor that does not fit.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        self.weights().parameters()?.load(state, true)
    }

    /// State of the optimisers; see [`Network::momentum_dict`](super::Network::momentum_dict).
    ///
    /// # Errors
    /// A failed stream.
    pub fn momentum_dict(&self) -> Result<StateDict> {
        self.weights().moments()?.read_back()
    }

    /// Sets the state of the optimisers, also of earlier versions, and waits as
    /// [`Network::load_momentum_dict`](super::Network::load_momentum_dict).
    ///
    /// # Errors
    /// As [`SequenceNetwork::load_state_dict`].
    pub fn load_momentum_dict(&mut self, state: &StateDict) -> Result<()> {
        self.weights().load_moments(state)
    }

    /// The graph that it computes.
    pub fn graph(&self) -> &Arc<Graph> {
        &self.graph
    }

    /// The stream that it belongs to.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    fn weights(&self) -> GraphWeights<'_> {
        GraphWeights { graph: &self.graph, groups: &self.groups }
    }

    fn input_nodes(&self) -> impl Iterator<Item = &Node> {
        self.graph.nodes.iter().filter(|node| node.op.input().is_some())
    }

    /// Checks the inputs of a run, and returns its number of rows.
    fn check_inputs(&self, operation: &'static str, run: &SequenceRun<'_>) -> Result<usize> {
        let expected = self.graph.inputs();
        if run.inputs.len() != expected {
            let expected = format!("{expected} tensors");
            return Err(Error::argument(operation, "inputs", expected, run.inputs.len()));
        }
        let rows = run.inputs[0].dims().first().copied().unwrap_or(0);
        if run.steps == 0 || rows == 0 || !rows.is_multiple_of(run.steps) {
            let expected = "at least 1 and a divisor of the rows";
            let got = format!("{} for {rows} rows", run.steps);
            return Err(Error::argument(operation, "steps", expected, got));
        }
        for (node, input) in self.input_nodes().zip(run.inputs) {
            let (dtype, rows) = match node.op {
                NodeOp::State(_) => (DType::F32, rows / run.steps),
                NodeOp::Indices(_) => (DType::U32, rows),
                _ => (DType::F32, rows),
            };
            let shape = [rows, node.dims.numel()];
            check(&self.stream, (operation, "inputs"), input, dtype, shape)?;
        }
        Ok(rows)
    }

    /// One tensor for each state that a plan leaves.
    fn check_states(&self, operation: &'static str, plan: &Plan, states: &[&Tensor]) -> Result<()> {
        let (spans, sequences) = (plan.last_states(), plan.options().sequences());
        if spans.len() != states.len() {
            let expected = format!("one tensor for each of {} LSTMs", spans.len());
            return Err(Error::argument(operation, "states", expected, states.len()));
        }
        for (span, state) in spans.iter().zip(states) {
            let shape = [sequences, span.len / sequences];
            check(&self.stream, (operation, "states"), state, DType::F32, shape)?;
        }
        Ok(())
    }

    /// The tensors of a draw are as they should be.
    fn check_draw(
        &self,
        run: &SequenceRun<'_>,
        draw: &SequenceDraw<'_>,
        rows: usize,
    ) -> Result<()> {
        let SequenceDraw { sampler, from, to, seen } = draw;
        let (heads, logits) = (sampler.heads.len(), sampler.logits());
        if logits + 1 != self.graph.classes() {
            let expected = format!("heads with {} logits", self.graph.classes() - 1);
            return Err(Error::argument("act", "sampler", expected, logits));
        }
        let ops = sampler.heads.first().map_or(0, |head| head.choices);
        if heads < 2 || ops > SampleStep::OPS_MAX {
            let expected = format!("two heads or more, and at most {} ops", SampleStep::OPS_MAX);
            let got = format!("{heads} heads, {ops} ops");
            return Err(Error::argument("act", "sampler", expected, got));
        }
        let forms = [
            (from[0], "legality", DType::U32, [rows, sampler.places() * sampler.words()]),
            (from[1], "step", DType::U32, [SampleStep::WORDS, 1]),
            (to[0], "choices", DType::U32, [rows, heads]),
            (to[1], "legal", DType::U8, [rows, logits]),
            (to[2], "log_probs", DType::F32, [rows, heads]),
            (to[3], "entropies", DType::F32, [rows, heads]),
            (to[4], "values", DType::F32, [rows, 1]),
        ];
        for (tensor, name, dtype, shape) in forms {
            check(&self.stream, ("act", name), tensor, dtype, shape)?;
        }
        let nodes = self.input_nodes().zip(run.inputs);
        let like: Vec<_> = nodes.filter(|(node, _)| !matches!(node.op, NodeOp::State(_))).collect();
        if like.len() != seen.len() {
            let expected = format!("a copy of each of {} inputs", like.len());
            return Err(Error::argument("act", "seen", expected, seen.len()));
        }
        for (to, (node, from)) in seen.iter().zip(like) {
            let shape = [rows, node.dims.numel()];
            check(&self.stream, ("act", "seen"), to, from.dtype(), shape)?;
        }
        Ok(())
    }

    /// The plan of `batch` rows, which are sequences of `steps` steps; the arena grows if it is too
    /// small.
    fn plan(&mut self, batch: usize, steps: usize, mode: PlanMode) -> Result<Arc<Plan>> {
        let arena = &mut self.arenas[usize::from(mode.is_training())];
        let target = PlanTarget::for_device(self.stream.device());
        let precision = match target {
            PlanTarget::Cpu => Precision::F32,
            PlanTarget::Cuda => self.options.values.precision(),
        };
        let options = PlanOptions { steps, target, precision, ..PlanOptions::new(batch, mode) };
        let plan = self
            .plans
            .plan(options, PLANS_MAX, |options| Plan::compile(&self.graph, options.clone()))?;
        if plan.arena_len() > arena.numel() {
            let shape = [plan.arena_len()];
            *arena = Tensor::empty(&self.stream, shape, DType::F32, self.options.owner)?;
        }
        Ok(plan)
    }
}

fn missing(operation: &'static str) -> Error {
    let expected = "a gradient, from `differentiate`, that was not used before";
    Error::argument(operation, "gradient", expected, "none")
}

/// Checks stream, element type and shape; one column may be left out of the shape.
fn check(
    stream: &Stream,
    (operation, name): (&'static str, &'static str),
    tensor: &Tensor,
    dtype: DType,
    shape: [usize; 2],
) -> Result<()> {
    let expect = Expect::stream(stream).dtype(dtype).contiguous();
    let expect = if shape[1] == 1 && tensor.dims().len() == 1 {
        expect.shape([shape[0]])
    } else {
        expect.shape(shape)
    };
    Ok(expect.check(operation, name, tensor)?)
}

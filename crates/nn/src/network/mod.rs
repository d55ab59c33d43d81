//! A network on a stream: parameters, momentum, buffers, arena, plans and metrics of one host with
//! its modules.
//!
//! A training or evaluation step is one launch, which waits for nothing; phases of the batch's plan
//! run in it (`run`). Parameters live in one set of tensors per group, so that growing and pruning
//! a module touches no other group (`docs/growth.md`).

mod fleet;
mod gradient;
mod groups;
mod growth;
mod plans;
mod replica;
mod run;
mod sequence;
mod snapshot;
mod state;

use std::ops::Range;
use std::sync::Arc;

use meristem_device::{Ahead, DType, Expect, Extent, Launches, Owner, Stream, Tensor};

pub use self::fleet::Fleet;
use self::gradient::Gradient;
use self::groups::Group;
use self::growth::Fresh;
pub use self::plans::Plans;
use self::plans::{RowPlan, Topology};
use self::run::{Run, Tensors};
pub use self::sequence::{SequenceDraw, SequenceNetwork, SequenceOptions, SequenceRun};
pub use self::snapshot::Snapshot;
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::kernels::Isa;
use crate::metrics::MetricsLayout;
use crate::ops;
use crate::ops::Target;
use crate::plan::{self, AlphaPattern, Mode, Phase, Plan, PlanOptions, Step};
use crate::precision::Precision;

/// A batch of one network: inputs and labels, on its stream.
pub type LabelledBatch<'a> = (&'a Tensor, &'a Tensor);

/// A launch over a batch.
struct Pass {
    operation: &'static str,
    run: Run,
    /// First row of the alphas and scores.
    config: usize,
}

/// Options of a network besides its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkOptions {
    /// Seed of the initial weights.
    pub seed: u64,
    /// Number of the env, part of the key of the initial weights.
    pub env: u64,
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// The most samples of a batch.
    pub batch_max: usize,
    /// Rows of alphas and of evaluation metrics.
    pub configs: usize,
    /// Mean losses of how many last batches are kept.
    pub batch_log: usize,
    /// Precision of products, in training and evaluation alike; a processor has f32 only.
    pub precision: Precision,
}

impl NetworkOptions {
    /// With 32 configurations, a log of 1024 batches, and f32.
    pub fn new(seed: u64, env: u64, isa: Isa, batch_max: usize) -> Self {
        let precision = Precision::F32;
        Self { seed, env, isa, batch_max, configs: 32, batch_log: 1024, precision }
    }

    fn fresh(&self) -> Fresh {
        Fresh { seed: self.seed, env: self.env, owner: Owner::Parameters }
    }

    fn plan(&self, batch: usize, mode: Mode, target: Target) -> PlanOptions {
        let Self { batch_log, precision, .. } = *self;
        PlanOptions { batch_log, precision, target, ..PlanOptions::new(batch, mode) }
    }
}

/// One host with its modules, on one stream.
#[derive(Debug)]
pub struct Network {
    stream: Stream,
    options: NetworkOptions,
    groups: Vec<Group>,
    plans: Plans,
    /// The graph that it computes, with its plans.
    topology: Arc<Topology>,
    /// Shared by all plans: nothing in it outlives a step.
    arena: Tensor,
    /// `[configs][slots]`.
    alphas: Tensor,
    /// Values of `alphas` on the host, for their pattern.
    alpha_values: Vec<f32>,
    metrics: Tensor,
    metrics_layout: MetricsLayout,
    /// The gradient that lies in the arena, if there is one.
    gradient: Option<Gradient>,
}

impl Network {
    /// A network with fresh parameters and plans of its own. Does not wait for the device.
    ///
    /// # Errors
    /// An option of zero, [`Error::Precision`], a graph with several inputs or two groups of one
    /// name, an image too small, memory.
    pub fn new(stream: &Stream, graph: Arc<Graph>, options: NetworkOptions) -> Result<Self> {
        Self::with_plans(stream, graph, options, &Plans::default())
    }

    /// As [`Network::new`], with plans shared with other networks of the device.
    ///
    /// # Errors
    /// As [`Network::new`].
    pub fn with_plans(
        stream: &Stream,
        graph: Arc<Graph>,
        options: NetworkOptions,
        plans: &Plans,
    ) -> Result<Self> {
        check_options(stream, &options)?;
        Self::assemble(stream, graph, options, plans, None)
    }

    /// A network of a graph; of an earlier one it takes what stays as it is.
    fn assemble(
        stream: &Stream,
        graph: Arc<Graph>,
        options: NetworkOptions,
        plans: &Plans,
        old: Option<&Network>,
    ) -> Result<Self> {
        check_graph(&graph)?;
        stream.device().load_kernels(&ops::gpu::sources(options.precision))?;
        let topology = plans.topology(&graph);
        let arena_len = largest_arena(&topology, &options, Target::of(stream.device()))?;
        let groups = growth::build(stream, &graph, old.map(Self::weights), options.fresh())?;
        let arena = match old.filter(|old| old.arena.numel() >= arena_len) {
            Some(old) => old.arena.clone(),
            None => new_arena(stream, arena_len)?,
        };
        let (alphas, alpha_values) = match old.filter(|old| old.graph().alphas == graph.alphas) {
            Some(old) => (old.alphas.clone(), old.alpha_values.clone()),
            None => {
                let shape = [options.configs, graph.alphas];
                let zeros = Tensor::zeros(stream, shape, DType::F32, Owner::Parameters)?;
                (zeros, vec![0.0; options.configs * graph.alphas])
            }
        };
        let metrics_layout = MetricsLayout {
            groups: graph.groups.len(),
            configs: options.configs,
            log: options.batch_log,
        };
        let metrics = match old.filter(|old| old.metrics.numel() == metrics_layout.len()) {
            Some(old) => old.metrics.clone(),
            None => Tensor::zeros(stream, [metrics_layout.len()], DType::F64, Owner::Metrics)?,
        };
        let network = Self {
            stream: stream.clone(),
            options,
            groups,
            plans: plans.clone(),
            topology,
            arena,
            alphas,
            alpha_values,
            metrics,
            metrics_layout,
            gradient: None,
        };
        network.reset_metrics()?;
        Ok(network)
    }

    /// Growth: the network computes another graph from now on. Parameters, momentum and buffers are
    /// carried over by name (where shape and kind agree), new ones are initialised, those that the
    /// graph does not name are dropped; groups that stay as they are keep their tensors. A topology
    /// seen before is not compiled again. Metrics start anew; alphas are kept if there are as many
    /// slots, else zero. Does not wait for the device.
    ///
    /// # Errors
    /// As [`Network::new`]; the network is then as it was.
    pub fn set_graph(&mut self, graph: Arc<Graph>) -> Result<()> {
        if *graph == **self.graph() {
            return Ok(());
        }
        *self = Self::assemble(&self.stream, graph, self.options, &self.plans, Some(self))?;
        Ok(())
    }

    /// Compiles the training plan of this batch size ahead, and makes the arena large enough for
    /// it: a training step of that size then only launches. Does not wait for the device.
    ///
    /// # Errors
    /// [`Error::EmptyBatch`], [`Error::OneValuePerChannel`], memory.
    pub fn prepare_training(&mut self, batch: usize) -> Result<()> {
        self.plan(batch, Mode::Train).map(drop)
    }

    /// One step of training: forward with row 0 of the alphas, mean cross-entropy, backward,
    /// clipping and SGD per group, metrics. `inputs` is f32 (N, C, H, W), channels last; `targets`
    /// u32 `[N]`; both on this network's stream. Any N up to `batch_max`: the first batch of a new
    /// size compiles a plan, all others only launch. Waits for nothing.
    ///
    /// # Errors
    /// [`meristem_device::Error::Mismatch`] for a tensor of another form or stream;
    /// [`Error::OneValuePerChannel`], a failed stream.
    #[track_caller]
    pub fn train_step(&mut self, inputs: &Tensor, targets: &Tensor) -> Result<()> {
        let Pass { operation, run, config } = self.training((inputs, targets))?;
        self.launch(operation, run, &self.tensors(&[inputs], Some(targets), config))
    }

    /// A training step over this batch, which the network is then ready for.
    fn training(&mut self, (inputs, targets): LabelledBatch<'_>) -> Result<Pass> {
        let batch = self.check_batch("train_step", inputs, targets)?;
        self.training_of(batch)
    }

    /// A training step over so many samples.
    fn training_of(&mut self, batch: usize) -> Result<Pass> {
        let plan = self.plan(batch, Mode::Train)?;
        let run = Run::of(&plan, Phase::Forward..=Phase::Update);
        Ok(Pass { operation: "train_step", run, config: 0 })
    }

    /// Evaluates a batch with row `config` of the alphas: loss and hits are added to that row of
    /// the metrics; parameters and buffers stay as they are. Tensors as for
    /// [`Network::train_step`]. Waits for nothing.
    ///
    /// # Errors
    /// As [`Network::train_step`], and [`Error::Argument`] for `config`.
    #[track_caller]
    pub fn eval_step(&mut self, inputs: &Tensor, targets: &Tensor, config: usize) -> Result<()> {
        let batch = self.check_batch("eval_step", inputs, targets)?;
        self.check_config("eval_step", config)?;
        let plan = self.plan(batch, Mode::Evaluate)?;
        let run = Run::of(&plan, Phase::Forward..=Phase::Backward);
        self.launch("eval_step", run, &self.tensors(&[inputs], Some(targets), config))
    }

    /// Evaluates a batch with all of these rows of the alphas in one launch: loss and hits of each
    /// are added to its row of the metrics, equal bit for bit to one [`Network::eval_step`] a row.
    /// Layers before the first slot in which rows differ are computed once, and a module only for
    /// rows in which its alpha is not 0 (C1 to C3). The first batch of a new size, or after the
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
        let Pass { operation, run, config } = self.evaluation((inputs, targets), &configs)?;
        self.launch(operation, run, &self.tensors(&[inputs], Some(targets), config))
    }

    /// An evaluation of this batch with these rows, which the network is then ready for.
    fn evaluation(
        &mut self,
        (inputs, targets): LabelledBatch<'_>,
        configs: &Range<usize>,
    ) -> Result<Pass> {
        let batch = self.check_batch("eval_rows", inputs, targets)?;
        self.evaluation_of(batch, configs)
    }

    /// An evaluation of so many samples.
    fn evaluation_of(&mut self, batch: usize, configs: &Range<usize>) -> Result<Pass> {
        let pattern = self.pattern("eval_rows", configs)?;
        let options = self.options.plan(batch, Mode::Evaluate, Target::of(self.stream.device()));
        let plan = self.topology.rows(RowPlan { options, pattern })?;
        self.make_room(&plan)?;
        let run = Run::of(&plan, Phase::Forward..=Phase::Backward);
        Ok(Pass { operation: "eval_rows", run, config: configs.start })
    }

    /// Floating-point operations per sample ([`Graph::flops`]) of one [`Network::eval_rows`] of
    /// these rows, and of one [`Network::eval_step`]. Asks the device nothing.
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
        Ok(AlphaPattern::of(table, configs.len()))
    }

    /// Logits `[N, classes]` of a batch in evaluation mode, with row `config` of the alphas. A new
    /// tensor; waits for nothing.
    ///
    /// # Errors
    /// As [`Network::eval_step`], and memory.
    #[track_caller]
    pub fn infer(&mut self, inputs: &Tensor, config: usize) -> Result<Tensor> {
        let batch = self.check_inputs("infer", inputs)?;
        self.check_config("infer", config)?;
        let plan = self.plan(batch, Mode::Infer)?;
        let shape = [batch, self.graph().classes()];
        let logits = Tensor::empty(&self.stream, shape, DType::F32, Owner::Other)?;
        let run = Run::of(&plan, Phase::Forward..=Phase::Deliver);
        let inputs = [inputs];
        let tensors = Tensors { outputs: &[&logits], ..self.tensors(&inputs, None, config) };
        self.launch("infer", run, &tensors)?;
        Ok(logits)
    }

    /// This network's tensors, with those of a batch, and the rows of alphas and scores from
    /// `config` on.
    fn tensors<'a>(
        &'a self,
        inputs: &'a [&'a Tensor],
        targets: Option<&'a Tensor>,
        config: usize,
    ) -> Tensors<'a> {
        Tensors {
            arena: Some(&self.arena),
            groups: &self.groups,
            metrics: Some(&self.metrics),
            scores_start: self.metrics_layout.scores_of(config),
            inputs,
            targets,
            alphas: Some(&self.alphas),
            alphas_start: config * self.graph().alphas,
            outputs: &[],
        }
    }

    #[track_caller]
    fn launch(&self, operation: &'static str, run: Run, tensors: &Tensors<'_>) -> Result<()> {
        run.launch((&self.stream, operation), self.options.isa, tensors)
    }

    /// A pass before there is a batch.
    fn ahead(&self, Pass { operation, run, config }: Pass) -> Ahead<'_> {
        let (program, arguments) = run.ahead(&self.tensors(&[], None, config));
        Ahead { stream: &self.stream, operation, program, arguments }
    }

    /// Adds a pass over a batch to those of other networks.
    #[track_caller]
    fn add<'a>(
        &'a self,
        to: &mut Launches<'a>,
        Pass { operation, run, config }: Pass,
        (inputs, targets): &'a LabelledBatch<'a>,
    ) -> Result<()> {
        let tensors = self.tensors(std::slice::from_ref(inputs), Some(targets), config);
        run.add(to, (&self.stream, operation), self.options.isa, &tensors)
    }

    /// Launches steps that use nothing of a batch.
    #[track_caller]
    fn launch_steps(&self, operation: &'static str, steps: Vec<Step>) -> Result<()> {
        self.launch(operation, Run::steps(steps), &self.tensors(&[], None, 0))
    }

    fn plan(&mut self, batch: usize, mode: Mode) -> Result<Arc<Plan>> {
        let options = self.options.plan(batch, mode, Target::of(self.stream.device()));
        let plan = self.topology.plan(options)?;
        self.make_room(&plan)?;
        Ok(plan)
    }

    /// Makes the arena large enough for a plan, which will use it.
    fn make_room(&mut self, plan: &Plan) -> Result<()> {
        self.gradient = None;
        if plan.arena_len() > self.arena.numel() {
            self.arena = new_arena(&self.stream, plan.arena_len())?;
        }
        Ok(())
    }

    /// Sets the alphas, one row per configuration and one value per slot; rows that are not given
    /// become zero. Training uses row 0. One small copy to the device, which waits for nothing.
    ///
    /// # Errors
    /// [`Error::Argument`] for too many rows or a row of another length.
    #[track_caller]
    pub fn set_alphas(&mut self, rows: &[Vec<f32>]) -> Result<()> {
        let (slots, configs) = (self.graph().alphas, self.options.configs);
        if rows.len() > configs || rows.iter().any(|row| row.len() != slots) {
            let expected = format!("at most {configs} rows of {slots} alphas");
            let lengths: Vec<_> = rows.iter().map(Vec::len).collect();
            let got = format!("rows of {lengths:?}");
            return Err(Error::argument("set_alphas", "rows", expected, got));
        }
        let mut values = vec![0.0; self.alphas.numel()];
        for (to, row) in values.chunks_mut(slots.max(1)).zip(rows) {
            to[..row.len()].copy_from_slice(row);
        }
        self.alphas.copy_from_slice(&values)?;
        self.alpha_values = values;
        Ok(())
    }

    /// Empties the metrics. Does not wait.
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn reset_metrics(&self) -> Result<()> {
        let layout = self.metrics_layout;
        let step = Step::new(ops::state::Op::ResetMetrics(layout), &[], &[layout.span()]);
        self.launch_steps("reset_metrics", vec![step])
    }

    /// The metrics that have accumulated, as f64 on the device;
    /// [`Metrics::parse`](crate::Metrics::parse) reads them after a read-back, which may serve many
    /// networks at once (H1).
    pub fn metrics(&self) -> &Tensor {
        &self.metrics
    }

    /// The graph that it computes.
    pub fn graph(&self) -> &Arc<Graph> {
        self.topology.graph()
    }

    /// The stream that it belongs to.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Options that it was made with.
    pub fn options(&self) -> &NetworkOptions {
        &self.options
    }

    /// Checks a batch of images, or of vectors where the graph takes those; returns its size (V1).
    fn check_inputs(&self, operation: &'static str, inputs: &Tensor) -> Result<usize> {
        let d = self.graph().input_dims();
        let batch = Extent::Between(1, self.options.batch_max);
        let expect = Expect::stream(&self.stream).dtype(DType::F32);
        let expect = match inputs.dims().len() == 2 && d.h * d.w == 1 {
            true => expect.shape([batch, d.c.into()]).contiguous(),
            false => expect.shape([batch, d.c.into(), d.h.into(), d.w.into()]).channels_last(),
        };
        expect.check(operation, "inputs", inputs)?;
        Ok(inputs.dims().first().copied().unwrap_or(0))
    }

    /// Checks a labelled batch; returns its size (V1).
    fn check_batch(
        &self,
        operation: &'static str,
        inputs: &Tensor,
        targets: &Tensor,
    ) -> Result<usize> {
        let batch = self.check_inputs(operation, inputs)?;
        let expect = Expect::stream(&self.stream).dtype(DType::U32).shape([batch]).contiguous();
        expect.check(operation, "targets", targets)?;
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

/// Compiles the plans of the largest batch; returns the arena they need. A batch that only training
/// refuses is left to the training step.
fn largest_arena(topology: &Topology, options: &NetworkOptions, target: Target) -> Result<usize> {
    let plan = |mode| topology.plan(options.plan(options.batch_max, mode, target));
    let arena_len = plan(Mode::Evaluate)?.arena_len();
    match plan(Mode::Train) {
        Ok(plan) => Ok(arena_len.max(plan.arena_len())),
        Err(Error::OneValuePerChannel { .. }) => Ok(arena_len),
        Err(error) => Err(error),
    }
}

fn new_arena(stream: &Stream, len: usize) -> Result<Tensor> {
    Ok(Tensor::empty(stream, [len], DType::F32, Owner::Activations)?)
}

fn check_options(stream: &Stream, options: &NetworkOptions) -> Result<()> {
    let (device, precision) = (stream.device().id(), options.precision);
    if !precision.runs_on(device) {
        return Err(Error::Precision { device, precision });
    }
    for (name, value) in [("batch_max", options.batch_max), ("configs", options.configs)] {
        if value == 0 {
            return Err(Error::argument("Network::new", name, "at least 1", 0));
        }
    }
    Ok(())
}

fn check_graph(graph: &Graph) -> Result<()> {
    let inputs = graph.inputs();
    if inputs != 1 {
        let got = format!("{inputs} inputs");
        return Err(Error::argument("Network", "graph", "a graph with one input", got));
    }
    for (i, group) in graph.groups.iter().enumerate() {
        if graph.groups[..i].iter().any(|g| g.name == group.name) {
            return Err(Error::DuplicateName { name: group.name.clone() });
        }
    }
    Ok(())
}

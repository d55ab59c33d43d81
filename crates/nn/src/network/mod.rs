//! A network on a stream: parameters, momentum, buffers, arena, plans and metrics of one host with
//! its modules.
//!
//! A training or evaluation step is one launch, which waits for nothing; phases of the batch's plan
//! run in it (`run`). Parameters live in one set of tensors per group, so that growing and pruning
//! a module touches no other group (`docs/growth.md`).

mod activations;
mod arenas;
mod fleet;
mod gradient;
mod groups;
mod growth;
mod own_loop;
mod pass;
mod plans;
mod replica;
mod run;
mod sequence;
mod snapshot;
mod state;
mod statistics;
mod widen;

use std::sync::Arc;

use meristem_device::{DType, Owner, Stream, Tensor};

pub use self::activations::ActivationProbe;
use self::arenas::Arenas;
pub use self::fleet::NetworkFleet;
use self::gradient::ArenaGradient;
use self::groups::GroupTensors;
use self::growth::Fresh;
use self::own_loop::LoopState;
use self::plans::PlannedGraph;
pub use self::plans::Plans;
use self::run::LaunchSteps;
pub use self::sequence::{SequenceDraw, SequenceNetwork, SequenceOptions, SequenceRun};
pub use self::snapshot::Snapshot;
pub use self::statistics::observed_weight;
pub use self::widen::{FurtherFeatures, WidthProbe};
use crate::error::{Error, Result};
use crate::graph::{DrawSource, Graph};
use crate::kernels::Isa;
use crate::layout::packed_step_factors;
use crate::loss::Loss;
use crate::metrics::{Metrics, MetricsLayout};
use crate::ops::{PlanTarget, StateOp, gpu};
use crate::plan::{PlanMode, PlanOptions, PlanStep};
use crate::precision::Precision;

/// A batch of one network: inputs and targets of its [`Loss`], on its stream.
pub type LabelledBatch<'a> = (&'a Tensor, &'a Tensor);

/// Options of a network, without its graph.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkOptions {
    /// Seed of the initial weights, and of the masks of dropout.
    pub seed: u64,
    /// Number of the env, part of the key of the initial weights and of the masks of dropout.
    pub env: u64,
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// The most samples of a batch.
    pub batch_max: usize,
    /// Rows of alphas and of evaluation metrics.
    pub configs: usize,
    /// Number of last batches whose mean losses are kept.
    pub batch_log: usize,
    /// Precision of products, in training and evaluation alike; a processor has f32 only.
    pub precision: Precision,
    /// Whether a processor may compute convolutions by Winograd's minimal filtering.
    pub winograd: bool,
    /// Loss of training and evaluation, which determines the targets of a batch.
    pub loss: Loss,
}

impl NetworkOptions {
    /// With 32 configurations, a log of 1024 batches, f32, minimal filtering, and cross-entropy.
    pub fn new(seed: u64, env: u64, isa: Isa, batch_max: usize) -> Self {
        Self {
            seed,
            env,
            isa,
            batch_max,
            configs: 32,
            batch_log: 1024,
            precision: Precision::F32,
            winograd: true,
            loss: Loss::default(),
        }
    }

    fn fresh(&self) -> Fresh {
        Fresh { seed: self.seed, env: self.env, owner: Owner::Parameters }
    }

    /// Key of the network's draws.
    fn draws(&self, first_sample: usize) -> DrawSource {
        DrawSource { seed: self.seed, env: self.env, first_sample }
    }

    fn plan(&self, batch: usize, mode: PlanMode, target: PlanTarget) -> PlanOptions {
        let Self { batch_log, precision, winograd, ref loss, .. } = *self;
        let loss = loss.clone();
        let plain = PlanOptions::new(batch, mode);
        PlanOptions { batch_log, precision, winograd, loss, target, ..plain }
    }
}

/// One host with its modules, on one stream.
#[derive(Debug)]
pub struct Network {
    stream: Stream,
    options: NetworkOptions,
    groups: Vec<GroupTensors>,
    plans: Plans,
    /// The graph that it computes.
    graph: Arc<Graph>,
    /// The plans of its topology.
    topology: Arc<PlannedGraph>,
    /// Numbers of the optimisers of all groups and variants, `[…][HYPERPARAMETERS]`, then of the
    /// dropout layers, f64.
    hyperparameters: Tensor,
    /// The same with dropout rates of 0, for passes that only observe statistics.
    without_dropout: Tensor,
    /// Factors of the host's optimiser steps ([`packed_step_factors`]), if there are any.
    step_factors: Option<Tensor>,
    /// Number of the first sample in a batch that several networks share, for draws.
    first_sample: usize,
    arena: Arenas,
    /// `[configs][slots]`.
    alphas: Tensor,
    /// Values of `alphas` on the host, for their pattern.
    alpha_values: Vec<f32>,
    /// Weight of each class in the loss, if there are any.
    class_weights: Option<Tensor>,
    metrics: Tensor,
    metrics_layout: MetricsLayout,
    /// The gradient in the arena, if any.
    gradient: Option<ArenaGradient>,
    /// State of a training step in three calls.
    own_loop: LoopState,
}

impl Network {
    /// A network with fresh parameters and separate plans. Waits for the device only as
    /// [`Device::load_kernels`](meristem_device::Device::load_kernels) does: on a CUDA device, for
    /// kernels that are not loaded yet.
    ///
    /// # Errors
    /// An option of zero, a number of the loss that is out of range, [`Error::Precision`], a graph
    /// with several inputs or two groups of one name, an image too small, memory.
    pub fn new(stream: &Stream, graph: Arc<Graph>, options: NetworkOptions) -> Result<Self> {
        Self::with_plans(stream, graph, options, &Plans::default())
    }

    /// Like [`Network::new`], with plans shared with other networks of the device.
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

    /// A network of a graph; unchanged groups of an earlier network are taken over.
    fn assemble(
        stream: &Stream,
        graph: Arc<Graph>,
        options: NetworkOptions,
        plans: &Plans,
        old: Option<&Network>,
    ) -> Result<Self> {
        check_graph(&graph)?;
        options.loss.check(graph.classes())?;
        let own = gpu::loss_source(options.loss.formula());
        let mut sources = gpu::sources(&graph, options.precision);
        sources.extend(own);
        stream.device().load_kernels(&sources)?;
        let topology = plans.topology(&graph);
        let first_sample = old.map_or(0, |old| old.first_sample);
        let draws = options.draws(first_sample);
        let numbers = |graph| groups::hyperparameters(stream, graph, draws, Owner::Parameters);
        let hyperparameters = numbers(&graph)?;
        let without_dropout = if graph.dropouts.is_empty() {
            hyperparameters.clone()
        } else {
            numbers(&Graph::clone(&graph).with_dropout(0.0)?)?
        };
        let step_factors = packed_step_factors(&graph).map(|factors| {
            Tensor::from_slice(stream, &factors, [factors.len()], Owner::Parameters)
        });
        let step_factors = step_factors.transpose()?;
        let arena_len =
            largest_arena(&topology, &options, PlanTarget::for_device(stream.device()))?;
        let groups = growth::build(stream, &graph, old.map(Self::weights), options.fresh())?;
        let mut arena = old.map_or_else(|| Arenas::new(stream), |old| Ok(old.arena.clone()))?;
        arena.make_room(stream, arena_len)?;
        let (alphas, alpha_values) = match old.filter(|old| old.graph().alphas == graph.alphas) {
            Some(old) => (old.alphas.clone(), old.alpha_values.clone()),
            None => {
                let shape = [options.configs, graph.alphas];
                let zeros = Tensor::zeros(stream, shape, DType::F32, Owner::Parameters)?;
                (zeros, vec![0.0; options.configs * graph.alphas])
            }
        };
        let class_weights = class_weights(stream, &options.loss, old)?;
        let metrics_layout = MetricsLayout {
            groups: graph.groups.len(),
            configs: options.configs,
            log: options.batch_log,
            score_sums: options.loss.has_score_sums(),
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
            graph,
            topology,
            hyperparameters,
            without_dropout,
            step_factors,
            first_sample,
            arena,
            alphas,
            alpha_values,
            class_weights,
            metrics,
            metrics_layout,
            gradient: None,
            own_loop: LoopState::default(),
        };
        network.reset_metrics()?;
        Ok(network)
    }

    /// Growth: replaces the graph. Parameters, momentum and buffers are carried over by name if
    /// shape and kind agree; new ones are initialised, and ones that the graph does not name are
    /// dropped. Unchanged groups keep their tensors. A topology seen before is not compiled again.
    /// Metrics are reset, and gradients that wait for an update are dropped. Alphas are kept if the
    /// number of slots is the same, else set to zero. If only numbers of optimisers or factors of
    /// their steps differ, they are copied to the device, and everything else but the metrics
    /// stays, gradients too; if rates of dropout differ, gradients that wait for
    /// [`Network::update`] are dropped. An equal graph changes nothing, not even the metrics. Waits
    /// as [`Network::new`].
    ///
    /// # Errors
    /// As [`Network::new`]; the network is then as it was.
    pub fn set_graph(&mut self, graph: Arc<Graph>) -> Result<()> {
        if *graph == **self.graph() {
            return Ok(());
        }
        if graph.has_topology_of(self.graph()) {
            self.upload_numbers(&graph, self.first_sample)?;
            if graph.dropouts != self.graph.dropouts {
                // The backward pass would multiply masks of one rate by the factor of another.
                self.drop_gradient();
            }
            self.graph = graph;
            return self.reset_metrics();
        }
        let options = self.options.clone();
        *self = Self::assemble(&self.stream, graph, options, &self.plans, Some(self))?;
        Ok(())
    }

    /// Copies the numbers of a graph with this topology to the device.
    fn upload_numbers(&self, graph: &Graph, first_sample: usize) -> Result<()> {
        let draws = self.options.draws(first_sample);
        if !graph.dropouts.is_empty() {
            let without = Graph::clone(graph).with_dropout(0.0)?;
            self.without_dropout.copy_from_slice(&groups::numbers(&without, draws))?;
        }
        if graph.step_factors != self.graph.step_factors
            && let (Some(to), Some(factors)) = (&self.step_factors, packed_step_factors(graph))
        {
            to.copy_from_slice(&factors)?;
        }
        Ok(self.hyperparameters.copy_from_slice(&groups::numbers(graph, draws))?)
    }

    /// Sets the number of the network's first sample in batches that several networks share, so
    /// that dropout draws other masks for each of them; 0 when new. Does not wait.
    ///
    /// # Errors
    /// A failed stream.
    pub fn set_first_sample(&mut self, number: usize) -> Result<()> {
        if number != self.first_sample && !self.graph.dropouts.is_empty() {
            self.upload_numbers(&self.graph, number)?;
        }
        self.first_sample = number;
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
        let step = PlanStep::new(StateOp::ResetMetrics(layout), &[], &[layout.span()]);
        self.launch_steps("reset_metrics", vec![step])
    }

    /// Adds counts of training that the program computed to the metrics: loss, samples, score,
    /// steps and the last batch losses of `own`. Waits for the device.
    ///
    /// # Errors
    /// A failed stream.
    pub fn add_training_metrics(&self, own: &Metrics) -> Result<()> {
        let mut raw = self.metrics.to_vec::<f64>()?;
        self.metrics_layout.add_training(&mut raw, own);
        Ok(self.metrics.copy_from_slice(&raw)?)
    }

    /// The accumulated metrics, as f64 on the device. [`Metrics::parse`](crate::Metrics::parse)
    /// parses them after a read-back, which may include many networks.
    pub fn metrics(&self) -> &Tensor {
        &self.metrics
    }

    /// The graph that it computes.
    pub fn graph(&self) -> &Arc<Graph> {
        &self.graph
    }

    /// The stream that it belongs to.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Options that it was made with.
    pub fn options(&self) -> &NetworkOptions {
        &self.options
    }
}

/// Compiles the plans of the largest batch; returns the arena that they need. A batch size that
/// only training refuses is no error here; the training step returns it.
fn largest_arena(
    topology: &PlannedGraph,
    options: &NetworkOptions,
    target: PlanTarget,
) -> Result<usize> {
    let plan = |mode| topology.plan(options.plan(options.batch_max, mode, target));
    let arena_len = plan(PlanMode::Evaluate)?.arena_len();
    match plan(PlanMode::Train) {
        Ok(plan) => Ok(arena_len.max(plan.arena_len())),
        Err(Error::OneValuePerChannel { .. }) => Ok(arena_len),
        Err(error) => Err(error),
    }
}

/// The class weights of a loss on the device; an earlier network with the same options has them.
fn class_weights(stream: &Stream, loss: &Loss, old: Option<&Network>) -> Result<Option<Tensor>> {
    if let Some(old) = old {
        return Ok(old.class_weights.clone());
    }
    let upload = |w: &[f32]| Tensor::from_slice(stream, w, [w.len()], Owner::Parameters);
    Ok(loss.class_weights().map(upload).transpose()?)
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

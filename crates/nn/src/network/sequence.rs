//! A network over sequences: recurrent, of several inputs, differentiated by an objective that the
//! caller brings. The controller's policy is one.
//!
//! One set of parameters, any number of plans: a single step of many sequences, or whole sequences.
//! Each plan has its own arena, so that a gradient survives forward runs of other plans.

use std::ops::Range;
use std::sync::Arc;

use meristem_device::{Args, DType, Expect, Launch, Owner, Stream, Tensor, read_back_as};

use super::argument;
use super::groups::{self, Fresh, Group};
use super::state::Weights;
use crate::error::Result;
use crate::graph::{Graph, Node, Op};
use crate::kernels::Isa;
use crate::kernels::optim::{self, GroupStep};
use crate::layout::Layout;
use crate::network::metrics::MetricsView;
use crate::plan::lower::train::joined;
use crate::plan::{Memory, Mode, Plan, PlanOptions, Span};
use crate::state::StateDict;

/// Plans kept: a step and whole sequences, each for a few numbers of rows.
const PLANS_MAX: usize = 8;

/// What is known of a sequence network besides its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceOptions {
    /// Seed of the initial weights.
    pub seed: u64,
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// Whom its memory belongs to in the device's report.
    pub owner: Owner,
}

/// The inputs of a run: rows are `[steps][sequences]`.
#[derive(Clone, Copy, Debug)]
pub struct SequenceRun<'a> {
    /// Steps of every sequence.
    pub steps: usize,
    /// In the graph's order: f32 `[rows, features]` for an input (`[rows]` will do for one feature),
    /// u32 `[rows, count]` for indices, f32 `[sequences, 2·hidden]` for an LSTM's state.
    pub inputs: &'a [&'a Tensor],
}

/// A compiled plan with its memory.
#[derive(Debug)]
struct Compiled {
    plan: Arc<Plan>,
    arena: Tensor,
}

/// A graph over sequences with its parameters and optimiser, on one stream.
#[derive(Debug)]
pub struct SequenceNetwork {
    stream: Stream,
    graph: Arc<Graph>,
    options: SequenceOptions,
    groups: Vec<Group>,
    /// The one used longest ago first.
    plans: Vec<Compiled>,
    /// Where the last gradient lies.
    gradient: Option<(Arc<Plan>, Tensor)>,
    /// L2 norm of the last gradient, f64 `[groups]`.
    norms: Tensor,
}

impl SequenceNetwork {
    /// A network with fresh parameters. Does not wait for the device.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for a graph with alphas; memory.
    pub fn new(stream: &Stream, graph: Arc<Graph>, options: SequenceOptions) -> Result<Self> {
        if graph.alphas > 0 {
            let (expected, got) = ("a graph without alphas".into(), graph.alphas.to_string());
            return Err(argument("SequenceNetwork::new", "graph", expected, got));
        }
        let fresh = Fresh { seed: options.seed, env: 0, owner: options.owner };
        let groups = groups::build(stream, &graph, None, fresh)?;
        let norms = Tensor::zeros(stream, [graph.groups.len()], DType::F64, options.owner)?;
        let (stream, plans) = (stream.clone(), vec![]);
        Ok(Self { stream, graph, options, groups, plans, gradient: None, norms })
    }

    /// Runs forward: the value of every row goes to `output` `[rows, features]`, the state after the
    /// last step to `states`, one `[sequences, 2·hidden]` per LSTM. None of them may be an input. The
    /// first run of a new size compiles a plan and takes its memory, all others only launch. Waits for
    /// nothing.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument), memory, a failed stream.
    pub fn forward(
        &mut self,
        run: &SequenceRun<'_>,
        output: &Tensor,
        states: &[&Tensor],
    ) -> Result<()> {
        let rows = self.check_inputs("forward", run)?;
        let features = self.graph.classes();
        check(&self.stream, ("forward", "output"), output, (DType::F32, rows, features))?;
        let (plan, arena) = self.plan(rows, run.steps, Mode::Infer)?;
        let spans: Vec<Span> = plan.last_states().to_vec();
        if spans.len() != states.len() {
            let expected = format!("one tensor for each of {} LSTMs", spans.len());
            return Err(argument("forward", "states", expected, states.len().to_string()));
        }
        for (span, state) in spans.iter().zip(states) {
            let sequences = rows / run.steps;
            let expected = (DType::F32, sequences, span.len / sequences);
            check(&self.stream, ("forward", "states"), state, expected)?;
        }
        let launch = states.iter().fold(self.stream.launch("forward"), |l, s| l.write(s));
        let launch = reading(launch.write(output).write(&arena), run.inputs);
        let launch = self.groups.iter().fold(launch, |l, group| group.write(l));
        let (isa, inputs, indices) = (self.options.isa, run.inputs.len(), self.indices());
        Ok(launch.run(move |args| {
            let states = spans.len();
            let mut memory = memory(args, states + 1, (inputs, &indices));
            plan.execute(isa, &mut memory, &[], 0, &mut MetricsView::none());
            args.write::<f32>(states).copy_from_slice(memory.read(plan.output()));
            for (i, span) in spans.iter().enumerate() {
                args.write::<f32>(i).copy_from_slice(memory.read(*span));
            }
        })?)
    }

    /// Runs forward, calls `objective`, runs backward, and finds the gradient's norm
    /// ([`SequenceNetwork::gradient_norms`]); the parameters stay as they are. One launch, which waits
    /// for nothing; a new size compiles a plan.
    ///
    /// `objective` runs on the device with the network's output `[rows][features]`, and overwrites the
    /// gradient of what is to become small. Its arguments are `data` (read), then `results` (written).
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument), memory, a failed stream.
    pub fn differentiate<F>(
        &mut self,
        run: &SequenceRun<'_>,
        data: &[&Tensor],
        results: &[&Tensor],
        mut objective: F,
    ) -> Result<()>
    where
        F: FnMut(&mut Args<'_>, &[f32], &mut [f32]) + Send + 'static,
    {
        let rows = self.check_inputs("differentiate", run)?;
        let (plan, arena) = self.plan(rows, run.steps, Mode::Objective)?;
        let launch = reading(self.stream.launch("differentiate"), data);
        let launch = results.iter().fold(launch, |l, result| l.write(result));
        let first = data.len() + results.len() + 1;
        let launch = reading(launch.write(&self.norms).write(&arena), run.inputs);
        let launch = self.groups.iter().fold(launch, |l, group| group.write(l));
        let (isa, inputs, indices) = (self.options.isa, run.inputs.len(), self.indices());
        let tensors = self.gradient_tensors(&plan);
        let backward = Arc::clone(&plan);
        launch.run(move |args| {
            let mut memory = memory(args, first, (inputs, &indices));
            let mut call = |output: &[f32], d: &mut [f32]| objective(args, output, d);
            backward.execute_objective(isa, &mut memory, &mut call);
            norms_of(&tensors, args.write(first - 1), |span| {
                optim::grad_norm_sq(isa, memory.read(span))
            });
        })?;
        self.gradient = Some((plan, arena));
        Ok(())
    }

    /// Per group, the places of the parameters' gradients in the arena.
    fn gradient_tensors(&self, plan: &Plan) -> Vec<Vec<Span>> {
        let of = |group: usize| -> Vec<Span> {
            let Some(whole) = plan.group_gradient(group) else { return vec![] };
            let span = |at: Range<usize>| Span::arena(whole.start + at.start, at.len());
            plan.trained(group).into_iter().map(span).collect()
        };
        (0..self.graph.groups.len()).map(of).collect()
    }

    /// L2 norm of each group's last gradient before clipping, f64 `[groups]` on the device.
    pub fn gradient_norms(&self) -> &Tensor {
        &self.norms
    }

    /// The last gradient of every parameter that one reaches, with its name: f32, flat, before clipping, where it
    /// lies. They may be overwritten by launches of this stream, with what other ranks found;
    /// [`SequenceNetwork::measure`] comes after that, then [`SequenceNetwork::apply`].
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) without a gradient.
    pub fn gradients(&self) -> Result<Vec<(&str, Tensor)>> {
        let Some((plan, arena)) = &self.gradient else {
            let expected = "a gradient, from `differentiate`".into();
            return Err(argument("gradients", "gradient", expected, "none".into()));
        };
        let mut all = vec![];
        for (param, place) in self.graph.params.iter().zip(plan.trained_params()) {
            let Some((group, place)) = place else { continue };
            let Some(whole) = plan.group_gradient(group) else { continue };
            let gradient = arena.view(whole.start + place.start, [place.len()])?;
            all.push((param.name.as_str(), gradient));
        }
        Ok(all)
    }

    /// Finds the norm of the last gradient anew, after it was overwritten. Waits for nothing.
    ///
    /// # Errors
    /// As [`SequenceNetwork::gradients`].
    pub fn measure(&mut self) -> Result<()> {
        let Some((plan, arena)) = &self.gradient else {
            let expected = "a gradient, from `differentiate`".into();
            return Err(argument("measure", "gradient", expected, "none".into()));
        };
        let (tensors, isa) = (self.gradient_tensors(plan), self.options.isa);
        let launch = self.stream.launch("gradient norms").write(&self.norms).read(arena);
        Ok(launch.run(move |args| {
            let arena = args.read::<f32>(1);
            norms_of(&tensors, args.write(0), |span| {
                optim::grad_norm_sq(isa, &arena[span.range()])
            });
        })?)
    }

    /// Clips the last gradient, group by group, and lets the optimisers take one step with it. Waits
    /// for nothing. A gradient that is not finite spoils the parameters: read
    /// [`SequenceNetwork::gradient_norms`] first.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) without a gradient, a failed stream.
    pub fn apply(&mut self) -> Result<()> {
        let Some((plan, arena)) = self.gradient.take() else {
            let expected = "a gradient, from `differentiate`".into();
            return Err(argument("apply", "gradient", expected, "none, or one used before".into()));
        };
        let steps = Layout::new(&self.graph).steps;
        let updates: Vec<_> = (0..self.graph.groups.len())
            .map(|g| {
                let optimiser = self.graph.groups[g].optimiser;
                (plan.group_gradient(g), joined(&plan.trained(g)), optimiser, steps[g])
            })
            .collect();
        let launch = self.stream.launch("apply").read(&arena).read(&self.norms);
        let launch = self.groups.iter().fold(launch, |l, group| group.write(l));
        let isa = self.options.isa;
        Ok(launch.run(move |args| {
            let (arena, norms) = (args.read::<f32>(0), args.read::<f64>(1));
            for (g, (gradient, runs, optimiser, step)) in updates.iter().enumerate() {
                let Some(gradient) = gradient else { continue };
                let first = 2 + groups::TENSORS * g;
                let values = args.write::<f32>(first);
                let moments = args.write::<f32>(first + 1);
                let counters = args.write::<i64>(first + 3);
                let steps = step.map_or(0, |step| {
                    counters[step] += 1;
                    counters[step]
                });
                let clip = optim::clip_coefficient(norms[g], optimiser.clip_norm());
                let step = GroupStep { optimiser, clip, steps };
                for run in runs {
                    let gradient = &arena[gradient.clone()];
                    optim::group_step(isa, &step, run.clone(), values, gradient, moments);
                }
            }
        })?)
    }

    /// The last gradient of every parameter, under its name and in its shape, before clipping; zero
    /// where none arrived. One read-back, which waits for the device.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) without a gradient, a failed stream.
    pub fn gradient_dict(&self) -> Result<StateDict> {
        let Some((plan, arena)) = &self.gradient else {
            let expected = "a gradient, from `differentiate`".into();
            return Err(argument("gradient_dict", "gradient", expected, "none".into()));
        };
        let arena = read_back_as::<f32>(&[arena])?.pop().unwrap_or_default();
        let layout = Layout::new(&self.graph);
        let group = |(g, size): (usize, &crate::layout::GroupSize)| {
            plan.group_gradient(g).map_or(vec![0.0; size.values], |at| arena[at].to_vec())
        };
        let gradients: Vec<_> = layout.groups.iter().enumerate().map(group).collect();
        Ok(self.weights().parameters(&layout, &gradients))
    }

    /// Parameters and buffers. One read-back, which waits for the device.
    ///
    /// # Errors
    /// A failed stream.
    pub fn state_dict(&self) -> Result<StateDict> {
        self.weights().state_dict()
    }

    /// Sets parameters and buffers, all or nothing, strict. Does not wait.
    ///
    /// # Errors
    /// [`StateError`](crate::StateError) lists every tensor that does not fit.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        self.weights().load_state_dict(state, true)
    }

    /// What the optimisers remember; see [`Network::momentum_dict`](super::Network::momentum_dict).
    ///
    /// # Errors
    /// A failed stream.
    pub fn momentum_dict(&self) -> Result<StateDict> {
        self.weights().moments_dict()
    }

    /// Sets what the optimisers remember. Does not wait.
    ///
    /// # Errors
    /// As [`SequenceNetwork::load_state_dict`].
    pub fn load_momentum_dict(&mut self, state: &StateDict) -> Result<()> {
        self.weights().load_moments_dict(state)
    }

    /// The graph that it computes.
    pub fn graph(&self) -> &Arc<Graph> {
        &self.graph
    }

    /// The stream that it belongs to.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    fn weights(&self) -> Weights<'_> {
        Weights { graph: &self.graph, groups: &self.groups }
    }

    fn input_nodes(&self) -> impl Iterator<Item = &Node> {
        self.graph.nodes.iter().filter(|node| node.op.input().is_some())
    }

    /// Which inputs are indices.
    fn indices(&self) -> Vec<bool> {
        self.input_nodes().map(|node| matches!(node.op, Op::Indices(_))).collect()
    }

    /// The rows of a run whose inputs are as they should be.
    fn check_inputs(&self, operation: &'static str, run: &SequenceRun<'_>) -> Result<usize> {
        let expected = self.graph.inputs();
        if run.inputs.len() != expected {
            let expected = format!("{expected} tensors");
            return Err(argument(operation, "inputs", expected, run.inputs.len().to_string()));
        }
        let rows = run.inputs[0].dims().first().copied().unwrap_or(0);
        if run.steps == 0 || rows == 0 || !rows.is_multiple_of(run.steps) {
            let expected = "at least one, a divisor of the rows".into();
            let got = format!("{} for {rows} rows", run.steps);
            return Err(argument(operation, "steps", expected, got));
        }
        for (node, input) in self.input_nodes().zip(run.inputs) {
            let expected = match node.op {
                Op::State(_) => (DType::F32, rows / run.steps, node.dims.numel()),
                Op::Indices(_) => (DType::U32, rows, node.dims.numel()),
                _ => (DType::F32, rows, node.dims.numel()),
            };
            check(&self.stream, (operation, "inputs"), input, expected)?;
        }
        Ok(rows)
    }

    fn plan(&mut self, batch: usize, steps: usize, mode: Mode) -> Result<(Arc<Plan>, Tensor)> {
        let options = PlanOptions { steps, ..PlanOptions::new(batch, mode) };
        let compiled = match self.plans.iter().position(|c| c.plan.options() == options) {
            Some(at) => self.plans.remove(at),
            None => {
                let plan = Arc::new(Plan::compile(&self.graph, options)?);
                let shape = [plan.arena_len()];
                let arena = Tensor::empty(&self.stream, shape, DType::F32, self.options.owner)?;
                Compiled { plan, arena }
            }
        };
        if self.plans.len() == PLANS_MAX {
            self.plans.remove(0);
        }
        let both = (Arc::clone(&compiled.plan), compiled.arena.clone());
        self.plans.push(compiled);
        Ok(both)
    }
}

/// L2 norm of each group's gradient.
fn norms_of(tensors: &[Vec<Span>], norms: &mut [f64], mut norm_sq: impl FnMut(Span) -> f64) {
    for (norm, tensors) in norms.iter_mut().zip(tensors) {
        *norm = tensors.iter().map(|span| norm_sq(*span)).sum::<f64>().sqrt();
    }
}

fn reading<'a>(launch: Launch<'a>, tensors: &[&'a Tensor]) -> Launch<'a> {
    tensors.iter().fold(launch, |launch, tensor| launch.read(tensor))
}

/// The memory of a plan from a launch's arguments: the arena at `first`, the inputs, the groups.
fn memory<'a>(
    args: &mut Args<'a>,
    first: usize,
    (inputs, indices): (usize, &[bool]),
) -> Memory<'a> {
    let slices: Vec<&[f32]> = (0..inputs)
        .map(|i| match indices[i] {
            true => bytemuck::cast_slice(args.read::<u32>(first + 1 + i)),
            false => args.read::<f32>(first + 1 + i),
        })
        .collect();
    let mut memory = Memory::new(args.write(first), &slices, &[]);
    groups::push_all(args, first + 1 + inputs, &mut memory);
    memory
}

/// Checks stream, element type and shape; one column may be left out of the shape (V1).
fn check(
    stream: &Stream,
    (operation, name): (&'static str, &'static str),
    tensor: &Tensor,
    (dtype, rows, columns): (DType, usize, usize),
) -> Result<()> {
    let expect = Expect::stream(stream).dtype(dtype).contiguous();
    let expect = match columns == 1 && tensor.dims().len() == 1 {
        true => expect.shape([rows]),
        false => expect.shape([rows, columns]),
    };
    Ok(expect.check(operation, name, tensor)?)
}

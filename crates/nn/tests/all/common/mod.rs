//! Shared by the tests of plans: running a plan over plain memory, and tensors in PyTorch's order.

// The tests of the kernels use all of it.
#[allow(dead_code)]
#[path = "../../../../kernels/tests/all/exact_functions.rs"]
pub(crate) mod functions;
pub(crate) mod golden;
pub(crate) mod host;
pub(crate) mod reference;

use std::collections::BTreeMap;

use meristem_nn::graph::{Dims, Graph, NodeOp};
use meristem_nn::layout::{ParamLayout, packing};
use meristem_nn::plan::{GroupMemory, Plan, PlanMemory, PlanMode, PlanOptions};
use meristem_nn::{Isa, Result};

/// Small random numbers for tests: splitmix64, keyed by a seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Roughly normal: the sum of four uniforms, variance 1.
    pub(crate) fn normal(&mut self) -> f32 {
        let uniform = |bits: u64| (bits >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
        (0..4).map(|_| uniform(self.bits())).sum::<f32>() * 3f32.sqrt()
    }

    pub(crate) fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// `[N][C][H][W]` to `[N][H][W][C]`.
pub(crate) fn to_nhwc(x: &[f32], d: Dims) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    for (x, out) in x.chunks(d.numel()).zip(out.chunks_mut(d.numel())) {
        for c in 0..d.c {
            for p in 0..d.h * d.w {
                out[p * d.c + c] = x[c * d.h * d.w + p];
            }
        }
    }
    out
}

/// `[N][H][W][C]` to `[N][C][H][W]`.
pub(crate) fn to_nchw(x: &[f32], d: Dims) -> Vec<f32> {
    to_nhwc(x, Dims { c: d.h * d.w, h: d.c, w: 1 })
}

/// A graph with its inputs, parameters and alphas; all tensors in PyTorch's order.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) graph: Graph,
    pub(crate) batch: usize,
    /// Steps of each sequence of the batch; 1 without recurrent layers.
    pub(crate) steps: usize,
    /// Indices are whole numbers here.
    pub(crate) inputs: Vec<Vec<f32>>,
    /// Parameters and buffers, without counters, by name.
    pub(crate) tensors: BTreeMap<String, Vec<f32>>,
    pub(crate) alphas: Vec<f32>,
}

/// Results of a plan; all tensors in PyTorch's order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) output: Vec<f32>,
    /// Gradients by parameter; absent if no gradient reaches it.
    pub(crate) params: BTreeMap<String, Vec<f32>>,
    /// Gradients of the inputs.
    pub(crate) inputs: Vec<Option<Vec<f32>>>,
    /// State of each LSTM after the last step.
    pub(crate) states: Vec<Vec<f32>>,
    /// Buffers afterwards.
    pub(crate) buffers: BTreeMap<String, Vec<f32>>,
    pub(crate) counters: Vec<i64>,
}

impl Case {
    /// Random parameters, inputs and alphas.
    pub(crate) fn random(graph: Graph, batch: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let mut tensors = BTreeMap::new();
        for param in &graph.params {
            let numel: usize = param.shape.iter().product();
            let fan_in = numel / param.shape.first().copied().unwrap_or(1);
            let (mean, scale) = if param.name.ends_with("weight") && param.shape.len() == 1 {
                (1.0, 0.3)
            } else {
                (0.0, 1.0 / (fan_in as f32).sqrt())
            };
            let values = random.normals(numel).into_iter().map(|v| mean + scale * v);
            tensors.insert(param.name.clone(), values.collect());
        }
        for buffer in graph.buffers.iter().filter(|b| !b.counter) {
            let values = random.normals(buffer.len).into_iter();
            let positive = buffer.init > 0.0;
            let values = values.map(|v| if positive { 0.5 + v.abs() } else { v });
            tensors.insert(buffer.name.clone(), values.collect());
        }
        let inputs = input_nodes(&graph)
            .map(|node| random.normals(batch * graph.nodes[node].dims.numel()))
            .collect();
        let steps = 1;
        let alphas = (0..graph.alphas).map(|i| [0.3, 0.7, 1.0][i % 3]).collect();
        Self { graph, batch, steps, inputs, tensors, alphas }
    }

    /// A random case of sequences with `steps` steps. States have one row per sequence, indices are
    /// below `entries`, and inputs of one value per row (masks) are 0 or 1.
    pub(crate) fn sequences(graph: Graph, [steps, sequences]: [usize; 2], entries: usize) -> Self {
        let mut case = Self::random(graph, steps * sequences, 5);
        let mut random = Random(6);
        let nodes: Vec<_> = input_nodes(&case.graph).collect();
        for (input, node) in case.inputs.iter_mut().zip(nodes) {
            let node = &case.graph.nodes[node];
            match node.op {
                NodeOp::State(_) => input.truncate(sequences * node.dims.c),
                NodeOp::Indices(_) => input.fill_with(|| random.below(entries) as f32),
                _ if node.dims.c == 1 => {
                    input.fill_with(|| f32::from(u8::from(random.below(3) > 0)));
                }
                _ => {}
            }
        }
        Self { steps, ..case }
    }

    pub(crate) fn output_dims(&self) -> Dims {
        self.graph.nodes[self.graph.output.index()].dims
    }

    /// A random gradient of the output.
    pub(crate) fn output_gradient(&self, seed: u64) -> Vec<f32> {
        Random(seed).normals(self.batch * self.output_dims().numel())
    }

    /// Compiles and runs. `gradient` is the gradient of the output, for [`PlanMode::Gradient`].
    pub(crate) fn run(
        &self,
        isa: Isa,
        mode: PlanMode,
        fuse: bool,
        gradient: &[f32],
    ) -> Result<Outcome> {
        let options = PlanOptions { steps: self.steps, fuse, ..PlanOptions::new(self.batch, mode) };
        let plan = Plan::compile(&self.graph, options)?;
        let layout = ParamLayout::new(&self.graph);
        let mut memory = Groups::new(self, &layout);
        // NaN everywhere, to detect a read before the first write.
        let mut arena = vec![f32::NAN; plan.arena_len()];
        if let Some(range) = plan.output_gradient() {
            arena[range].copy_from_slice(&to_nhwc(gradient, self.output_dims()));
        }
        let inputs: Vec<Vec<f32>> = self
            .inputs
            .iter()
            .zip(input_nodes(&self.graph))
            .map(|(x, node)| match self.graph.nodes[node].op {
                NodeOp::Indices(_) => x.iter().map(|v| f32::from_bits(*v as u32)).collect(),
                _ => to_nhwc(x, self.graph.nodes[node].dims),
            })
            .collect();
        let slices: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
        let mut run = PlanMemory::new(&mut arena, &slices, &self.alphas);
        memory.push_to(&mut run);
        plan.run(isa, &mut run)?;
        drop(run);
        Ok(self.outcome(&plan, &arena, &inputs, &memory))
    }

    fn outcome(&self, plan: &Plan, arena: &[f32], inputs: &[Vec<f32>], memory: &Groups) -> Outcome {
        let graph = &self.graph;
        let mut params = BTreeMap::new();
        for (i, param) in graph.params.iter().enumerate() {
            if let Some(range) = plan.parameter_gradient(graph.param_id(i)) {
                let packed = &arena[range];
                let mut values = vec![0.0; param.shape.iter().product()];
                packing(param).unpack(packed, &mut values);
                let mut again = vec![0.0; packed.len()];
                packing(param).pack(&values, &mut again);
                assert_eq!(&again, packed, "{}: padding lanes of a gradient are zero", param.name);
                params.insert(param.name.clone(), values);
            }
        }
        let mut buffers = BTreeMap::new();
        let layout = plan.layout();
        for (buffer, place) in graph.buffers.iter().zip(&layout.buffers).filter(|(b, _)| !b.counter)
        {
            let state = &memory.state[place.group.index()];
            buffers.insert(buffer.name.clone(), state[place.range()].to_vec());
        }
        let output = plan.output();
        let output = match output.space {
            meristem_nn::plan::Space::Arena => arena[output.range()].to_vec(),
            meristem_nn::plan::Space::Input(n) => inputs[n].clone(),
            other => panic!("output in {other:?}"),
        };
        Outcome {
            output: to_nchw(&output, self.output_dims()),
            params,
            inputs: input_nodes(graph)
                .enumerate()
                .map(|(i, node)| {
                    let range = plan.input_gradient(i)?;
                    Some(to_nchw(&arena[range], graph.nodes[node].dims))
                })
                .collect(),
            states: plan.last_states().iter().map(|s| arena[s.range()].to_vec()).collect(),
            buffers,
            counters: memory.counters.iter().flatten().copied().filter(|c| *c != 0).collect(),
        }
    }
}

fn input_nodes(graph: &Graph) -> impl Iterator<Item = usize> + '_ {
    (0..graph.nodes.len()).filter(|&i| graph.nodes[i].op.input().is_some())
}

/// The packed groups of a case.
struct Groups {
    values: Vec<Vec<f32>>,
    momentum: Vec<Vec<f32>>,
    state: Vec<Vec<f32>>,
    counters: Vec<Vec<i64>>,
}

impl Groups {
    fn new(case: &Case, layout: &ParamLayout) -> Self {
        let sized = |f: fn(&meristem_nn::layout::GroupSize) -> usize| -> Vec<Vec<f32>> {
            layout.groups.iter().map(|g| vec![0.0; f(g)]).collect()
        };
        let (mut values, mut state) = (sized(|g| g.values), sized(|g| g.running_stats));
        for (param, place) in case.graph.params.iter().zip(&layout.params) {
            let to = &mut values[place.group.index()][place.range()];
            packing(param).pack(&case.tensors[&param.name], to);
        }
        for (buffer, place) in case.graph.buffers.iter().zip(&layout.buffers) {
            if !buffer.counter {
                let to = &mut state[place.group.index()][place.range()];
                to.copy_from_slice(&case.tensors[&buffer.name]);
            }
        }
        let momentum = sized(|g| g.moments);
        let counters = layout.groups.iter().map(|g| vec![0; g.counters]).collect();
        Self { values, momentum, state, counters }
    }

    fn push_to<'a>(&'a mut self, memory: &mut PlanMemory<'a>) {
        let Self { values, momentum, state, counters } = self;
        for (((values, momentum), state), counters) in
            values.iter_mut().zip(momentum).zip(state).zip(counters)
        {
            memory.push_group(GroupMemory {
                values,
                optimiser_state: momentum,
                running_stats: state,
                counters,
            });
        }
    }
}

/// Panics unless every element is within `relative` of the largest expected one, plus `absolute`.
#[track_caller]
pub(crate) fn assert_close(
    what: &str,
    got: &[f32],
    expected: &[f64],
    relative: f64,
    absolute: f64,
) {
    assert_eq!(got.len(), expected.len(), "{what}: elements");
    let largest = expected.iter().fold(0f64, |m, v| m.max(v.abs()));
    let limit = relative * largest + absolute;
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let distance = (f64::from(*g) - e).abs();
        assert!(
            distance <= limit,
            "{what}[{i}]: got {g}, expected {e}: {distance:.3e} apart, limit {limit:.3e}"
        );
    }
}

/// The CUDA device of the tests: a GPU, or a device of the stand-in driver.
#[cfg(feature = "cuda")]
pub(crate) fn cuda() -> meristem_device::Device {
    use meristem_device::{Device, DeviceId, DeviceOptions};
    Device::open(DeviceId::Cuda(0), &DeviceOptions::default()).unwrap()
}

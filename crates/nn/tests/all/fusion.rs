//! Fused passes against the same graph node by node.

use crate::common::functions::FUNCTIONS;
use crate::common::host::{self, BASELINE, DEEP, MINIMAL, Shape};
use crate::common::{Case, assert_close};
use crate::network::{self, Stage};
use meristem_nn::graph::{
    BlendMode, BlendOperands, ConvGeometry, Dims, Graph, GraphBuilder, GroupId, NodeId,
    PoolGeometry, SgdConfig, UnaryFunction,
};
use meristem_nn::kernels::conv::ConvShape;
use meristem_nn::ops::{ConvOp, PlanTarget, StepOp};
use meristem_nn::plan::{Phase, Plan, PlanMode, PlanOptions};
use meristem_nn::{Isa, Precision};

/// Both plans compute the same sums in f32 or f64, possibly in a different order: statistics of up
/// to 3·33·35 values per image or per batch. Each differs by a few ulps (1e-7), which five layers
/// of batch norm and the sums of their gradients amplify. The tolerance is twenty times that.
const RELATIVE: f64 = 1e-5;

const SGD: SgdConfig = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };

/// Counts the calls, and the bytes of device memory per sample, of a plan for CUDA. A step of a
/// fleet is one graph, with a node for each call and topology.
#[test]
fn a_plan_for_cuda_is_few_calls_and_little_traffic() {
    let dims = Dims { c: 3, h: 32, w: 32 };
    let graph = host::bare(BASELINE, dims);
    let cost = |precision, mode: PlanMode, fuse| {
        let options = PlanOptions::new(128, mode);
        let options = PlanOptions { target: PlanTarget::Cuda, fuse, precision, ..options };
        let traffic = Plan::compile(&graph, options).unwrap().traffic();
        (traffic.len(), traffic.iter().map(|(_, bytes)| bytes).sum::<usize>() / 128)
    };
    for of in Precision::ALL {
        let (calls, bytes) = cost(of, PlanMode::Train, true);
        // On tensor cores tiles are smaller, so there are more partial sums.
        // With values of bf16 the images are converted first, and the logits and their gradient.
        let (most, most_evaluating) = match of {
            Precision::F32 => ((13, 290_000), (5, 130_000)),
            Precision::Tf32 => ((13, 293_000), (5, 130_000)),
            Precision::Bf16 => ((16, 173_000), (7, 85_000)),
        };
        assert!(calls <= most.0 && bytes <= most.1, "{of}: {calls} calls, {bytes} bytes");
        let ((calls, bytes), most) = (cost(of, PlanMode::Evaluate, true), most_evaluating);
        assert!(calls <= most.0 && bytes <= most.1, "{of}: {calls} calls, {bytes} bytes");
    }
    let (calls, bytes) = cost(Precision::F32, PlanMode::Train, false);
    assert!(calls > 40 && bytes > 520_000, "without fusion: {calls} calls, {bytes} bytes");
}

/// Values of bf16 take half of the memory and half of the traffic of f32, apart from parameters,
/// partial sums and what is converted: in a host with modules, with and without fusion.
#[test]
fn bf16_halves_memory_and_traffic() {
    let dims = Dims { c: 3, h: 32, w: 32 };
    let host = host::bare(BASELINE, dims);
    let slots = ["r0c0", "r1c1"];
    let grown = network::grown(BASELINE, dims, &slots, Stage::Blending(BlendMode::Gate));
    for (graph, fuse) in [(&host, true), (&host, false), (&grown, true), (&grown, false)] {
        let of = |precision, mode: PlanMode| {
            let options = PlanOptions::new(128, mode);
            let options = PlanOptions { target: PlanTarget::Cuda, fuse, precision, ..options };
            let plan = Plan::compile(graph, options).unwrap();
            let bytes = plan.traffic().iter().map(|(_, bytes)| bytes).sum::<usize>();
            [plan.arena_len() as f64 * 4.0 / 128.0, bytes as f64 / 128.0]
        };
        for mode in [PlanMode::Train, PlanMode::Evaluate] {
            let [f32, bf16] = [Precision::F32, Precision::Bf16].map(|of_| of(of_, mode.clone()));
            for (f32, bf16) in f32.into_iter().zip(bf16) {
                assert!(bf16 < 0.67 * f32, "{mode:?}, fused {fuse}: {f32} and {bf16} bytes");
            }
        }
    }
}

/// Fused convolutions are for devices on which memory traffic is the cost; a processor runs
/// separate passes.
#[test]
fn plans_of_a_processor_have_no_fused_convolutions() {
    let graph = host::bare(BASELINE, Dims { c: 3, h: 32, w: 32 });
    let has = |target, fuse| {
        let options = PlanOptions { target, fuse, ..PlanOptions::new(8, PlanMode::Train) };
        Plan::compile(&graph, options).unwrap().describe().contains("Fused(")
    };
    assert!(has(PlanTarget::Cuda, true));
    assert!(!has(PlanTarget::Cpu, true) && !has(PlanTarget::Cuda, false));
}

fn check(graph: Graph, batch: usize) {
    let case = Case::random(graph, batch, 3);
    let gradient = case.output_gradient(4);
    for isa in Isa::available() {
        for mode in [PlanMode::Gradient, PlanMode::Infer] {
            let [fused, plain] =
                [true, false].map(|fuse| case.run(isa, mode.clone(), fuse, &gradient).unwrap());
            // A gradient that is zero by construction (a 1×1 convolution of one channel before a
            // batch norm, which cancels any scale) is a difference of terms that are as large as
            // other gradients.
            let scale = plain.params.values().flatten().fold(0f32, |m, v| m.max(v.abs()));
            let absolute = 1e-7 + RELATIVE * f64::from(scale);
            let wide = |v: &[f32]| v.iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
            let close = |what: &str, a: &[f32], b: &[f32]| {
                let what = format!("{what} ({isa}, {mode:?}, batch {batch})");
                assert_close(&what, a, &wide(b), RELATIVE, absolute);
            };
            close("output", &fused.output, &plain.output);
            assert_eq!(fused.params.len(), plain.params.len());
            for (name, values) in &fused.params {
                close(name, values, &plain.params[name]);
            }
            for (name, values) in &fused.buffers {
                close(name, values, &plain.buffers[name]);
            }
            assert_eq!(fused.counters, plain.counters);
        }
    }
}

#[test]
fn fused_is_unfused() {
    let check = |shape: Shape, dims, batch| check((*host::bare(shape, dims)).clone(), batch);
    for batch in [1, 3, 5] {
        check(BASELINE, Dims { c: 3, h: 17, w: 14 }, batch);
        check(MINIMAL, Dims { c: 1, h: 6, w: 5 }, batch);
    }
    check(DEEP, Dims { c: 3, h: 33, w: 35 }, 3);
}

/// A host with a module that is blended in before the pooling; the module's input may be detached.
fn grown(detached: bool) -> Graph {
    let mut b = GraphBuilder::new(Dims { c: 3, h: 16, w: 16 }, SGD);
    let same = ConvGeometry::same(3);
    let x = b.conv2d(b.input(), "conv", 8, same, false).unwrap();
    let x = b.batch_norm(x, "bn").unwrap();
    let host = b.relu(x);
    b.group("module", SGD);
    let input = if detached { b.detach(host) } else { host };
    let x = b.conv2d(input, "module.0", 8, same, false).unwrap();
    let x = b.group_norm(x, "module.1", 2, 1.0).unwrap();
    let x = b.relu(x);
    let x = b.conv2d(x, "module.3", 8, ConvGeometry { groups: 8, ..same }, false).unwrap();
    let x = b.group_norm(x, "module.4", 1, 0.5).unwrap();
    let module = b.add(input, x).unwrap();
    b.resume_group(GroupId::HOST);
    let x = b.blend(BlendMode::Add, 0, BlendOperands { host, module, input, gate: None }).unwrap();
    let x = b.max_pool2d(x, "pool", 2, 2).unwrap();
    let x = b.conv2d(x, "next", 16, same, false).unwrap();
    let x = b.batch_norm(x, "next.bn").unwrap();
    let x = b.relu(x);
    let x = b.global_avg_pool(x);
    let y = b.linear(x, "fc", 4, true, None).unwrap();
    b.finish(y).unwrap()
}

/// A batch of several blocks, the last of which is smaller, and of several parts.
#[test]
fn rows_of_steps_go_through_a_batch_in_blocks() {
    for detached in [true, false] {
        let graph = grown(detached);
        let chains = |mode, fuse| {
            let options = PlanOptions { fuse, ..PlanOptions::new(101, mode) };
            Plan::compile(&graph, options).unwrap().describe().matches("Chain(").count()
        };
        assert_eq!(
            chains(PlanMode::Infer, true),
            1,
            "all but the linear layer, detached: {detached}"
        );
        assert!(chains(PlanMode::Train, true) >= 3, "detached: {detached}");
        // The module's gradients share one buffer, and the pooling's gradient joins their row.
        let plan =
            Plan::compile(&graph, PlanOptions::new(101, PlanMode::Train)).unwrap().describe();
        let backwards =
            |line: &str| line.contains("MaxGradient") && line.matches("GroupGradient").count() == 2;
        assert!(plan.lines().any(backwards), "detached: {detached}: {plan}");
        assert_eq!(chains(PlanMode::Train, false), 0);
        check(graph, 101);
    }
}

/// Every function joins the chains that ReLU joins, forward and backward.
#[test]
fn functions_join_the_chains_of_their_neighbours() {
    let graph = |function| {
        let mut b = GraphBuilder::new(Dims { c: 8, h: 16, w: 16 }, SGD);
        let x = b.conv2d(b.input(), "conv", 8, ConvGeometry::same(3), false).unwrap();
        let x = b.group_norm(x, "norm", 2, 1.0).unwrap();
        let x = apply(&mut b, function, x);
        let x = b.conv2d(x, "next", 8, ConvGeometry::same(3), false).unwrap();
        let x = b.global_avg_pool(x);
        let y = b.linear(x, "fc", 4, true, None).unwrap();
        b.finish(y).unwrap()
    };
    let chains = |graph: &Graph, function: UnaryFunction| -> Vec<String> {
        let plan = Plan::compile(graph, PlanOptions::new(101, PlanMode::Train)).unwrap().describe();
        let chains = plan.lines().filter(|line| line.contains("Chain("));
        chains.map(|line| line.replace(&format!("{function:?}"), "f")).collect()
    };
    let relu = chains(&graph(UnaryFunction::Relu), UnaryFunction::Relu);
    for step in ["Forward { function: f", "Gradient { function: f"] {
        assert!(relu.iter().any(|chain| chain.contains(step)), "{step}: {relu:?}");
    }
    for function in FUNCTIONS {
        let graph = graph(function);
        let found = chains(&graph, function);
        assert_eq!(found.len(), relu.len(), "{function:?}");
        for (found, relu) in found.iter().zip(&relu) {
            for step in ["ConvOp", "Forward {", "Gradient {", "GroupForward", "GroupGradient"] {
                let count = |chain: &str| chain.matches(step).count();
                assert_eq!(count(found), count(relu), "{step}: {found}");
            }
        }
        check(graph, 101);
    }
}

/// Adds a function.
fn apply(b: &mut GraphBuilder, function: UnaryFunction, x: NodeId) -> NodeId {
    match function {
        UnaryFunction::Relu => b.relu(x),
        UnaryFunction::Sigmoid => b.sigmoid(x),
        UnaryFunction::Tanh => b.tanh(x),
        UnaryFunction::LeakyRelu { slope } => b.leaky_relu(x, slope).unwrap(),
        UnaryFunction::Elu => b.elu(x),
        UnaryFunction::Gelu => b.gelu(x),
        UnaryFunction::GeluTanh => b.gelu_tanh(x),
        UnaryFunction::Silu => b.silu(x),
        UnaryFunction::Softplus => b.softplus(x),
        UnaryFunction::HardSwish => b.hard_swish(x),
    }
}

/// Branches over pooling windows, joined by a product and by their channels, and flattened: their
/// steps go through a batch in blocks, except the concatenation.
#[test]
fn branches_go_through_a_batch_in_blocks() {
    let mut b = GraphBuilder::new(Dims { c: 3, h: 24, w: 22 }, SGD);
    let apart = ConvGeometry::same(3).padding([2; 2]).dilation([2; 2]);
    let x = b.conv2d(b.input(), "conv", 8, apart, true).unwrap();
    let window = PoolGeometry::square(3, 2).padded([1; 2]);
    let most = b.max_pool2d_with(x, "max", window).unwrap();
    let mean = b.avg_pool2d(x, "mean", window).unwrap();
    let gate = b.conv2d(mean, "gate", 8, ConvGeometry::same(1), true).unwrap();
    let gate = b.sigmoid(gate);
    let product = b.multiply(most, gate).unwrap();
    let all = b.concat(&[product, mean]).unwrap();
    let all = b.tanh(all);
    let all = b.flatten(all);
    let y = b.linear(all, "fc", 4, true, None).unwrap();
    let graph = b.finish(y).unwrap();
    let in_chains = |mode, names: &[&str]| {
        let plan = Plan::compile(&graph, PlanOptions::new(101, mode)).unwrap().describe();
        for name in names {
            let found = plan.lines().any(|line| line.contains("Chain(") && line.contains(name));
            assert!(found, "{name} in a chain: {plan}");
        }
    };
    in_chains(PlanMode::Infer, &["Max(", "WindowAverage(", "Product", "Transpose"]);
    in_chains(PlanMode::Train, &["MaxGradient", "WindowAverageGradient", "Product", "Transpose"]);
    check(graph, 101);
}

/// Products that are large enough for several parts, in a smaller last block.
#[test]
fn a_smaller_block_has_scratch_enough() {
    let mut b = GraphBuilder::new(Dims { c: 32, h: 12, w: 12 }, SGD);
    let x = b.conv2d(b.input(), "conv", 32, ConvGeometry::same(7), true).unwrap();
    let x = b.relu(x);
    let x = b.global_avg_pool(x);
    let y = b.linear(x, "fc", 3, true, None).unwrap();
    // Seven parts of ten samples, and one of eight.
    let case = Case::random(b.finish(y).unwrap(), 78, 3);
    let gradient = case.output_gradient(4);
    let isa = *Isa::available().last().unwrap();
    for mode in [PlanMode::Infer, PlanMode::Gradient] {
        let [fused, plain] =
            [true, false].map(|fuse| case.run(isa, mode.clone(), fuse, &gradient).unwrap());
        assert_eq!(fused.output, plain.output, "each sample has its own sums");
    }
}

/// Gradients of a host whose second block reads the input of a module in training have the same
/// bits as without the module.
#[test]
fn a_host_beside_a_module_in_training_has_the_bits_that_it_has_alone() {
    for norm in [true, false] {
        bits_beside_a_module(norm);
    }
}

/// Without the norms, only a module separates the gradients of the host's layers.
fn bits_beside_a_module(norm: bool) {
    let graph = |module: bool| {
        let mut b = GraphBuilder::new(Dims { c: 3, h: 32, w: 32 }, SGD);
        let mut x = b.input();
        for (i, out) in [8, 12].into_iter().enumerate() {
            let same = ConvGeometry::same(3);
            x = b.conv2d(x, &format!("{i}.conv"), out, same, false).unwrap();
            if norm {
                x = b.batch_norm(x, &format!("{i}.bn")).unwrap();
            }
            x = b.relu(x);
            if module && i == 0 {
                b.group("module", SGD);
                let input = b.detach(x);
                let y = b.conv2d(input, "module.0", 8, same, false).unwrap();
                let y = b.group_norm(y, "module.1", 1, 0.5).unwrap();
                let y = b.add(input, y).unwrap();
                b.resume_group(GroupId::HOST);
                x = b.straight_through(x, y).unwrap();
            }
            x = b.max_pool2d(x, "pool", 2, 2).unwrap();
        }
        let x = b.global_avg_pool(x);
        let y = b.linear(x, "fc", 4, true, None).unwrap();
        b.finish(y).unwrap()
    };
    let isa = *Isa::available().last().unwrap();
    let alone = Case::random(graph(false), 70, 3);
    let mut beside = Case::random(graph(true), 70, 3);
    beside.inputs = alone.inputs.clone();
    beside.tensors.extend(alone.tensors.clone());
    let run =
        |case: &Case| case.run(isa, PlanMode::Gradient, true, &alone.output_gradient(4)).unwrap();
    let (alone, beside) = (run(&alone), run(&beside));
    assert_eq!(alone.output, beside.output);
    for (name, values) in &alone.params {
        assert_eq!(values, &beside.params[name], "{name}");
    }
}

/// Batch norm of vectors takes its statistics from the linear layer before it.
#[test]
fn a_linear_layer_is_fused_with_its_batch_norm() {
    let mut b = GraphBuilder::new(Dims { c: 5, h: 1, w: 1 }, SGD);
    let x = b.linear(b.input(), "fc", 20, true, None).unwrap();
    let x = b.batch_norm(x, "bn").unwrap();
    let x = b.relu(x);
    let y = b.linear(x, "out", 3, true, None).unwrap();
    let graph = b.finish(y).unwrap();
    [2, 130].into_iter().for_each(|batch| check(graph.clone(), batch));
}

/// The samples of a linear layer are the pixels of one image, so a sum can cover more samples than
/// a block of images has pixels. Any other shape gives different bits.
#[test]
fn a_linear_layer_is_one_image_of_its_samples() {
    let mut b = GraphBuilder::new(Dims { c: 5, h: 1, w: 1 }, SGD);
    let y = b.linear(b.input(), "fc", 3, true, None).unwrap();
    let graph = b.finish(y).unwrap();
    let plan = Plan::compile(&graph, PlanOptions::new(1000, PlanMode::Train)).unwrap();
    let shape = |op: &StepOp| match *op {
        StepOp::Conv(ConvOp::Forward(of) | ConvOp::WeightGradient(of)) => Some(of.shape),
        _ => None,
    };
    let steps = plan.steps(Phase::Forward..=Phase::Backward);
    let shapes: Vec<_> = steps.iter().filter_map(|step| shape(&step.op)).collect();
    assert_eq!(shapes, [ConvShape::linear(1000, 5, 3); 2]);
}

#[test]
fn fusion_shortens_the_plan_and_the_arena() {
    let graph = host::bare(BASELINE, Dims { c: 3, h: 32, w: 32 });
    let plan = |fuse| {
        let options = PlanOptions { fuse, ..PlanOptions::new(8, PlanMode::Train) };
        Plan::compile(&graph, options).unwrap()
    };
    let (fused, plain) = (plan(true), plan(false));
    assert!(fused.len() < plain.len() && fused.arena_len() < plain.arena_len());
    assert!(fused.describe().contains("ForwardWithStats"));
}

//! Time of every step of a host's plan in training or in validation, on a worker that has no other
//! or one to help it.
//!
//! `cargo bench -p meristem-nn --bench steps --
//! [baseline|grown|wide|deep|large|resnet8|mobile] [train|validate] [direct] [one] [two]`;
//! `MERISTEM_ISA` picks the instruction set, `direct` switches Winograd's filtering off, `one` runs
//! one network instead of four, and `two` adds a second worker, which runs parts of kernels.
//! `grown` is `baseline` with `conv_heavy` and `depthwise` blended in and `attention` in training.
//! Without `one`, four networks take turns, as envs do. The bench first measures the core's peaks,
//! from which the lower bounds follow.

use std::hint::black_box;
use std::sync::mpsc;
use std::time::Instant;

use meristem_device::{Args, Device, DeviceId, DeviceOptions};
use meristem_nn::graph::{
    BlendMode, BlendOperands, ConvGeometry, Dims, Graph, GraphBuilder, GroupId, NodeId, SgdConfig,
};
use meristem_nn::kernels::Isa;
use meristem_nn::kernels::conv::{self, ConvInputs, ConvShape};
use meristem_nn::profile::{StepTime, Turns, profile};
use meristem_nn::{PlanMode, PlanOptions};

const BATCH: usize = 128;

const SGD: SgdConfig = SgdConfig { lr: 0.01, momentum: 0.9, weight_decay: 5e-4, clip_norm: 1.0 };

/// Channels of the first block, and blocks, each of which pools.
const HOSTS: [(&str, usize, usize); 5] =
    [("baseline", 8, 3), ("grown", 8, 3), ("wide", 16, 3), ("deep", 8, 5), ("large", 32, 3)];

/// A host; `slot` continues in front of the pooling of each block.
fn host(
    channels: usize,
    blocks: usize,
    slot: impl Fn(&mut GraphBuilder, usize, NodeId) -> NodeId,
) -> Graph {
    let mut b = GraphBuilder::new(Dims { c: 3, h: 32, w: 32 }, SGD);
    let mut x = b.input();
    for i in 0..blocks {
        let conv = format!("blocks.{i}.conv");
        x = b.conv2d(x, &conv, channels << i, ConvGeometry::same(3), false).expect("fits");
        x = b.batch_norm(x, &format!("blocks.{i}.bn")).expect("fits");
        x = b.relu(x);
        x = slot(&mut b, i, x);
        x = b.max_pool2d(x, "pool", 2, 2).expect("fits");
    }
    let x = b.global_avg_pool(x);
    let y = b.linear(x, "classifier", 10, true, None).expect("fits");
    b.finish(y).expect("a graph")
}

/// The three live modules of `grown`, with the layers of their blueprints.
fn grow(b: &mut GraphBuilder, block: usize, host: NodeId) -> NodeId {
    b.group(&format!("r0c{block}"), SGD);
    let (input, c) = (b.detach(host), b.dims(host).c);
    let name = |layer: &str| format!("slots.r0c{block}.{layer}");
    let conv = |b: &mut GraphBuilder, x, layer: &str, kernel, groups| {
        let geometry = ConvGeometry { groups, ..ConvGeometry::same(kernel) };
        b.conv2d(x, &name(layer), c, geometry, false).expect("fits")
    };
    let norm =
        |b: &mut GraphBuilder, x, layer: &str| b.group_norm(x, &name(layer), 1, 1.0).expect("fits");
    let module = match block {
        0 => {
            let x = conv(b, input, "conv1", 3, 1);
            let x = norm(b, x, "norm1");
            let x = b.relu(x);
            let x = conv(b, x, "conv2", 3, 1);
            let x = norm(b, x, "norm2");
            b.add(input, x).expect("fits")
        }
        1 => {
            let x = conv(b, input, "depthwise", 3, c);
            let x = conv(b, x, "pointwise", 1, 1);
            let x = norm(b, x, "norm");
            b.add(input, x).expect("fits")
        }
        _ => {
            let x = b.global_avg_pool(input);
            let x = b.linear(x, &name("down"), c / 4, false, None).expect("fits");
            let x = b.relu(x);
            let x = b.linear(x, &name("up"), c, true, None).expect("fits");
            let x = b.sigmoid(x);
            b.scale_channels(input, x, 2.0).expect("fits")
        }
    };
    b.resume_group(GroupId::HOST);
    if block == 2 {
        return b.straight_through(host, module).expect("fits");
    }
    let inputs = BlendOperands { host, module, input, gate: None };
    b.blend(BlendMode::Add, block, inputs).expect("fits")
}

/// A convolution with half of its kernel as padding, and batch norm.
fn conv_norm(b: &mut GraphBuilder, x: NodeId, name: &str, c: usize, of: ConvGeometry) -> NodeId {
    let x = b.conv2d(x, name, c, of, false).expect("fits");
    b.batch_norm(x, &format!("{name}.norm")).expect("fits")
}

/// The ready-made host `resnet8`.
fn resnet8() -> Graph {
    let mut b = GraphBuilder::new(Dims { c: 3, h: 32, w: 32 }, SGD);
    let b_in = b.input();
    let x = conv_norm(&mut b, b_in, "stem", 16, ConvGeometry::same(3));
    let mut x = b.relu(x);
    for (i, (c, stride)) in [(16, 1), (32, 2), (64, 2)].into_iter().enumerate() {
        let strided = |kernel| ConvGeometry { stride: [stride; 2], ..ConvGeometry::same(kernel) };
        let y = conv_norm(&mut b, x, &format!("{i}.first"), c, strided(3));
        let y = b.relu(y);
        let y = conv_norm(&mut b, y, &format!("{i}.second"), c, ConvGeometry::same(3));
        let shortcut = match stride {
            1 => x,
            _ => conv_norm(&mut b, x, &format!("{i}.shortcut"), c, strided(1)),
        };
        let y = b.add(y, shortcut).expect("fits");
        x = b.relu(y);
    }
    classify(b, x)
}

/// The ready-made host `mobile`.
fn mobile() -> Graph {
    let mut b = GraphBuilder::new(Dims { c: 3, h: 32, w: 32 }, SGD);
    let b_in = b.input();
    let x = conv_norm(&mut b, b_in, "stem", 16, ConvGeometry::same(3));
    let mut x = b.relu(x);
    let blocks = [(16, 1, 32), (32, 2, 64), (64, 1, 64), (64, 2, 128), (128, 1, 128)];
    for (i, (c, stride, out)) in blocks.into_iter().enumerate() {
        let of = ConvGeometry { stride: [stride; 2], groups: c, ..ConvGeometry::same(3) };
        x = conv_norm(&mut b, x, &format!("{i}.depthwise"), c, of);
        x = b.relu(x);
        x = conv_norm(&mut b, x, &format!("{i}.pointwise"), out, ConvGeometry::same(1));
        x = b.relu(x);
    }
    classify(b, x)
}

fn classify(mut b: GraphBuilder, x: NodeId) -> Graph {
    let x = b.global_avg_pool(x);
    let y = b.linear(x, "classifier", 10, true, None).expect("fits");
    b.finish(y).expect("a graph")
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| arguments.iter().any(|a| a == name);
    let isa = Isa::from_env().unwrap_or_else(|e| panic!("{e}"));
    let (peak, copy) = (multiply_add_peak(isa), copy_bandwidth());
    println!("{isa}: {peak:.0} GFLOP/s in full tiles, {copy:.0} GB/s read and written");
    let with_blocks = HOSTS.iter().map(|&(name, channels, blocks)| {
        let grown = name == "grown";
        let slot = move |b: &mut GraphBuilder, i, x| if grown { grow(b, i, x) } else { x };
        (name, host(channels, blocks, slot))
    });
    let all: Vec<(&str, Graph)> =
        with_blocks.chain([("resnet8", resnet8()), ("mobile", mobile())]).collect();
    for (name, graph) in &all {
        let name = *name;
        if !has(name) && all.iter().any(|(name, _)| has(name)) {
            continue;
        }
        for (kind, mode) in [("train", PlanMode::Train), ("validate", PlanMode::Evaluate)] {
            if !has(kind) && (has("train") || has("validate")) {
                continue;
            }
            let options = PlanOptions::new(BATCH, mode);
            let options = PlanOptions { winograd: !has("direct"), ..options };
            let (rounds, batches) =
                (if name == "large" { 4 } else { 12 }, if has("alone") { 1 } else { 4 });
            let turns = Turns { networks: if has("one") { 1 } else { 4 }, batches, rounds };
            let run = profile_on(if has("two") { 2 } else { 1 }, graph, options, isa, turns);
            let steps = run.expect("a plan");
            let total: f64 = steps.iter().map(|step| step.seconds).sum();
            println!("\n{name} {kind}: {:.1} µs an image", total * 1e6 / BATCH as f64);
            for step in steps.iter().filter(|step| step.seconds > 0.002 * total) {
                let seconds = step.seconds;
                let floor = (step.flops / peak / 1e9).max(step.bytes as f64 / copy / 1e9);
                println!(
                    "{:<44} {:>9.1} µs {:>5.1} % {:>7.1} GFLOP/s {:>6.1} GB/s  floor {:>8.1} µs",
                    step.name(),
                    seconds * 1e6,
                    100.0 * seconds / total,
                    step.flops / seconds / 1e9,
                    step.bytes as f64 / seconds / 1e9,
                    floor * 1e6,
                );
            }
        }
    }
}

/// [`profile`] on one of a device's workers.
fn profile_on(
    workers: usize,
    graph: &Graph,
    options: PlanOptions,
    isa: Isa,
    turns: Turns,
) -> meristem_nn::Result<Vec<StepTime>> {
    let with = DeviceOptions { threads: workers, ..Default::default() };
    let device = Device::open(DeviceId::Cpu(0), &with).expect("a device");
    let (graph, (send, receive)) = (graph.clone(), mpsc::sync_channel(1));
    let kernel = move |_: &mut Args<'_>| {
        let steps = profile(&graph, options, isa, turns);
        send.send(steps).expect("the receiver waits");
    };
    device.stream("profile").launch("profile").run(kernel).expect("a launch");
    receive.recv().expect("the kernel sends")
}

/// GFLOP/s of a product in full tiles, with weights in the first-level cache.
fn multiply_add_peak(isa: Isa) -> f64 {
    let [rows, depth, cols] = [112, 256, 32];
    let shape = ConvShape::linear(rows, depth, cols);
    let [x, w] = [rows * depth, depth * cols].map(|len| vec![0.5f32; len]);
    let (mut y, mut scratch) = (vec![0.0; rows * cols], vec![0.0; shape.scratch_len()]);
    let flops = 2.0 * (rows * depth * cols) as f64;
    let mut run = || {
        let of = ConvInputs { x: &x, w: &w, bias: &[] };
        conv::forward(isa, &shape, black_box(&of), &mut y, &mut scratch);
    };
    best(2000, &mut run, flops)
}

/// GB/s of a copy between memories that are larger than the second-level cache: bytes read and
/// written.
fn copy_bandwidth() -> f64 {
    let from = vec![1.0f32; 1 << 20];
    let mut to = vec![0.0f32; 1 << 20];
    let mut run = || {
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
    };
    best(200, &mut run, 8.0 * (1 << 20) as f64)
}

fn best(times: usize, run: &mut dyn FnMut(), work: f64) -> f64 {
    let mut least = f64::INFINITY;
    for _ in 0..times {
        let start = Instant::now();
        run();
        least = least.min(start.elapsed().as_secs_f64());
    }
    work / least / 1e9
}

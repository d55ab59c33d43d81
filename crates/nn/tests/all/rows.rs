//! Many rows of alphas in one pass, compared with one pass per row (C1 to C3).

use std::sync::Arc;

use crate::common::Random;
use crate::common::host::{self, BASELINE, Shape};
use meristem_device::{Owner, Stream, Tensor};
use meristem_nn::graph::{
    BlendMode, BlendOperands, ConvGeometry, Dims, Graph, GraphBuilder, GroupId, NodeId,
};
use meristem_nn::{Error, HostTensor, Isa, Metrics, Network, NetworkOptions};

const DIMS: Dims = Dims { c: 3, h: 16, w: 16 };
const SLOTS: [&str; 3] = ["r0c0", "r1c1", "r0c2"];
const MODES: [BlendMode; 3] = [BlendMode::Add, BlendMode::Multiply, BlendMode::Gate];

/// x + GN(3×3(x)), in its own group, mixed in by `mode`.
fn module(b: &mut GraphBuilder, slot: usize, x: NodeId, mode: BlendMode) -> NodeId {
    let name = format!("slots.{}", SLOTS[slot]);
    b.group(&name, host::SGD);
    let (c, input) = (b.dims(x).c, b.detach(x));
    let y = b.conv2d(input, &format!("{name}.0"), c, ConvGeometry::same(3), false).unwrap();
    let y = b.group_norm(y, &format!("{name}.1"), 4, 1.0).unwrap();
    let m = b.add(input, y).unwrap();
    let gate = (mode == BlendMode::Gate).then(|| {
        let g = b.global_avg_pool(input);
        let g = b.linear(g, &format!("{name}.gate"), 1, true, None).unwrap();
        b.sigmoid(g)
    });
    let mixed = b.blend(mode, slot, BlendOperands { host: x, module: m, input, gate }).unwrap();
    b.resume_group(GroupId::HOST);
    mixed
}

/// A host with a module of each blend mode.
fn graph(shape: Shape) -> Arc<Graph> {
    host::graph(shape, DIMS, |b, name, x| {
        let slot = SLOTS.iter().position(|slot| *slot == name);
        slot.map_or(x, |slot| module(b, slot, x, MODES[slot]))
    })
}

fn network(stream: &Stream, graph: &Arc<Graph>) -> Network {
    let options = NetworkOptions::new(3, 0, Isa::detect(), 16);
    Network::new(stream, Arc::clone(graph), options).unwrap()
}

fn batch(stream: &Stream, n: usize, seed: u64) -> (Tensor, Tensor) {
    let mut random = Random(seed);
    let x = random.normals(n * DIMS.numel());
    let y: Vec<u32> = (0..n).map(|_| random.below(10) as u32).collect();
    (host::images(stream, &x, DIMS), host::labels(stream, &y))
}

/// All subsets of the three modules, at these alphas.
fn subsets(alphas: [f32; 3]) -> Vec<Vec<f32>> {
    let on = |row: usize, slot: usize| if row >> slot & 1 == 1 { alphas[slot] } else { 0.0 };
    (0..8).map(|row| (0..3).map(|slot| on(row, slot)).collect()).collect()
}

/// Loss sum as bits, hits, samples of each row.
type Rows = Vec<(u64, u64, u64)>;

fn read(network: &Network, rows: usize) -> Rows {
    let metrics = Metrics::parse(&network.metrics().to_vec().unwrap());
    let row = |m: &meristem_nn::EvalMetrics| (m.loss_sum.to_bits(), m.correct, m.samples);
    network.reset_metrics().unwrap();
    metrics.eval[..rows].iter().map(row).collect()
}

/// Scores of the rows in one pass, and in one pass per row.
fn both(network: &mut Network, batches: &[(Tensor, Tensor)], rows: usize) -> [Rows; 2] {
    for (x, y) in batches {
        network.eval_rows(x, y, 0..rows).unwrap();
    }
    let together = read(network, rows);
    for (x, y) in batches {
        (0..rows).for_each(|row| network.eval_step(x, y, row).unwrap());
    }
    [together, read(network, rows)]
}

#[test]
fn one_pass_is_a_pass_for_each_row_bit_for_bit() {
    let stream = host::stream(1);
    let mut network = network(&stream, &graph(BASELINE));
    let batches = [batch(&stream, 16, 1), batch(&stream, 5, 2)];
    let mut rows = subsets([1.0, 0.25, 0.7]);
    // Repeated rows, and rows with other alphas.
    rows.extend([rows[3].clone(), vec![0.5, 0.25, -0.0], vec![0.5, 0.3, 0.7]]);
    network.set_alphas(&rows).unwrap();
    let [together, apart] = both(&mut network, &batches, rows.len());
    assert_eq!(together, apart);
    assert_eq!(together[3], together[8]);
    let mut losses: Vec<u64> = together.iter().map(|row| row.0).collect();
    losses.sort_unstable();
    losses.dedup();
    assert_eq!(losses.len(), 10, "every other row has a different loss");
    // A range that does not start at row 0.
    let (x, y) = &batches[0];
    network.eval_rows(x, y, 3..9).unwrap();
    let some = read(&network, 11);
    (3..9).for_each(|row| network.eval_step(x, y, row).unwrap());
    assert_eq!(some, read(&network, 11));
    assert_eq!((some[2].2, some[3].2, some[8].2, some[9].2), (0, 16, 16, 0));
}

/// Differences of loss from the first row, against the losses of single images: a pass over batches
/// of one image leaves each loss in a separate metric. Losses are f32 where they are compared: an
/// error of 2⁻²⁴ of about 3, and as much from sums in another order, is below 1e-6.
#[test]
fn differences_of_loss_are_paired_by_image() {
    let stream = host::stream(1);
    let mut network = network(&stream, &graph(BASELINE));
    let mut rows = subsets([1.0, 0.25, 0.7]);
    rows.reverse();
    network.set_alphas(&rows).unwrap();
    const IMAGES: usize = 12;
    let mut random = Random(4);
    let x = random.normals(IMAGES * DIMS.numel());
    let y: Vec<u32> = (0..IMAGES).map(|_| random.below(10) as u32).collect();
    let part = |from: usize, to: usize| {
        let numel = DIMS.numel();
        let images = host::images(&stream, &x[from * numel..to * numel], DIMS);
        (images, host::labels(&stream, &y[from..to]))
    };
    // The first row of the range is the reference of the differences: row 0, which is not the first
    // leaf in tree order, or another row.
    for first in [0, 3] {
        let mut losses = vec![vec![]; rows.len()];
        for image in 0..IMAGES {
            let (x, y) = part(image, image + 1);
            (first..rows.len()).for_each(|row| network.eval_step(&x, &y, row).unwrap());
            let metrics = Metrics::parse(&network.metrics().to_vec().unwrap());
            network.reset_metrics().unwrap();
            losses.iter_mut().zip(&metrics.eval).for_each(|(all, row)| all.push(row.loss_sum));
        }
        for (from, to) in [(0, 7), (7, IMAGES)] {
            let (x, y) = part(from, to);
            network.eval_rows(&x, &y, first..rows.len()).unwrap();
        }
        let metrics = Metrics::parse(&network.metrics().to_vec().unwrap());
        network.reset_metrics().unwrap();
        let n = IMAGES as f64;
        for row in first..rows.len() {
            let both = losses[row].iter().zip(&losses[first]);
            let differences: Vec<f64> = both.map(|(own, main)| own - main).collect();
            let mean = differences.iter().sum::<f64>() / n;
            let variance: f64 =
                differences.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / (n - 1.0) / n;
            let paired = metrics.eval[row].loss_over(&metrics.eval[first]).unwrap();
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 + 1e-4 * b.abs();
            let context = format!("row {row} from {first}: {paired:?}, {mean} ± {variance:e}²");
            if row == first {
                assert_eq!((paired.difference, paired.standard_error), (0.0, 0.0))
            } else {
                assert!(near(paired.difference, mean), "{context}");
                assert!(near(paired.standard_error, variance.sqrt()), "{context}");
                assert!(variance > 1e-12, "{context}");
            }
        }
    }
    let none = meristem_nn::EvalMetrics::default();
    assert_eq!(none.loss_over(&none), None);
}

/// A module with alpha 0 has no effect, whatever its weights.
#[test]
fn a_module_of_nan_at_alpha_zero_is_left_out() {
    let stream = host::stream(1);
    let mut network = network(&stream, &graph(BASELINE));
    let batches = [batch(&stream, 8, 1)];
    network.set_alphas(&subsets([1.0; 3])).unwrap();
    let [sound, _] = both(&mut network, &batches, 8);
    let mut state = network.state_dict().unwrap();
    for slot in SLOTS {
        let name = format!("slots.{slot}.0.weight");
        let shape = state.get(&name).unwrap().shape.clone();
        // Loading refuses NaN; sums of such weights are infinite, and their norm is NaN.
        let values = vec![f32::MAX; shape.iter().product()];
        state.insert(&*name, HostTensor::f32(&shape, values));
    }
    network.load_state_dict(&state, true).unwrap();
    let [together, apart] = both(&mut network, &batches, 8);
    assert_eq!(together[0], sound[0], "all off");
    assert_eq!(apart[0], sound[0]);
    for row in 1..8 {
        let losses = [together[row].0, apart[row].0].map(f64::from_bits);
        assert!(losses.iter().all(|loss| loss.is_nan()), "row {row}: {losses:?}");
        assert_eq!(together[row].1, apart[row].1, "hits of row {row}");
    }
}

/// H1, H4, D5: a batch is one launch. A new pattern of zeros compiles a plan; other changes of
/// alphas do not.
#[test]
fn memory_is_flat_and_a_batch_is_one_launch() {
    let stream = host::stream(2);
    let mut network = network(&stream, &graph(BASELINE));
    let batches = [16, 16, 3].map(|n| batch(&stream, n, n as u64));
    let epoch = |network: &mut Network, alphas: [f32; 3]| {
        network.set_alphas(&subsets(alphas)).unwrap();
        for (x, y) in &batches {
            network.eval_rows(x, y, 0..8).unwrap();
        }
    };
    // Each pattern once: three modules, two, one.
    let patterns = [[0.5, 0.5, 0.5], [0.5, 0.0, 0.5], [0.0, 0.0, 0.5]];
    patterns.iter().for_each(|alphas| epoch(&mut network, *alphas));
    let device = stream.device();
    device.synchronize().unwrap();
    let (before, memory) = (device.counts(), device.memory().current);
    for step in 0..100 {
        let alpha = 0.5 + 0.005 * step as f32;
        epoch(&mut network, patterns[step % 3].map(|on| on * alpha));
    }
    let used = device.counts() - before;
    assert_eq!(used.launches, 300, "one a batch");
    let others = (used.copies_to_host, used.synchronizations, used.allocations);
    assert_eq!((others, used.copies_to_device), ((0, 0, 0), 100), "one copy for each new alphas");
    assert_eq!(device.memory().current, memory);
}

/// The arena of training has room for the tree.
#[test]
fn sharing_needs_no_more_memory_than_training() {
    let stream = host::stream(1);
    let mut network = network(&stream, &graph(BASELINE));
    let owned = || {
        let report = stream.device().memory();
        report.owners.iter().find(|o| o.owner == Owner::Activations).map_or(0, |o| o.current)
    };
    let before = owned();
    let (x, y) = batch(&stream, 16, 1);
    network.set_alphas(&subsets([0.5; 3])).unwrap();
    network.eval_rows(&x, &y, 0..8).unwrap();
    assert_eq!(owned(), before);
    let (shared, one) = network.eval_flops(0..8).unwrap();
    assert!(one < shared && shared < 4 * one, "{shared} {one}");
    assert_eq!(network.eval_flops(7..8).unwrap(), (one, one), "all on, nothing to share");
    assert!(network.eval_flops(0..1).unwrap().0 < one, "all off");
}

#[test]
fn a_wrong_range_is_refused() {
    let stream = host::stream(1);
    let mut network = network(&stream, &graph(BASELINE));
    let (x, y) = batch(&stream, 2, 1);
    for configs in [0..0, 4..33, 5..5] {
        let rows = network.eval_rows(&x, &y, configs.clone());
        for refused in [rows, network.eval_flops(configs).map(drop)] {
            let error = refused.unwrap_err();
            assert!(matches!(error, Error::Argument { .. }), "{error:?}");
            assert!(error.to_string().contains("ends at most at 32"), "{error}");
        }
    }
    network.eval_rows(&x, &y, 0..32).unwrap();
    assert_eq!(read(&network, 32)[31].2, 2);
}

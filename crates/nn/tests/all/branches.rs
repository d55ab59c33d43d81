//! A host with branches: poolings of any window, dilated convolutions, products, concatenations and
//! a flattened image, with a module on a branch and one after the join. Every way to run it gives
//! the same bits.

use std::sync::Arc;

use crate::common::host;
use crate::network::{DIMS, MODULE, batch, metrics, network, state_bits, train};
use meristem_device::Stream;
use meristem_nn::graph::{
    BlendMode, BlendOperands, ConvGeometry, Graph, GraphBuilder, GroupId, NodeId, PoolGeometry,
};
use meristem_nn::{Network, Snapshot};

const BATCH: usize = 6;

/// x + 1×1(x), in its own group, blended in with the alpha of its slot.
fn module(b: &mut GraphBuilder, slot: usize, x: NodeId) -> NodeId {
    b.group(&format!("slots.{slot}"), MODULE);
    let (c, input) = (b.dims(x).c, b.detach(x));
    let name = format!("slots.{slot}.layers.0");
    let y = b.conv2d(input, &name, c, ConvGeometry::same(1), false).unwrap();
    let module = b.add(input, y).unwrap();
    b.resume_group(GroupId::HOST);
    let operands = BlendOperands { host: x, module, input, gate: None };
    let mode = [BlendMode::Add, BlendMode::Multiply][slot];
    b.blend(mode, slot, operands).unwrap()
}

/// The host, with modules or without.
pub(crate) fn graph(grown: bool) -> Arc<Graph> {
    let mut b = GraphBuilder::new(DIMS, host::SGD);
    let slot = |b: &mut GraphBuilder, slot, x| if grown { module(b, slot, x) } else { x };
    let point = ConvGeometry::same(1);
    // In all but its dilation a convolution for which there are faster kernels.
    let apart = ConvGeometry::same(3).dilation([2; 2]);
    let x = b.conv2d(b.input(), "stem", 8, apart, false).unwrap();
    let x = b.batch_norm(x, "stem_norm").unwrap();
    let x = b.relu(x);
    let overlapping = PoolGeometry::square(3, 2).padded([1; 2]);
    let x = b.max_pool2d_with(x, "stem_pool", overlapping).unwrap();
    let gate = b.conv2d(x, "gate", 4, point, true).unwrap();
    let gate = b.sigmoid(gate);
    let gated = b.conv2d(x, "gated", 4, point, true).unwrap();
    let gated = slot(&mut b, 0, gated);
    let gated = b.multiply(gated, gate).unwrap();
    let around = PoolGeometry::square(3, 1).padded([1; 2]);
    let mean = b.avg_pool2d(x, "mean", around).unwrap();
    let row = b
        .conv2d(x, "row", 4, ConvGeometry::same(3).padding([2; 2]).dilation([2; 2]), false)
        .unwrap();
    let x = b.concat(&[gated, mean, row]).unwrap();
    let x = slot(&mut b, 1, x);
    let most = b.global_max_pool(x);
    let most = b.flatten(most);
    let small = b.avg_pool2d(x, "small", PoolGeometry::square(3, 3)).unwrap();
    let small = b.flatten(small);
    let x = b.concat(&[small, most]).unwrap();
    let logits = b.linear(x, "classifier", 10, true, None).unwrap();
    Arc::new(b.finish(logits).unwrap())
}

fn grown(stream: &Stream) -> Network {
    let mut network = network(stream, &graph(true), BATCH);
    let rows = [[0.0, 0.0], [0.5, 0.0], [0.0, 0.7], [0.5, 0.7], [0.5, 0.0], [0.2, 0.7]];
    network.set_alphas(&rows.map(|row| row.to_vec())).unwrap();
    network
}

/// Loss sum as bits, and hits, of each row.
fn scores(network: &Network) -> Vec<(u64, u64)> {
    let found = metrics(network).eval;
    network.reset_metrics().unwrap();
    found.iter().map(|row| (row.loss_sum.to_bits(), row.correct)).collect()
}

#[test]
fn rows_of_alphas_share_branches() {
    let stream = host::stream(2);
    let mut network = grown(&stream);
    train(&mut network, 0..2, BATCH);
    network.reset_metrics().unwrap();
    for seed in 3..5 {
        let (x, y) = batch(&stream, BATCH, DIMS, seed);
        network.eval_rows(&x, &y, 0..6).unwrap();
    }
    let together = scores(&network);
    for seed in 3..5 {
        let (x, y) = batch(&stream, BATCH, DIMS, seed);
        (0..6).for_each(|row| network.eval_step(&x, &y, row).unwrap());
    }
    assert_eq!(together, scores(&network));
    assert_eq!(together[1], together[4]);
    let differ = |a: usize, b: usize| together[a].0 != together[b].0;
    assert!(differ(0, 1) && differ(0, 2) && differ(1, 3) && differ(3, 5), "{together:?}");
}

/// Logits of a batch do not depend on the other images: a plan for inference reads nothing that it
/// does not keep, and neither does the plan of another batch size.
#[test]
fn logits_of_an_image_are_the_same_alone() {
    let stream = host::stream(2);
    let mut network = grown(&stream);
    train(&mut network, 0..2, BATCH);
    let (x, _) = batch(&stream, BATCH, DIMS, 9);
    let all = network.infer(&x, 3).unwrap().to_vec::<f32>().unwrap();
    let images: Vec<f32> = x.to_vec().unwrap();
    let each = DIMS.numel();
    for (i, expected) in all.chunks(10).enumerate() {
        let image = &images[i * each..(i + 1) * each];
        // The memory of the batch has channels last already.
        let image = crate::common::to_nchw(image, DIMS);
        let one = host::images(&stream, &image, DIMS);
        assert_eq!(network.infer(&one, 3).unwrap().to_vec::<f32>().unwrap(), expected, "{i}");
    }
}

#[test]
fn a_step_in_halves_and_a_restored_network_have_the_same_bits() {
    let stream = host::stream(2);
    let [mut whole, mut halves, mut broken] = [(); 3].map(|()| grown(&stream));
    train(&mut whole, 0..3, BATCH);
    for step in 0..3 {
        let (x, y) = batch(&stream, BATCH, DIMS, step);
        halves.differentiate(&x, &y, 1.0).unwrap();
        halves.apply().unwrap();
    }
    assert_eq!(state_bits(&halves), state_bits(&whole));
    train(&mut broken, 0..3, BATCH);
    let snapshot = Snapshot::new(&broken, broken.graph()).unwrap();
    train(&mut broken, 7..9, BATCH);
    assert_ne!(state_bits(&broken), state_bits(&whole));
    broken.restore(&snapshot).unwrap();
    // Momenta start again.
    whole.clear_momentum().unwrap();
    for network in [&mut broken, &mut whole] {
        train(network, 3..5, BATCH);
    }
    assert_eq!(state_bits(&broken), state_bits(&whole));
    assert!(metrics(&broken).batch_losses.iter().all(|loss| loss.is_finite()));
}

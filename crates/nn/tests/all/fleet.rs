//! Fleets: each network has the bits that it has alone, in any fleet.

use std::sync::Arc;

use crate::common::Random;
use crate::common::host::{self, MINIMAL};
use meristem_device::{Device, Stream, Tensor};
use meristem_nn::graph::{BlendMode, BlendOperands, Dims, Graph};
use meristem_nn::{
    Error, Isa, LabelledBatch, Metrics, Network, NetworkFleet, NetworkOptions, Plans,
};
use meristem_nn::{HostTensor, Snapshot};

const DIMS: Dims = Dims { c: 3, h: 8, w: 8 };

/// A host, with a blended module in its first slot or without.
fn graph(grown: bool) -> Arc<Graph> {
    host::graph(MINIMAL, DIMS, |b, name, x| {
        if !grown || name != "r0c0" {
            return x;
        }
        let module = b.tanh(x);
        b.blend(BlendMode::Add, 0, BlendOperands { host: x, module, input: x, gate: None }).unwrap()
    })
}

/// Networks of two topologies, each on its own stream.
fn networks(device: &Device, plans: &Plans) -> Vec<Network> {
    let of = |env: u64| {
        let options =
            NetworkOptions { batch_log: 4, ..NetworkOptions::new(7, env, Isa::detect(), 8) };
        let stream = device.stream(&format!("env {env}"));
        Network::with_plans(&stream, graph(env == 1), options, plans).unwrap()
    };
    (0..3).map(of).collect()
}

fn batch(stream: &Stream, seed: u64) -> (Tensor, Tensor) {
    let mut random = Random(seed);
    let x = random.normals(8 * DIMS.numel());
    let y: Vec<u32> = (0..8).map(|_| random.below(10) as u32).collect();
    (host::images(stream, &x, DIMS), host::labels(stream, &y))
}

fn batches(networks: &[Network], seed: u64) -> Vec<(Tensor, Tensor)> {
    let of = |(env, network): (usize, &Network)| batch(network.stream(), seed + env as u64);
    networks.iter().enumerate().map(of).collect()
}

fn labelled(batches: &[(Tensor, Tensor)]) -> Vec<LabelledBatch<'_>> {
    batches.iter().map(|(x, y)| (x, y)).collect()
}

/// Parameters, running statistics and metrics, which hold every loss.
fn state(network: &Network) -> (Vec<(String, HostTensor)>, Metrics) {
    let tensors = network.state_dict().unwrap();
    let tensors = tensors.iter().map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect();
    (tensors, Metrics::parse(&network.metrics().to_vec().unwrap()))
}

#[test]
fn a_fleet_has_the_bits_of_its_networks_alone() {
    let device = host::stream(2).device().clone();
    let mut together = networks(&device, &Plans::default());
    let mut alone = networks(&device, &Plans::default());
    let tables: Vec<Vec<Vec<f32>>> = together
        .iter()
        .map(|network| vec![vec![0.4; network.graph().alphas], vec![0.0; network.graph().alphas]])
        .collect();
    let mut fleet = NetworkFleet::new(&mut together);
    fleet.set_alphas(&tables).unwrap();
    fleet.reset_metrics().unwrap();
    for (network, table) in alone.iter_mut().zip(&tables) {
        network.set_alphas(table).unwrap();
        network.reset_metrics().unwrap();
    }
    for step in 0..3 {
        // Only the first two networks have the last batch of an epoch.
        let count = if step == 2 { 2 } else { 3 };
        let data = batches(&alone, 10 * step);
        let mut fleet = NetworkFleet::new(&mut together);
        let own: Vec<_> = fleet
            .networks()
            .enumerate()
            .map(|(env, network)| batch(network.stream(), 10 * step + env as u64))
            .collect();
        fleet.train_step(&labelled(&own[..count])).unwrap();
        fleet.eval_rows(&labelled(&own), &[0..2, 0..1, 0..2]).unwrap();
        fleet.count_non_finite().unwrap();
        for (env, (network, (x, y))) in alone.iter_mut().zip(&data).enumerate() {
            if env < count {
                network.train_step(x, y).unwrap();
            }
        }
        for ((network, (x, y)), rows) in alone.iter_mut().zip(&data).zip([2, 1, 2]) {
            network.eval_rows(x, y, 0..rows).unwrap();
            network.count_non_finite().unwrap();
        }
    }
    for (got, expected) in together.iter().zip(&alone) {
        assert_eq!(state(got), state(expected));
    }
    let steps: Vec<u64> = together.iter().map(|network| state(network).1.steps).collect();
    assert_eq!(steps, [3, 3, 2]);
}

#[test]
fn snapshots_of_a_fleet_bring_each_network_back() {
    let device = host::stream(2).device().clone();
    let mut networks = networks(&device, &Plans::default());
    let mut snapshots: Vec<Snapshot> =
        networks.iter().map(|network| Snapshot::new(network, network.graph()).unwrap()).collect();
    let data = batches(&networks, 5);
    NetworkFleet::new(&mut networks).train_step(&labelled(&data)).unwrap();
    let graphs: Vec<_> = networks.iter().map(|network| Arc::clone(network.graph())).collect();
    let due = snapshots.iter_mut().zip(graphs).collect();
    NetworkFleet::new(&mut networks).take_snapshots(due).unwrap();
    let kept: Vec<_> = networks.iter().map(|network| state(network).0).collect();
    NetworkFleet::new(&mut networks).train_step(&labelled(&data)).unwrap();
    for ((network, snapshot), kept) in networks.iter_mut().zip(&snapshots).zip(kept) {
        assert_ne!(state(network).0, kept);
        network.restore(snapshot).unwrap();
        assert_eq!(state(network).0, kept);
    }
}

#[test]
fn more_than_there_are_networks_is_refused_before_anything_runs() {
    let device = host::stream(1).device().clone();
    let mut networks = networks(&device, &Plans::default());
    let data = batches(&networks, 1);
    let launches = device.counts().launches;
    let mut fleet = NetworkFleet::new(&mut networks[..2]);
    let refused = [
        fleet.train_step(&labelled(&data)),
        fleet.eval_rows(&labelled(&data[..2]), &[]),
        fleet.eval_rows(&labelled(&data), &[0..1, 0..1, 0..1]),
        fleet.set_alphas(&vec![vec![]; 3]),
    ];
    for refused in refused {
        assert!(matches!(refused, Err(Error::Argument { .. })), "{refused:?}");
    }
    assert_eq!(device.counts().launches, launches);
}

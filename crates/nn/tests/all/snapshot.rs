//! Snapshots: a network is restored from any state, bit for bit, and continues as if nothing had
//! happened.

use std::sync::Arc;

use crate::common::Random;
use crate::common::host::{self, MINIMAL};
use meristem_device::{Owner, Stream};
use meristem_nn::graph::{Dims, Graph, GroupId, SgdConfig};
use meristem_nn::{Error, Isa, Metrics, Network, NetworkOptions, Snapshot, StateDict};

const DIMS: Dims = Dims { c: 3, h: 8, w: 8 };
const SGD: SgdConfig = SgdConfig { lr: 0.01, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };

/// A host with a module of a 3x3 convolution in each of these slots.
fn graph(slots: &[&str]) -> Arc<Graph> {
    host::graph(MINIMAL, DIMS, |b, name, x| {
        if !slots.contains(&name) {
            return x;
        }
        b.group(&format!("slots.{name}"), SGD);
        let (c, geometry) = (b.dims(x).c, meristem_nn::graph::ConvGeometry::same(3));
        let y = b.conv2d(x, &format!("slots.{name}.layers.0"), c, geometry, false).unwrap();
        let sum = b.add(x, y).unwrap();
        b.resume_group(GroupId::HOST);
        sum
    })
}

fn network(stream: &Stream, slots: &[&str]) -> Network {
    let options = NetworkOptions::new(5, 0, Isa::detect(), 8);
    Network::new(stream, graph(slots), options).unwrap()
}

fn train(network: &mut Network, steps: std::ops::Range<u64>) {
    let stream = network.stream().clone();
    for step in steps {
        let mut random = Random(step + 1);
        let x = random.normals(8 * DIMS.numel());
        let y: Vec<u32> = (0..8).map(|_| random.below(10) as u32).collect();
        let (x, y) = (host::images(&stream, &x, DIMS), host::labels(&stream, &y));
        network.train_step(&x, &y).unwrap();
    }
}

/// Makes a parameter NaN and, by training steps, everything computed from it.
fn poison(network: &mut Network) {
    let values = network.packed_parameters(0).unwrap();
    let launch = values.stream().launch("poison").write(values);
    launch.run(|args| args.write::<f32>(0)[0] = f32::NAN).unwrap();
    train(network, 90..92);
}

fn non_finite(network: &Network) -> u64 {
    network.count_non_finite().unwrap();
    Metrics::parse(&network.metrics().to_vec().unwrap()).non_finite
}

fn same(got: &StateDict, expected: &StateDict) {
    let names = |s: &StateDict| s.iter().map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
    assert_eq!(names(got), names(expected));
    for ((name, got), (_, expected)) in got.iter().zip(expected.iter()) {
        let bits = |state: &meristem_nn::HostTensor| {
            let mut bytes = vec![];
            state.data.le_bytes(|piece| bytes.extend_from_slice(piece));
            bytes
        };
        assert_eq!(bits(got), bits(expected), "{name}");
    }
}

#[test]
fn what_was_broken_goes_on_as_a_network_that_never_was() {
    let stream = host::stream(2);
    let (mut broken, mut whole) = (network(&stream, &["r0c0"]), network(&stream, &["r0c0"]));
    for network in [&mut broken, &mut whole] {
        train(network, 0..3);
    }
    let snapshot = Snapshot::new(&broken, broken.graph()).unwrap();
    let expected = whole.state_dict().unwrap();
    assert_eq!(non_finite(&broken), 0);
    poison(&mut broken);
    let bad = |state: StateDict| {
        let bad = |v: &[f32]| v.iter().filter(|x| !x.is_finite()).count();
        state.iter().filter_map(|(_, tensor)| tensor.as_f32()).map(bad).sum::<usize>() as u64
    };
    let [weights, momenta] = [broken.state_dict(), broken.momentum_dict()].map(|s| bad(s.unwrap()));
    // Padding lanes between parameters are NaN as well.
    assert!(non_finite(&broken) >= weights + momenta && weights > 0 && momenta > 0);
    let refused = broken.load_state_dict(&broken.state_dict().unwrap(), true);
    assert!(matches!(refused, Err(Error::State(error)) if !error.non_finite.is_empty()));
    broken.restore(&snapshot).unwrap();
    same(&broken.state_dict().unwrap(), &expected);
    same(&snapshot.state_dict().unwrap(), &expected);
    assert_eq!(non_finite(&broken), 0);
    let momentum = broken.momentum_dict().unwrap();
    let zero = |v: &[f32]| v.iter().all(|x| *x == 0.0);
    assert!(momentum.iter().all(|(_, tensor)| zero(tensor.as_f32().unwrap())));
    // No NaN is left, neither in the arena nor in padding lanes.
    whole.clear_momentum().unwrap();
    for network in [&mut broken, &mut whole] {
        train(network, 3..6);
    }
    same(&broken.state_dict().unwrap(), &whole.state_dict().unwrap());
}

#[test]
fn only_what_shall_remain_is_kept_and_its_memory_is_used_again() {
    let stream = host::stream(1);
    let kept = |stream: &Stream| {
        let report = stream.device().memory();
        report.owners.iter().find(|o| o.owner == Owner::Snapshots).unwrap().current
    };
    let mut it = network(&stream, &["r0c0", "r0c1"]);
    train(&mut it, 0..2);
    let mut snapshot = Snapshot::new(&it, &graph(&["r0c0"])).unwrap();
    let (bytes, allocations) = (kept(&stream), stream.device().counts().allocations);
    assert!(bytes > 0);
    train(&mut it, 2..4);
    let trained = it.state_dict().unwrap();
    let waits = stream.device().counts().synchronizations;
    snapshot.take(&it, &graph(&["r0c0"])).unwrap();
    assert_eq!(stream.device().counts().synchronizations, waits);
    poison(&mut it);
    // Another module replaced the second one, and is removed as well.
    it.set_graph(graph(&["r0c0", "r0c2"])).unwrap();
    it.restore(&snapshot).unwrap();
    assert_eq!(**it.graph(), *graph(&["r0c0"]));
    let left = trained.iter().filter(|(name, _)| !name.starts_with("slots.r0c1"));
    let left = StateDict(left.map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect());
    same(&it.state_dict().unwrap(), &left);
    assert_eq!(kept(&stream), bytes);
    assert!(allocations > 0);
    // One more group: the memory of the existing groups is kept.
    it.set_graph(graph(&["r0c0", "r0c1"])).unwrap();
    let before = stream.device().counts().allocations;
    snapshot.take(&it, it.graph()).unwrap();
    assert_eq!(
        stream.device().counts().allocations - before,
        1,
        "its parameters: it has no buffers"
    );
    snapshot.take(&it, it.graph()).unwrap();
    assert_eq!(stream.device().counts().allocations - before, 1);
    // A group that the network does not have: an error, and the snapshot is unchanged.
    let error = snapshot.take(&it, &graph(&["r0c2"])).unwrap_err();
    assert!(matches!(error, Error::Argument { .. }), "{error:?}");
    assert!(error.to_string().contains("slots.r0c2"), "{error}");
    same(&snapshot.state_dict().unwrap(), &it.state_dict().unwrap());
}

#[test]
fn a_snapshot_goes_into_a_file_and_comes_back() {
    let stream = host::stream(1);
    let mut it = network(&stream, &["r0c0"]);
    train(&mut it, 0..2);
    let saved = Snapshot::new(&it, it.graph()).unwrap().state_dict().unwrap();
    let mut other = network(&stream, &["r0c0"]);
    let mut snapshot = Snapshot::new(&other, other.graph()).unwrap();
    snapshot.load_state_dict(&saved).unwrap();
    other.restore(&snapshot).unwrap();
    same(&other.state_dict().unwrap(), &it.state_dict().unwrap());
    let error = snapshot.load_state_dict(&StateDict::default()).unwrap_err();
    assert!(matches!(error, Error::State(_)), "{error:?}");
    assert!(error.to_string().contains("classifier"), "{error}");
}

//! Training steps in two halves, and networks that follow another network: the operations of
//! replicas on several ranks.

use std::sync::Arc;

use crate::common::Random;
use crate::common::host::{self, MINIMAL};
use meristem_device::{Stream, Tensor};
use meristem_nn::graph::{ConvGeometry, Dims, Graph, GraphBuilder, GroupId, SgdConfig};
use meristem_nn::{Error, Isa, Metrics, Network, NetworkOptions};

const DIMS: Dims = Dims { c: 3, h: 8, w: 8 };
const SGD: SgdConfig = SgdConfig { lr: 0.05, momentum: 0.9, weight_decay: 1e-4, clip_norm: 0.5 };

/// A host with a module of a 3x3 convolution in its first slot, or without.
fn graph(grown: bool) -> Arc<Graph> {
    host::graph(MINIMAL, DIMS, |b, name, x| {
        if !grown || name != "r0c0" {
            return x;
        }
        b.group("slots.r0c0", SGD);
        let (c, geometry) = (b.dims(x).c, ConvGeometry::same(3));
        let y = b.conv2d(x, "slots.r0c0.layers.0", c, geometry, false).unwrap();
        let sum = b.add(x, y).unwrap();
        b.resume_group(GroupId::HOST);
        sum
    })
}

/// Two convolutions and a classifier: results of a sample do not depend on other samples.
fn without_batch_norm() -> Arc<Graph> {
    let mut b = GraphBuilder::new(DIMS, SGD);
    let x = b.conv2d(b.input(), "a", 5, ConvGeometry::same(3), true).unwrap();
    let x = b.relu(x);
    let x = b.max_pool2d(x, "pool", 2, 2).unwrap();
    let x = b.conv2d(x, "b", 7, ConvGeometry::same(3), true).unwrap();
    let x = b.relu(x);
    let x = b.global_avg_pool(x);
    let x = b.linear(x, "c", 10, true, None).unwrap();
    Arc::new(b.finish(x).unwrap())
}

fn network(stream: &Stream, graph: Arc<Graph>) -> Network {
    Network::new(stream, graph, NetworkOptions::new(5, 0, Isa::detect(), 8)).unwrap()
}

/// These samples of a batch of 8.
fn batch(stream: &Stream, seed: u64, of: std::ops::Range<usize>) -> (Tensor, Tensor) {
    let mut random = Random(seed + 1);
    let x = random.normals(8 * DIMS.numel());
    let y: Vec<u32> = (0..8).map(|_| random.below(10) as u32).collect();
    let x = &x[of.start * DIMS.numel()..of.end * DIMS.numel()];
    (host::images(stream, x, DIMS), host::labels(stream, &y[of]))
}

/// The complete state of a network and its metrics, bit for bit.
fn all(network: &Network) -> (u64, String) {
    network.fingerprint().unwrap();
    let metrics = Metrics::parse(&network.metrics().to_vec().unwrap());
    let state = (network.state_dict().unwrap(), network.momentum_dict().unwrap());
    (metrics.fingerprint, format!("{metrics:?} {state:?}"))
}

fn gradients(network: &Network) -> Vec<(String, Vec<f32>)> {
    let gradients = network.gradients().unwrap();
    gradients.iter().map(|(name, t)| (name.to_string(), t.to_vec().unwrap())).collect()
}

#[test]
fn two_halves_are_the_whole_step_bit_for_bit() {
    let stream = host::stream(2);
    let [mut whole, mut halves] = [(); 2].map(|()| network(&stream, graph(false)));
    for step in 0..6 {
        // Growth, a batch of another size, and back.
        let (grown, size) = ([false, true, true, false][step % 4], [8, 8, 5][step % 3]);
        let (x, y) = batch(&stream, step as u64, 0..size);
        for network in [&mut whole, &mut halves] {
            network.set_graph(graph(grown)).unwrap();
        }
        whole.train_step(&x, &y).unwrap();
        let before = stream.device().counts();
        halves.differentiate(&x, &y, 1.0).unwrap();
        halves.apply().unwrap();
        let spent = stream.device().counts() - before;
        assert_eq!((spent.launches, spent.synchronizations, spent.copies_to_device), (2, 0, 0));
        assert_eq!(all(&halves), all(&whole), "step {step}");
    }
}

/// Clipping before the step equals the clipping of the step, if nothing happens in between and the
/// clip norm is the same.
#[test]
fn a_gradient_clipped_ahead_is_clipped_once() {
    let stream = host::stream(2);
    let [mut whole, mut halves] = [(); 2].map(|()| network(&stream, graph(true)));
    for step in 0..4 {
        let (x, y) = batch(&stream, step, 0..8);
        whole.train_step(&x, &y).unwrap();
        let before = stream.device().counts();
        halves.differentiate(&x, &y, 1.0).unwrap();
        halves.clip(1.0).unwrap();
        halves.apply().unwrap();
        let spent = stream.device().counts() - before;
        assert_eq!((spent.launches, spent.synchronizations, spent.copies_to_device), (3, 0, 0));
        assert_eq!(all(&halves), all(&whole), "step {step}");
    }
    // Later writes are not clipped. A factor scales the clip norm.
    let norm_of = |network: &Network, group: &str| {
        let of_group = |name: &str| name.starts_with("slots") == (group == "slots");
        let all = gradients(network).into_iter().filter(|(name, _)| of_group(name));
        all.flat_map(|(_, g)| g).map(|g| f64::from(g).powi(2)).sum::<f64>().sqrt()
    };
    let (x, y) = batch(&stream, 9, 0..8);
    for (group, most) in [("host", host::SGD.clip_norm), ("slots", SGD.clip_norm)] {
        halves.differentiate(&x, &y, 1.0).unwrap();
        let (before, expected) = (norm_of(&halves, group), f64::from(0.01 * most));
        halves.clip(0.01).unwrap();
        let got = norm_of(&halves, group);
        // The divisor is the norm plus 1e-6; a few roundings in f32 are far below the tolerance.
        assert!(before > expected && (got / expected - 1.0).abs() < 1e-4, "{group}: {got}");
    }
    for (_, gradient) in halves.gradients().unwrap() {
        gradient.copy_from_slice(&vec![100.0f32; gradient.numel()]).unwrap();
    }
    halves.clear_momentum().unwrap();
    let weight = |network: &Network| {
        let state = network.state_dict().unwrap();
        state.get("slots.r0c0.layers.0.weight").unwrap().as_f32().unwrap()[0]
    };
    let before = weight(&halves);
    halves.apply().unwrap();
    // .05 x 100; the weight and its decay are below 1.
    assert!((before - weight(&halves) - 5.0).abs() < 1e-4, "{}", weight(&halves));
}

/// A forward pass updates the running statistics as a training step from the same weights does, and
/// changes nothing else.
#[test]
fn observing_changes_running_statistics_alone() {
    let stream = host::stream(2);
    let [mut observed, mut trained] = [(); 2].map(|()| network(&stream, graph(true)));
    let statistics = |network: &Network| {
        let both = network.statistics();
        let values = both.map(|(s, c)| (s.to_vec::<f32>().unwrap(), c.to_vec::<i64>().unwrap()));
        values.collect::<Vec<_>>()
    };
    for step in 0..3 {
        let (x, y) = batch(&stream, step, 0..[8, 5, 8][step as usize]);
        let before = statistics(&observed);
        let [parameters, metrics] = [observed.packed_parameters(0).unwrap(), observed.metrics()]
            .map(|tensor| tensor.clone());
        let rest = |network: &Network| {
            let values: Vec<f32> = parameters.to_vec().unwrap();
            let metrics: Vec<f64> = metrics.to_vec().unwrap();
            format!("{values:?} {metrics:?} {:?}", network.momentum_dict().unwrap())
        };
        let was = rest(&observed);
        observed.observe(&x).unwrap();
        trained.differentiate(&x, &y, 1.0).unwrap();
        assert_eq!(statistics(&observed), statistics(&trained), "step {step}");
        assert_ne!(statistics(&observed), before);
        assert_eq!(rest(&observed), was);
    }
}

/// The mean over ranks of their gradients, each weighted by its share of the batch, is the gradient
/// of the batch.
#[test]
fn weighted_parts_average_to_the_gradient_of_the_batch() {
    let stream = host::stream(1);
    let mut network = network(&stream, without_batch_norm());
    let mut gradient_of = |of: std::ops::Range<usize>, weight: f32| {
        let (x, y) = batch(&stream, 3, of);
        network.differentiate(&x, &y, weight).unwrap();
        gradients(&network)
    };
    let whole = gradient_of(0..8, 1.0);
    for ranks in [vec![0..4, 4..8], vec![0..5, 5..8], vec![0..3, 3..6, 6..8]] {
        let n = ranks.len() as f32;
        let weight = |of: &std::ops::Range<usize>| of.len() as f32 * n / 8.0;
        let parts: Vec<_> = ranks.iter().map(|of| gradient_of(of.clone(), weight(of))).collect();
        for (i, (name, expected)) in whole.iter().enumerate() {
            let largest = expected.iter().fold(0.0f32, |m, g| m.max(g.abs()));
            // An element is a sum of at most 8 x 64 terms, in another order: 512 roundings of 2^-24
            // of the sum of magnitudes, which is here a few times the largest element. A wrong
            // weight is wrong by a tenth.
            let tolerance = 1e-4 * largest;
            for (e, expected) in expected.iter().enumerate() {
                let mean = parts.iter().map(|part| part[i].1[e]).sum::<f32>() / n;
                assert!((mean - expected).abs() <= tolerance, "{name} {ranks:?} {mean} {expected}");
            }
        }
    }
}

#[test]
fn no_samples_give_a_gradient_of_zeros_in_the_same_places() {
    let stream = host::stream(1);
    let mut network = network(&stream, graph(true));
    let (x, y) = batch(&stream, 0, 0..3);
    network.differentiate(&x, &y, 1.0).unwrap();
    let some = gradients(&network);
    network.differentiate_nothing().unwrap();
    let none = gradients(&network);
    assert!(some.iter().any(|(_, g)| g.iter().any(|g| *g != 0.0)));
    assert!(none.iter().all(|(_, g)| g.iter().all(|g| *g == 0.0)));
    let form = |all: &[(String, Vec<f32>)]| -> Vec<_> {
        all.iter().map(|(name, g)| (name.clone(), g.len())).collect()
    };
    assert_eq!(form(&none), form(&some));
    // The update uses the gradients that were written: with zeros, only momentum and decay act.
    let before = network.state_dict().unwrap();
    network.apply().unwrap();
    let rate = |name: &str| -> f32 {
        let [was, is] =
            [&before, &network.state_dict().unwrap()].map(|s| s.get(name).unwrap().clone());
        is.as_f32().unwrap()[0] / was.as_f32().unwrap()[0]
    };
    // One rounding of the product and one of the difference: 2^-23.
    assert!((rate("slots.r0c0.layers.0.weight") - (1.0 - 0.05 * 1e-4)).abs() < 2.4e-7);
}

#[test]
fn a_replica_follows_through_growth_to_the_bit() {
    let device = host::stream(2).device().clone();
    let (own, other) = (device.stream("leader"), device.stream("replica"));
    let mut leader = network(&own, graph(false));
    let mut replica = leader.replica(&other).unwrap();
    for step in 0..6 {
        leader.set_graph(graph(step % 3 > 0)).unwrap();
        leader.set_alphas(&[vec![0.5; leader.graph().alphas]]).unwrap();
        leader.reset_metrics().unwrap();
        replica.follow(&leader).unwrap();
        assert_eq!(all(&replica), all(&leader), "step {step}");
        for (network, stream) in [(&mut leader, &own), (&mut replica, &other)] {
            let (x, y) = batch(stream, step, 0..8);
            network.train_step(&x, &y).unwrap();
        }
        assert_eq!(all(&replica), all(&leader), "step {step}");
        let (x, y) = batch(&own, 100 + step, 0..8);
        leader.train_step(&x, &y).unwrap();
    }
}

/// A replica with an optimiser of its own: through growth its weights are the leader's, and its
/// momentum is as if it had grown itself. A fingerprint of the weights does not see it.
#[test]
fn a_replica_follows_weights_and_keeps_its_optimiser() {
    let device = host::stream(2).device().clone();
    let (own, other) = (device.stream("leader"), device.stream("replica"));
    let mut leader = network(&own, graph(false));
    let mut replica = leader.replica(&other).unwrap();
    let mut alone = network(&other, graph(false));
    let print = |network: &Network| {
        network.fingerprint_weights().unwrap();
        Metrics::parse(&network.metrics().to_vec().unwrap()).fingerprint
    };
    for step in 0..6 {
        let grown = graph(step % 3 > 0);
        leader.set_graph(Arc::clone(&grown)).unwrap();
        alone.set_graph(grown).unwrap();
        replica.follow_weights(&leader).unwrap();
        assert_eq!(replica.state_dict().unwrap(), leader.state_dict().unwrap(), "step {step}");
        let momentum = replica.momentum_dict().unwrap();
        assert_eq!(momentum, alone.momentum_dict().unwrap(), "step {step}");
        assert_eq!(print(&replica), print(&leader));
        if step > 0 {
            assert_ne!(momentum, leader.momentum_dict().unwrap(), "step {step}");
        }
        // All that `alone` shares with the replica is the momentum of the same gradients.
        alone.load_state_dict(&leader.state_dict().unwrap(), true).unwrap();
        for (network, stream, seed) in
            [(&mut leader, &own, 0), (&mut replica, &other, 50), (&mut alone, &other, 50)]
        {
            let (x, y) = batch(stream, seed + step, 0..8);
            network.train_step(&x, &y).unwrap();
        }
        assert_ne!(print(&replica), print(&leader));
    }
}

/// Writes to the trained parameters are the next step's weights, in the order of the gradients.
#[test]
fn trained_parameters_are_the_weights() {
    let stream = host::stream(1);
    let mut network = network(&stream, graph(true));
    let names: Vec<String> =
        network.gradient_buffers().unwrap().iter().map(|(name, _)| name.to_string()).collect();
    let before = network.state_dict().unwrap();
    let parameters = network.trained_parameters().unwrap();
    assert!(parameters.iter().map(|(name, _)| *name).eq(names.iter().map(String::as_str)));
    for (_, tensor) in parameters {
        let twice: Vec<f32> = tensor.to_vec::<f32>().unwrap().iter().map(|x| 2.0 * x).collect();
        tensor.copy_from_slice(&twice).unwrap();
    }
    let after = network.state_dict().unwrap();
    for name in &names {
        let [was, is] = [&before, &after].map(|state| state.get(name).unwrap().as_f32().unwrap());
        assert!(was.iter().zip(is).all(|(was, is)| *is == 2.0 * was), "{name}");
    }
}

#[test]
fn a_fingerprint_shows_any_bit() {
    let stream = host::stream(1);
    let print = |spoil: &dyn Fn(&mut Network)| {
        let mut network = network(&stream, graph(true));
        let (x, y) = batch(&stream, 0, 0..8);
        network.train_step(&x, &y).unwrap();
        spoil(&mut network);
        all(&network).0
    };
    let flip = |tensor: &Tensor, at: usize| {
        let launch = stream.launch("flip").write(tensor);
        launch
            .run(move |args| {
                let x = &mut args.write::<f32>(0)[at];
                *x = f32::from_bits(x.to_bits() ^ 1);
            })
            .unwrap();
    };
    let prints = [
        print(&|_| {}),
        print(&|n| flip(n.packed_parameters(0).unwrap(), 0)),
        print(&|n| flip(n.packed_parameters(1).unwrap(), 7)),
        print(&|n| flip(n.statistics().next().unwrap().0, 1)),
        print(&|n| n.clear_momentum().unwrap()),
        print(&|n| {
            let counters = n.statistics().next().unwrap().1;
            counters.copy_from_slice(&vec![9i64; counters.numel()]).unwrap();
        }),
    ];
    assert_eq!(print(&|_| {}), prints[0], "the same every time");
    for (i, a) in prints.iter().enumerate() {
        assert!(prints[..i].iter().all(|b| a != b), "{i}: {prints:x?}");
    }
}

#[test]
fn halves_in_the_wrong_order_are_refused() {
    let stream = host::stream(1);
    let mut network = network(&stream, graph(false));
    let (x, y) = batch(&stream, 0, 0..8);
    let argument = |result: Result<(), Error>, words: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    let refused = |result| argument(result, "a gradient, from `differentiate`");
    refused(network.apply());
    network.differentiate(&x, &y, 1.0).unwrap();
    network.eval_step(&x, &y, 0).unwrap();
    refused(network.gradients().map(drop));
    refused(network.apply());
    network.differentiate(&x, &y, 1.0).unwrap();
    network.set_graph(graph(true)).unwrap();
    refused(network.apply());
    network.differentiate(&x, &y, 1.0).unwrap();
    network.apply().unwrap();
    refused(network.apply());
    refused(network.clip(1.0));
    network.differentiate(&x, &y, 1.0).unwrap();
    network.clip(1.0).unwrap();
    argument(network.clip(1.0), "clipped");
    network.observe(&x).unwrap();
    refused(network.apply());
    let options = NetworkOptions::new(5, 0, Isa::detect(), 4);
    let mut other = Network::new(&stream, graph(true), options).unwrap();
    argument(other.follow(&network), "options");
}

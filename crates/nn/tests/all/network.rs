//! Networks on a device: training, evaluation, growth, metrics, weights, costs of a step.

use std::sync::Arc;

use crate::common::Random;
use crate::common::host::{self, BASELINE, MINIMAL, Shape};
use meristem_device::{Owner, Stream, Tensor};
use meristem_nn::graph::{
    AdamConfig, BlendMode, BlendOperands, ConvGeometry, Dims, Graph, GraphBuilder, GroupId, NodeId,
    SgdConfig,
};
use meristem_nn::{
    Error, HostData, HostTensor, Isa, Metrics, Network, NetworkOptions, Plans, StateDict,
};

pub(crate) const DIMS: Dims = Dims { c: 3, h: 16, w: 16 };
pub(crate) const MODULE: SgdConfig =
    SgdConfig { lr: 0.01, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };

/// Stage of a module (`docs/growth.md`, Lifecycle).
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Stage {
    Training,
    Blending(BlendMode),
    Fossilized,
}

/// x + GN(3×3(x)), in its own group; slot 0 of the alphas.
fn module(b: &mut GraphBuilder, slot: &str, x: NodeId, stage: Stage) -> NodeId {
    b.group(&format!("slots.{slot}"), MODULE);
    let c = b.dims(x).c;
    let input = if stage == Stage::Fossilized { x } else { b.detach(x) };
    let y = b
        .conv2d(input, &format!("slots.{slot}.layers.0"), c, ConvGeometry::same(3), false)
        .unwrap();
    let y = b.group_norm(y, &format!("slots.{slot}.layers.1"), 4, 0.0).unwrap();
    let m = b.add(input, y).unwrap();
    let out = match stage {
        Stage::Training => b.straight_through(x, m).unwrap(),
        Stage::Blending(mode) => {
            let gate = (mode == BlendMode::Gate).then(|| {
                let g = b.global_avg_pool(input);
                let g = b.linear(g, &format!("slots.{slot}.gate"), 1, true, None).unwrap();
                b.sigmoid(g)
            });
            b.blend(mode, 0, BlendOperands { host: x, module: m, input, gate }).unwrap()
        }
        Stage::Fossilized => m,
    };
    b.resume_group(GroupId::HOST);
    out
}

pub(crate) fn grown(shape: Shape, dims: Dims, slots: &[&str], stage: Stage) -> Arc<Graph> {
    host::graph(
        shape,
        dims,
        |b, name, x| if slots.contains(&name) { module(b, name, x, stage) } else { x },
    )
}

struct Data {
    x: Vec<f32>,
    y: Vec<u32>,
}

fn data(n: usize, dims: Dims, seed: u64) -> Data {
    let mut random = Random(seed);
    Data {
        x: random.normals(n * dims.numel()),
        y: (0..n).map(|_| random.below(10) as u32).collect(),
    }
}

pub(crate) fn batch(stream: &Stream, n: usize, dims: Dims, seed: u64) -> (Tensor, Tensor) {
    let Data { x, y } = data(n, dims, seed);
    (host::images(stream, &x, dims), host::labels(stream, &y))
}

pub(crate) fn network(stream: &Stream, graph: &Arc<Graph>, batch_max: usize) -> Network {
    sharing(stream, graph, batch_max, &Plans::default())
}

/// A network with shared plans.
pub(crate) fn sharing(
    stream: &Stream,
    graph: &Arc<Graph>,
    batch_max: usize,
    plans: &Plans,
) -> Network {
    let options = NetworkOptions::new(5, 0, Isa::detect(), batch_max);
    Network::with_plans(stream, Arc::clone(graph), options, plans).unwrap()
}

pub(crate) fn train(network: &mut Network, steps: std::ops::Range<u64>, n: usize) {
    let stream = network.stream().clone();
    for step in steps {
        let (x, y) = batch(&stream, n, network.graph().input_dims(), step);
        network.train_step(&x, &y).unwrap();
    }
}

pub(crate) fn metrics(network: &Network) -> Metrics {
    Metrics::parse(&network.metrics().to_vec().unwrap())
}

fn bits(tensor: &HostTensor) -> Vec<u64> {
    match &tensor.data {
        HostData::F32(v) => v.iter().map(|x| u64::from(x.to_bits())).collect(),
        HostData::I64(v) => v.iter().map(|x| *x as u64).collect(),
        HostData::U8(v) => v.iter().map(|x| u64::from(*x)).collect(),
    }
}

fn all_bits(state: &StateDict) -> Vec<u64> {
    state.iter().flat_map(|(_, tensor)| bits(tensor)).collect()
}

/// Bits of all parameters and buffers.
pub(crate) fn state_bits(network: &Network) -> Vec<u64> {
    all_bits(&network.state_dict().unwrap())
}

/// The same names, and the same bits.
#[track_caller]
fn assert_same(what: &str, got: &StateDict, expected: &StateDict) {
    let names = |s: &StateDict| s.iter().map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
    assert_eq!(names(got), names(expected), "{what}");
    for ((name, got), (_, expected)) in got.iter().zip(expected.iter()) {
        let (got, expected) = (bits(got), bits(expected));
        let apart = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
        assert_eq!(apart, 0, "{what}: {name} differs in {apart} of {} elements", got.len());
    }
}

fn only(state: &StateDict, prefix: &str) -> StateDict {
    let of = |(k, v): (&str, &HostTensor)| k.starts_with(prefix).then(|| (k.to_owned(), v.clone()));
    StateDict(state.iter().filter_map(of).collect())
}

fn without(state: &StateDict, prefix: &str) -> StateDict {
    let of =
        |(k, v): (&str, &HostTensor)| (!k.starts_with(prefix)).then(|| (k.to_owned(), v.clone()));
    StateDict(state.iter().filter_map(of).collect())
}

/// In the training stage host and logits equal the bare host's, bit for bit, after every step,
/// while the module learns.
#[test]
fn a_training_module_does_not_touch_its_host() {
    let stream = host::stream(2);
    for slots in [&["r0c0"][..], &["r1c0"], &["r0c1", "r1c2"], &["r1c2"]] {
        let mut bare = network(&stream, &host::bare(BASELINE, DIMS), 8);
        let mut with = network(&stream, &grown(BASELINE, DIMS, slots, Stage::Training), 8);
        let fresh = only(&with.state_dict().unwrap(), "slots");
        for step in 0..6 {
            train(&mut bare, step..step + 1, 8);
            train(&mut with, step..step + 1, 8);
            let host = without(&with.state_dict().unwrap(), "slots");
            let what = format!("{slots:?} step {step}");
            assert_same(&what, &host, &bare.state_dict().unwrap());
            let (x, _) = batch(&stream, 8, DIMS, 99);
            let logits =
                [&mut bare, &mut with].map(|n| n.infer(&x, 0).unwrap().to_vec::<f32>().unwrap());
            assert_eq!(logits[0], logits[1]);
        }
        assert_eq!(metrics(&bare).batch_losses, metrics(&with).batch_losses);
        let module = only(&with.state_dict().unwrap(), "slots");
        for (name, tensor) in module.iter() {
            assert_ne!(Some(tensor), fresh.get(name), "{slots:?}: {name} has not moved");
        }
        assert!(metrics(&with).groups[1..].iter().all(|g| g.last_norm > 0.0 && g.steps == 6));
    }
}

#[test]
fn results_do_not_depend_on_the_workers() {
    let run = |threads: usize| {
        let stream = host::stream(threads);
        let graph = grown(BASELINE, DIMS, &["r0c0", "r1c1"], Stage::Blending(BlendMode::Gate));
        let device = stream.device().clone();
        let mut networks: Vec<Network> = (0..3)
            .map(|env| {
                let options = NetworkOptions::new(5, env, Isa::detect(), 8);
                let stream = device.stream(&format!("env {env}"));
                Network::new(&stream, Arc::clone(&graph), options).unwrap()
            })
            .collect();
        networks.iter_mut().for_each(|n| n.set_alphas(&[vec![0.5]]).unwrap());
        for step in 0..5 {
            networks.iter_mut().for_each(|n| train(n, step..step + 1, 5));
        }
        let of = |n: &Network| {
            (all_bits(&n.state_dict().unwrap()), all_bits(&n.momentum_dict().unwrap()), metrics(n))
        };
        networks.iter().map(of).collect::<Vec<_>>()
    };
    let first = run(1);
    for threads in [1, 2, 4] {
        assert!(first == run(threads), "{threads} threads");
    }
    assert!(first[0].0 != first[1].0, "envs start from different weights");
}

#[test]
fn growth_carries_everything_over_by_name() {
    let stream = host::stream(2);
    let bare = host::bare(BASELINE, DIMS);
    let mut plain = network(&stream, &bare, 8);
    let mut grows = network(&stream, &bare, 8);
    train(&mut plain, 0..6, 8);
    train(&mut grows, 0..2, 8);
    let before = (grows.state_dict().unwrap(), grows.momentum_dict().unwrap());

    // A module is added: the host keeps values, momentum and buffers.
    let training = grown(BASELINE, DIMS, &["r0c1"], Stage::Training);
    grows.set_graph(Arc::clone(&training)).unwrap();
    assert_eq!(without(&grows.state_dict().unwrap(), "slots"), before.0);
    assert_eq!(without(&grows.momentum_dict().unwrap(), "slots"), before.1);
    assert_eq!(metrics(&grows).steps, 0, "metrics start anew");
    let elsewhere = network(&stream, &grown(BASELINE, DIMS, &["r0c1", "r1c1"], Stage::Training), 8);
    let fresh = only(&grows.state_dict().unwrap(), "slots.r0c1");
    assert_eq!(fresh, only(&elsewhere.state_dict().unwrap(), "slots.r0c1"), "keyed by name alone");
    train(&mut grows, 2..4, 8);

    // The module starts to blend, with a gate: the group has new parameters, and the old ones are
    // carried over.
    let (values, momentum) = (grows.state_dict().unwrap(), grows.momentum_dict().unwrap());
    let blending = grown(BASELINE, DIMS, &["r0c1"], Stage::Blending(BlendMode::Gate));
    grows.set_graph(blending).unwrap();
    let (after, after_momentum) = (grows.state_dict().unwrap(), grows.momentum_dict().unwrap());
    for (name, tensor) in values.iter() {
        assert_eq!(Some(tensor), after.get(name), "{name}");
    }
    for (name, tensor) in momentum.iter() {
        assert_eq!(Some(tensor), after_momentum.get(name), "momentum of {name}");
    }
    assert_eq!(after.len(), values.len() + 2);
    assert_eq!(after_momentum.get("slots.r0c1.gate.weight").unwrap().as_f32().unwrap(), [0.0; 16]);

    // The module is removed: the host equals a host that never had a module.
    grows.set_graph(bare).unwrap();
    train(&mut grows, 4..6, 8);
    assert_same("state_dict", &grows.state_dict().unwrap(), &plain.state_dict().unwrap());
    assert_same("momentum_dict", &grows.momentum_dict().unwrap(), &plain.momentum_dict().unwrap());
    // The module is added again, with new parameters.
    grows.set_graph(training).unwrap();
    assert_eq!(only(&grows.state_dict().unwrap(), "slots"), fresh);
}

/// Each batch size has a plan, and all plans use one arena: no plan reads contents that another
/// plan left.
#[test]
fn batches_of_any_size() {
    let stream = host::stream(1);
    let graph = host::bare(BASELINE, DIMS);
    let run = |batch_max: usize| {
        let mut network = network(&stream, &graph, batch_max);
        for (step, n) in [5usize, 1, 3, 5, 2, 3].into_iter().enumerate() {
            train(&mut network, step as u64..step as u64 + 1, n);
        }
        (all_bits(&network.state_dict().unwrap()), metrics(&network))
    };
    let (state, metrics) = run(5);
    assert_eq!((metrics.samples, metrics.steps), (19, 6));
    assert!((state, metrics) == run(9));
}

#[test]
fn evaluation_counts_and_sums_per_configuration() {
    let stream = host::stream(1);
    let graph = grown(BASELINE, DIMS, &["r0c0"], Stage::Blending(BlendMode::Add));
    let mut network = network(&stream, &graph, 8);
    // Away from the identity, so that alpha matters.
    let mut state = network.state_dict().unwrap();
    state.insert("slots.r0c0.layers.1.weight", HostTensor::f32(&[8], vec![3.0; 8]));
    network.load_state_dict(&state, true).unwrap();
    network.set_alphas(&[vec![0.0], vec![0.5], vec![1.0]]).unwrap();
    let before = network.state_dict().unwrap();
    let mut expected = [(0.0, 0u64, 0u64); 3];
    for (seed, n) in [(1, 8), (2, 3)] {
        let (x, y) = batch(&stream, n, DIMS, seed);
        for (config, sums) in expected.iter_mut().enumerate() {
            network.eval_step(&x, &y, config).unwrap();
            let logits = network.infer(&x, config).unwrap();
            assert_eq!(logits.dims(), [n, 10]);
            for (z, y) in logits.to_vec::<f32>().unwrap().chunks(10).zip(data(n, DIMS, seed).y) {
                let z: Vec<f64> = z.iter().map(|v| f64::from(*v)).collect();
                let max = z.iter().copied().fold(f64::MIN, f64::max);
                sums.0 += z.iter().map(|v| v.exp()).sum::<f64>().ln() - z[y as usize];
                sums.1 += u64::from(z[y as usize] == max);
                sums.2 += 1;
            }
        }
    }
    let metrics = metrics(&network);
    for (row, (loss, correct, samples)) in metrics.eval.iter().zip(expected) {
        assert!((row.loss_sum - loss).abs() < 1e-5 * loss, "{} {loss}", row.loss_sum);
        assert_eq!((row.correct, row.samples), (correct, samples));
    }
    assert_ne!(metrics.eval[0].loss_sum, metrics.eval[2].loss_sum);
    assert_eq!((metrics.eval[3].samples, metrics.steps), (0, 0));
    assert_eq!(network.state_dict().unwrap(), before, "evaluation changes nothing");
    // With alpha 0 the result equals the host's.
    let mut alone = self::network(&stream, &host::bare(BASELINE, DIMS), 8);
    let (x, _) = batch(&stream, 8, DIMS, 4);
    let infer = |n: &mut Network, config| n.infer(&x, config).unwrap().to_vec::<f32>().unwrap();
    let logits = [infer(&mut alone, 0), infer(&mut network, 0), infer(&mut network, 2)];
    assert_eq!(logits[0], logits[1]);
    assert_ne!(logits[0], logits[2]);
    network.reset_metrics().unwrap();
    assert_eq!(self::metrics(&network).eval[0].samples, 0);
}

/// H1, H4, D5: a step copies nothing, waits for nothing, allocates nothing.
#[test]
fn a_step_is_one_launch_and_nothing_else() {
    let stream = host::stream(2);
    let graph = grown(BASELINE, DIMS, &["r0c0", "r1c2"], Stage::Blending(BlendMode::Multiply));
    let mut network = network(&stream, &graph, 8);
    let batches: Vec<_> = [8, 8, 3].map(|n| batch(&stream, n, DIMS, n as u64)).into();
    let epoch = |network: &mut Network| {
        for (x, y) in &batches {
            network.train_step(x, y).unwrap();
            network.eval_step(x, y, 1).unwrap();
        }
    };
    epoch(&mut network);
    let before = stream.device().counts();
    (0..10).for_each(|_| epoch(&mut network));
    let used = stream.device().counts() - before;
    assert_eq!(used.launches, 60);
    let others =
        (used.copies_to_host, used.copies_to_device, used.synchronizations, used.allocations);
    assert_eq!(others, (0, 0, 0, 0));
    network.set_alphas(&[vec![0.1], vec![0.2]]).unwrap();
    let used = stream.device().counts() - before;
    assert_eq!((used.copies_to_device, used.synchronizations), (1, 0));
    // Returning to a known topology needs no larger arena and compiles nothing.
    let owners = |owner: Owner| {
        let report = stream.device().memory();
        report.owners.iter().find(|o| o.owner == owner).map_or(0, |o| o.current)
    };
    for owner in [Owner::Parameters, Owner::Activations, Owner::Metrics] {
        assert!(owners(owner) > 0, "{owner:?}");
    }
}

#[test]
fn gradient_metrics_are_the_gradients() {
    let stream = host::stream(1);
    let mut graph = (*grown(BASELINE, DIMS, &["r1c0"], Stage::Training)).clone();
    for group in &mut graph.groups {
        // With a zero momentum, no decay and no clipping the momentum is the gradient.
        let still = SgdConfig { lr: 0.0, momentum: 0.0, weight_decay: 0.0, clip_norm: f32::MAX };
        group.optimiser = still.into();
    }
    let mut network = network(&stream, &Arc::new(graph), 8);
    train(&mut network, 0..1, 8);
    let metrics = metrics(&network);
    let gradients = network.momentum_dict().unwrap();
    for (g, prefix) in [(0, ""), (1, "slots")] {
        let norms: Vec<f64> = gradients
            .iter()
            .filter(|(name, _)| name.starts_with("slots") != prefix.is_empty())
            .map(|(_, t)| t.as_f32().unwrap().iter().map(|v| f64::from(*v).powi(2)).sum::<f64>())
            .collect();
        let norm = norms.iter().sum::<f64>().sqrt();
        let group = metrics.groups[g];
        assert!((group.last_norm - norm).abs() < 1e-9 * norm, "{} {norm}", group.last_norm);
        assert_eq!(group.tensors as usize, norms.len());
        // In a new module the last scale is zero, so the gradients of all layers before it are
        // zero.
        let vanishing = norms.iter().filter(|n| n.sqrt() < 1e-7).count();
        assert_eq!(group.vanishing as usize, vanishing);
    }
    assert!(metrics.groups[1].vanishing > 0 && metrics.groups[1].health().unwrap() < 1.0);
}

#[test]
fn weights_that_do_not_fit_are_listed_and_change_nothing() {
    let stream = host::stream(1);
    let mut network = network(&stream, &host::bare(MINIMAL, DIMS), 4);
    let good = network.state_dict().unwrap();
    let mut bad = good.clone();
    bad.0.remove("blocks.0.conv.weight");
    bad.insert("blocks.9.conv.weight", HostTensor::f32(&[1], vec![0.0]));
    bad.insert("classifier.bias", HostTensor::f32(&[3], vec![0.0; 3]));
    bad.insert("blocks.1.bn.weight", HostTensor::f32(&[4], vec![f32::INFINITY; 4]));
    bad.insert("blocks.1.bn.num_batches_tracked", HostTensor::f32(&[], vec![0.0]));
    let error = network.load_state_dict(&bad, true).unwrap_err();
    assert!(matches!(error, Error::State(_)), "{error:?}");
    for part in [
        "missing (1): blocks.0.conv.weight",
        "not in the network (1): blocks.9.conv.weight",
        "classifier.bias (expected f32 [10], got f32 [3])",
        "blocks.1.bn.num_batches_tracked (expected i64 [], got f32 [])",
        "with NaN or infinity (1): blocks.1.bn.weight",
    ] {
        assert!(error.to_string().contains(part), "{error}");
    }
    assert_eq!(network.state_dict().unwrap(), good);
    let mut part = StateDict::default();
    part.insert("classifier.bias", HostTensor::f32(&[10], vec![2.0; 10]));
    part.insert("of another network", HostTensor::scalar_i64(1));
    let Err(Error::State(error)) = network.load_state_dict(&part, true) else { panic!("taken") };
    assert_eq!(error.extra, ["of another network"]);
    network.load_state_dict(&part, false).unwrap();
    let mut expected = good;
    expected.insert("classifier.bias", HostTensor::f32(&[10], vec![2.0; 10]));
    assert_eq!(network.state_dict().unwrap(), expected);
    train(&mut network, 0..1, 4);
    let momentum = network.momentum_dict().unwrap();
    network.clear_momentum().unwrap();
    assert!(
        network.momentum_dict().unwrap().iter().all(|(_, t)| t
            .as_f32()
            .unwrap()
            .iter()
            .all(|v| *v == 0.0))
    );
    network.load_momentum_dict(&momentum).unwrap();
    assert_eq!(network.momentum_dict().unwrap(), momentum);
}

/// A run that continues from saved weights and momentum has the bits of an uninterrupted run.
#[test]
fn state_and_momentum_are_all_there_is() {
    let stream = host::stream(1);
    let graph = grown(BASELINE, DIMS, &["r0c0"], Stage::Fossilized);
    let mut whole = network(&stream, &graph, 6);
    train(&mut whole, 0..3, 6);
    let (state, momentum) = (whole.state_dict().unwrap(), whole.momentum_dict().unwrap());
    train(&mut whole, 3..6, 6);
    let options = NetworkOptions::new(77, 3, Isa::detect(), 6);
    let mut resumed = Network::new(&stream, graph, options).unwrap();
    resumed.load_state_dict(&state, true).unwrap();
    resumed.load_momentum_dict(&momentum).unwrap();
    train(&mut resumed, 3..6, 6);
    assert_same("state_dict", &resumed.state_dict().unwrap(), &whole.state_dict().unwrap());
    assert_same(
        "momentum_dict",
        &resumed.momentum_dict().unwrap(),
        &whole.momentum_dict().unwrap(),
    );
}

/// The same with Adam: two averages and a count of steps per parameter. Earlier versions counted
/// the steps of a group. Parameters that are new in a group begin with averages and counts of zero.
#[test]
fn adam_trains_is_resumed_and_grows() {
    let stream = host::stream(1);
    let under_adam = |slots: &[&str]| {
        let mut graph = (*grown(BASELINE, DIMS, slots, Stage::Fossilized)).clone();
        let adam = AdamConfig {
            lr: 1e-3,
            betas: [0.9, 0.999],
            eps: 1e-5,
            weight_decay: 0.0,
            clip_norm: 1.0,
        };
        graph.groups[0].optimiser = adam.into();
        Arc::new(graph)
    };
    let graph = under_adam(&["r0c0"]);
    let mut whole = network(&stream, &graph, 6);
    train(&mut whole, 0..3, 6);
    let (state, moments) = (whole.state_dict().unwrap(), whole.momentum_dict().unwrap());
    assert_eq!(moments.get("classifier.weight.step"), Some(&HostTensor::scalar_i64(3)));
    let square = moments.get("classifier.weight.exp_avg_sq").unwrap().as_f32().unwrap();
    assert!(square.iter().all(|v| *v >= 0.0) && square.iter().any(|v| *v > 0.0));
    assert!(moments.get("slots.r0c0.layers.0.weight").is_some(), "a module with SGD has momentum");
    train(&mut whole, 3..6, 6);
    let mut resumed = network(&stream, &graph, 6);
    resumed.load_state_dict(&state, true).unwrap();
    resumed.load_momentum_dict(&moments).unwrap();
    train(&mut resumed, 3..6, 6);
    assert_same("state", &resumed.state_dict().unwrap(), &whole.state_dict().unwrap());
    assert_same("moments", &resumed.momentum_dict().unwrap(), &whole.momentum_dict().unwrap());
    let mut of_group = moments.clone();
    of_group.0.retain(|name, _| !name.ends_with(".step"));
    of_group.insert("host.step", HostTensor::scalar_i64(3));
    resumed.load_momentum_dict(&of_group).unwrap();
    assert_eq!(resumed.momentum_dict().unwrap(), moments);
    let before = whole.momentum_dict().unwrap();
    whole.set_graph(under_adam(&["r0c0", "r1c0"])).unwrap();
    for (name, tensor) in whole.momentum_dict().unwrap().iter() {
        match before.get(name) {
            Some(before) => assert_eq!(tensor, before, "{name}"),
            None => assert!(tensor.as_f32().is_none_or(|v| v.iter().all(|v| *v == 0.0)), "{name}"),
        }
    }
    whole.clear_momentum().unwrap();
    let cleared = whole.momentum_dict().unwrap();
    assert_eq!(cleared.get("classifier.bias.step"), Some(&HostTensor::scalar_i64(0)));
}

//! Training steps in three calls, with a loss of the caller.

use std::sync::Arc;

use crate::branches;
use crate::common::Random;
use crate::common::host::{self, BASELINE, MINIMAL};
use crate::network::{DIMS, Stage, batch, grown, metrics, network, state_bits};
use meristem_device::{Owner, Stream, Tensor};
use meristem_nn::graph::{BlendMode, Dims, Graph, GraphBuilder, SgdConfig};
use meristem_nn::kernels::loss::softmax_cross_entropy;
use meristem_nn::{Error, HostTensor, Isa, Network, NetworkFleet, NetworkOptions, StateDict};

const CLASSES: usize = 10;

/// The gradient of the mean cross-entropy by the outputs, as the built-in loss computes it.
fn gradient(outputs: &Tensor, labels: &Tensor) -> Tensor {
    let (logits, labels) = (outputs.to_vec::<f32>().unwrap(), labels.to_vec::<u32>().unwrap());
    let mut gradient = vec![0.0; logits.len()];
    softmax_cross_entropy(Isa::detect(), CLASSES, &logits, &labels, &mut gradient, &mut []);
    Tensor::from_slice(outputs.stream(), &gradient, [labels.len(), CLASSES], Owner::Batches)
        .unwrap()
}

fn three_calls(network: &mut Network, x: &Tensor, y: &Tensor) {
    let outputs = network.forward(x).unwrap();
    network.backward(&gradient(&outputs, y)).unwrap();
    network.update().unwrap();
}

fn graphs() -> Vec<Arc<Graph>> {
    let stages = [Stage::Training, Stage::Blending(BlendMode::Gate), Stage::Fossilized];
    let grown = stages.map(|stage| grown(BASELINE, DIMS, &["r0c0", "r1c1"], stage));
    let bare = [host::bare(BASELINE, DIMS), host::bare(MINIMAL, DIMS)];
    bare.into_iter().chain(grown).chain([false, true].map(branches::graph)).collect()
}

#[test]
fn three_calls_have_the_bits_of_a_step_with_the_built_in_loss() {
    for threads in [1, 3] {
        let stream = host::stream(threads);
        for graph in graphs() {
            let [mut whole, mut calls] = [(); 2].map(|()| network(&stream, &graph, 6));
            for network in [&mut whole, &mut calls] {
                network.set_alphas(&[vec![0.3; graph.alphas]]).unwrap();
            }
            for (step, size) in [6, 6, 4, 6].into_iter().enumerate() {
                let dims = graph.input_dims();
                let (x, y) = batch(&stream, size, dims, step as u64);
                whole.train_step(&x, &y).unwrap();
                three_calls(&mut calls, &x, &y);
                assert_eq!(state_bits(&calls), state_bits(&whole), "step {step}");
            }
            let [whole, calls] = [&whole, &calls].map(metrics);
            assert_eq!(calls.groups, whole.groups, "norms of the gradients");
            assert_eq!((calls.steps, calls.loss_sum), (0, 0.0), "there is no loss");
        }
    }
}

/// Evaluation, inference and a training step of other calls between forward and backward leave the
/// activations as they are.
#[test]
fn other_calls_may_come_in_between() {
    let (stream, graph) = (host::stream(2), host::bare(BASELINE, DIMS));
    let [mut plain, mut busy] = [(); 2].map(|()| network(&stream, &graph, 6));
    let (x, y) = batch(&stream, 6, DIMS, 1);
    let (other, labels) = batch(&stream, 5, DIMS, 2);
    for _ in 0..2 {
        three_calls(&mut plain, &x, &y);
        let outputs = busy.forward(&x).unwrap();
        let before = outputs.to_vec::<f32>().unwrap();
        let inferred = busy.infer(&other, 0).unwrap().to_vec::<f32>().unwrap();
        busy.eval_step(&other, &labels, 0).unwrap();
        assert_eq!(outputs.to_vec::<f32>().unwrap(), before);
        busy.backward(&gradient(&outputs, &y)).unwrap();
        assert_eq!(busy.infer(&other, 0).unwrap().to_vec::<f32>().unwrap(), inferred);
        assert!(busy.has_gradient());
        busy.update().unwrap();
        assert!(!busy.has_gradient());
        assert_eq!(state_bits(&busy), state_bits(&plain));
    }
}

#[test]
fn a_call_is_one_launch_and_nothing_else() {
    let (stream, graph) = (host::stream(1), host::bare(BASELINE, DIMS));
    let mut network = network(&stream, &graph, 6);
    let (x, y) = batch(&stream, 6, DIMS, 1);
    let outputs = network.forward(&x).unwrap();
    let given = gradient(&outputs, &y);
    for _ in 0..2 {
        let before = stream.device().counts();
        network.forward(&x).unwrap();
        network.backward(&given).unwrap();
        network.update().unwrap();
        let spent = stream.device().counts() - before;
        assert_eq!((spent.launches, spent.synchronizations, spent.copies_to_device), (3, 0, 0));
    }
}

/// One linear layer, plain SGD: everything follows by hand.
fn linear() -> Arc<Graph> {
    let sgd = SgdConfig { lr: 0.5, momentum: 0.0, weight_decay: 0.0, clip_norm: 1e9 };
    let mut b = GraphBuilder::new(Dims { c: 2, h: 1, w: 1 }, sgd);
    let y = b.linear(b.input(), "fc", 1, true, None).unwrap();
    Arc::new(b.finish(y).unwrap())
}

fn linear_network(stream: &Stream) -> Network {
    let options = NetworkOptions::new(1, 0, Isa::detect(), 4);
    let mut network = Network::new(stream, linear(), options).unwrap();
    let mut state = StateDict::default();
    state.insert("fc.weight", HostTensor::f32(&[1, 2], vec![1.0, -2.0]));
    state.insert("fc.bias", HostTensor::f32(&[1], vec![0.5]));
    network.load_state_dict(&state, true).unwrap();
    network
}

fn rows(stream: &Stream, values: &[f32], columns: usize) -> Tensor {
    let shape = [values.len() / columns, columns];
    Tensor::from_slice(stream, values, shape, Owner::Batches).unwrap()
}

fn parameters(network: &Network) -> [f32; 3] {
    let state = network.state_dict().unwrap();
    let of = |name| state.get(name).unwrap().as_f32().unwrap().to_vec();
    [of("fc.weight")[0], of("fc.weight")[1], of("fc.bias")[0]]
}

#[test]
fn a_step_by_hand() {
    let stream = host::stream(1);
    let mut network = linear_network(&stream);
    let outputs = network.forward(&rows(&stream, &[1.0, 1.0, 2.0, 0.5], 2)).unwrap();
    assert_eq!(outputs.dims(), [2, 1]);
    // 1 − 2 + ½, 2 − 1 + ½.
    assert_eq!(outputs.to_vec::<f32>().unwrap(), [-0.5, 1.5]);
    network.backward(&rows(&stream, &[2.0, -1.0], 1)).unwrap();
    network.update().unwrap();
    // Gradients: 2·1 − 1·2 = 0, 2·1 − 1·½ = 1½, 2 − 1 = 1.
    assert_eq!(parameters(&network), [1.0, -2.75, 0.0]);
}

/// The gradients of several backward passes add up, whatever the sizes of their batches, until the
/// update; a forward pass alone adds nothing.
#[test]
fn gradients_add_up_until_the_update() {
    let stream = host::stream(1);
    let mut network = linear_network(&stream);
    let pass = |network: &mut Network, inputs: &[f32], gradient: &[f32]| {
        network.forward(&rows(&stream, inputs, 2)).unwrap();
        network.backward(&rows(&stream, gradient, 1)).unwrap();
    };
    pass(&mut network, &[1.0, 0.0], &[1.0]);
    pass(&mut network, &[0.0, 1.0, 1.0, 1.0], &[2.0, 0.0]);
    pass(&mut network, &[1.0, 0.0], &[3.0]);
    network.forward(&rows(&stream, &[7.0, 7.0], 2)).unwrap();
    network.update().unwrap();
    // Gradients: 1 + 3, 2, 1 + 2 + 3.
    assert_eq!(parameters(&network), [1.0 - 2.0, -2.0 - 1.0, 0.5 - 3.0]);
    // The forward pass went with the update, and nothing is left of the sums.
    assert!(network.backward(&rows(&stream, &[1.0], 1)).is_err());
    pass(&mut network, &[1.0, 0.0], &[2.0]);
    network.update().unwrap();
    assert_eq!(parameters(&network), [-2.0, -3.0, -3.5]);
    pass(&mut network, &[1.0, 0.0], &[2.0]);
    network.drop_gradient();
    assert!(!network.has_gradient());
    assert_eq!(parameters(&network), [-2.0, -3.0, -3.5]);
}

#[test]
fn a_fleet_has_the_bits_of_its_networks_alone() {
    let device = host::stream(2).device().clone();
    let graphs = graphs();
    let new = || -> Vec<Network> {
        let of = |(env, graph)| network(&device.stream(&format!("env {env}")), graph, 6);
        graphs[..3].iter().enumerate().map(of).collect()
    };
    let (mut together, mut alone) = (new(), new());
    for step in 0..3 {
        let batches: Vec<_> = together
            .iter()
            .enumerate()
            .map(|(env, network)| batch(network.stream(), 6, DIMS, 10 * step + env as u64))
            .collect();
        let inputs: Vec<&Tensor> = batches.iter().map(|(x, _)| x).collect();
        let mut fleet = NetworkFleet::new(&mut together);
        let outputs = fleet.forward(&inputs).unwrap();
        let gradients: Vec<Tensor> =
            outputs.iter().zip(&batches).map(|(outputs, (_, y))| gradient(outputs, y)).collect();
        fleet.backward(&gradients.iter().collect::<Vec<_>>()).unwrap();
        fleet.update().unwrap();
        let inferred = fleet.infer(&inputs, 0).unwrap();
        for (env, network) in alone.iter_mut().enumerate() {
            let (x, y) = batch(network.stream(), 6, DIMS, 10 * step + env as u64);
            three_calls(network, &x, &y);
            let expected = network.infer(&x, 0).unwrap().to_vec::<f32>().unwrap();
            assert_eq!(inferred[env].to_vec::<f32>().unwrap(), expected);
        }
    }
    for (got, expected) in together.iter().zip(&alone) {
        assert_eq!(state_bits(got), state_bits(expected));
    }
}

#[test]
fn calls_that_do_not_fit_are_refused_before_anything_runs() {
    let (stream, other) = (host::stream(1), host::stream(1));
    let graph = host::bare(BASELINE, DIMS);
    let mut network = network(&stream, &graph, 4);
    let mut random = Random(3);
    let x = host::images(&stream, &random.normals(4 * DIMS.numel()), DIMS);
    let given = rows(&stream, &random.normals(4 * CLASSES), CLASSES);
    let before = stream.device().counts().launches;
    let argument = |result: Result<(), Error>, word: &str| {
        let error = result.unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    };
    argument(network.backward(&given), "a forward pass, from `forward`");
    argument(network.update(), "from `backward`");
    let large = host::images(&stream, &random.normals(5 * DIMS.numel()), DIMS);
    argument(network.forward(&large).map(drop), "inputs");
    let elsewhere = host::images(&other, &random.normals(4 * DIMS.numel()), DIMS);
    argument(network.forward(&elsewhere).map(drop), "inputs");
    assert_eq!(stream.device().counts().launches, before);
    network.forward(&x).unwrap();
    argument(network.backward(&rows(&stream, &[0.0; 30], CLASSES)), "gradient");
    argument(network.backward(&rows(&other, &[0.0; 40], CLASSES)), "gradient");
    argument(NetworkFleet::new([&mut network]).backward(&[&given, &given]), "gradients");
    assert_eq!(stream.device().counts().launches, before + 1);
    network.backward(&given).unwrap();
    argument(network.backward(&given), "a forward pass");
    // Growth drops the gradient, which belongs to the plan of another graph.
    network.set_graph(grown(BASELINE, DIMS, &["r0c0"], Stage::Fossilized)).unwrap();
    argument(network.update(), "from `backward`");
}

//! Invalid input, which a network refuses with a typed error and without a change of state.

use std::sync::Arc;

use crate::common::host::{self, MINIMAL, Shape};
use crate::network::{DIMS, MODULE, Stage, batch, grown, metrics, network, train};
use meristem_device::{DType, Error as DeviceError, Owner, Tensor};
use meristem_nn::graph::{Dims, GraphBuilder};
use meristem_nn::{Error, Network, NetworkOptions, Result};

#[test]
fn bad_input_is_a_typed_error() {
    let stream = host::stream(1);
    let graph = host::bare(MINIMAL, DIMS);
    let mut network = network(&stream, &graph, 4);
    let (x, y) = batch(&stream, 4, DIMS, 0);
    let argument = |result: Result<()>, words: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    let mismatch = |result: Result<()>, words: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Device(DeviceError::Mismatch { .. })), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    let (large, labels) = batch(&stream, 5, DIMS, 0);
    let words = "of shape [1..=4, 3, 16, 16], got [5, 3, 16, 16]";
    mismatch(network.train_step(&large, &labels), words);
    mismatch(network.train_step(&x, &labels), "of shape [4], got [5]");
    argument(network.eval_step(&x, &y, 99), "`config` must be below 32, got 99");
    let nchw = Tensor::zeros(&stream, [4, 3, 16, 16], DType::F32, Owner::Batches).unwrap();
    mismatch(network.train_step(&nchw, &y), "channels last");
    let (other, _) = batch(&stream, 4, Dims { c: 3, h: 16, w: 8 }, 0);
    mismatch(network.infer(&other, 0).map(drop), "got [4, 3, 16, 8]");
    argument(network.set_alphas(&[vec![0.0]]), "rows of 0 alphas");
    let elsewhere = stream.device().stream("another");
    let (x, y) = batch(&elsewhere, 4, DIMS, 0);
    mismatch(network.train_step(&x, &y), "another");
    let zero = NetworkOptions { batch_max: 0, ..network.options().clone() };
    let refused = Network::new(&stream, graph, zero).map(drop);
    argument(refused, "`batch_max` must be at least 1, got 0");
    train(&mut network, 0..1, 4); // still in order
    assert_eq!(metrics(&network).steps, 1);
}

#[test]
fn batch_norm_refuses_one_value_per_channel() {
    let stream = host::stream(1);
    let dims = Dims { c: 2, h: 4, w: 4 };
    let shape = Shape { channels: 2, blocks: 3, kernel: 1, pools: 2 };
    let mut network = network(&stream, &host::bare(shape, dims), 4);
    let before = network.state_dict().unwrap();
    let (x, y) = batch(&stream, 1, dims, 0);
    let error = network.train_step(&x, &y).unwrap_err();
    assert!(matches!(
        &error,
        Error::OneValuePerChannel { parameter } if parameter == "blocks.2.bn.weight"
    ));
    assert_eq!(network.state_dict().unwrap(), before);
    network.eval_step(&x, &y, 0).unwrap();
    train(&mut network, 0..1, 2);
    assert_eq!(metrics(&network).eval[0].samples, 1);
}

#[test]
fn a_graph_that_cannot_be_leaves_the_network_as_it_was() {
    let stream = host::stream(1);
    let mut network = network(&stream, &host::bare(MINIMAL, DIMS), 4);
    train(&mut network, 0..1, 4);
    let before = (network.state_dict().unwrap(), metrics(&network));
    let mut twice = (*grown(MINIMAL, DIMS, &[], Stage::Training)).clone();
    twice.groups.push(twice.groups[0].clone());
    assert!(matches!(network.set_graph(Arc::new(twice)), Err(Error::DuplicateName { .. })));
    let mut two_inputs = GraphBuilder::new(DIMS, MODULE);
    two_inputs.another_input(DIMS);
    let x = two_inputs.global_avg_pool(two_inputs.input());
    let refused = network.set_graph(Arc::new(two_inputs.finish(x).unwrap())).unwrap_err();
    assert!(matches!(refused, Error::Argument { .. }), "{refused:?}");
    assert!(refused.to_string().contains("`graph` must be a graph with one input, got 2 inputs"));
    assert_eq!((network.state_dict().unwrap(), metrics(&network)), before);
    train(&mut network, 1..2, 4);
    assert_eq!(metrics(&network).steps, 2);
}

#[test]
fn a_slope_below_zero_is_refused() {
    let mut b = GraphBuilder::new(DIMS, MODULE);
    for slope in [-0.1, f32::NAN, f32::INFINITY] {
        let error = b.leaky_relu(b.input(), slope).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        assert!(error.to_string().contains("a finite slope of at least 0"), "{error}");
    }
    b.leaky_relu(b.input(), 0.0).unwrap();
}

//! Orthogonality of the activations of layers.

use std::sync::Arc;

use crate::common::{Random, host};
use crate::network::network;
use meristem_device::{Owner, Tensor};
use meristem_nn::graph::{ConvGeometry, Dims, Graph, GraphBuilder, SgdConfig};
use meristem_nn::{ActivationProbe, HostTensor, Network};

const SGD: SgdConfig = SgdConfig { lr: 0.05, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };

fn mlp() -> Arc<Graph> {
    let mut b = GraphBuilder::new(Dims { c: 3, h: 1, w: 1 }, SGD);
    let x = b.linear(b.input(), "one", 5, true, None).unwrap();
    let x = b.relu(x);
    let x = b.linear(x, "two", 4, true, None).unwrap();
    let x = b.relu(x);
    let x = b.linear(x, "classifier", 2, true, None).unwrap();
    Arc::new(b.finish(x).unwrap())
}

/// A convolution, whose image is read by a convolution, and by a linear layer if it is flattened.
fn conv(flattened: bool) -> Arc<Graph> {
    let mut b = GraphBuilder::new(Dims { c: 2, h: 3, w: 2 }, SGD);
    let x = b.conv2d(b.input(), "one", 4, ConvGeometry::same(3), true).unwrap();
    let x = b.relu(x);
    let x = if flattened {
        b.flatten(x)
    } else {
        let x = b.conv2d(x, "two", 3, ConvGeometry::same(1), true).unwrap();
        b.global_avg_pool(x)
    };
    let x = b.linear(x, "classifier", 2, true, None).unwrap();
    Arc::new(b.finish(x).unwrap())
}

fn set(it: &mut Network, name: &str, values: Vec<f32>) {
    let mut state = it.state_dict().unwrap();
    let shape = state.get(name).unwrap().shape.clone();
    state.insert(name, HostTensor::f32(&shape, values));
    it.load_state_dict(&state, true).unwrap();
}

fn orthogonality(it: &Network, x: &Tensor, readers: &[&str]) -> Vec<f32> {
    let readers: Vec<String> = readers.iter().map(|reader| (*reader).into()).collect();
    let mut probe = ActivationProbe::new(it, &readers).unwrap();
    assert!(probe.orthogonality().iter().all(|phi| phi.is_nan()), "without samples");
    for _ in 0..2 {
        probe.add(x).unwrap();
    }
    assert!(probe.flops().unwrap() > 0);
    probe.orthogonality()
}

/// Features by weights of known rank: one is dead, one repeats another, one is small.
#[test]
fn dead_small_and_repeated_features_are_no_directions() {
    let stream = host::stream(1);
    let mut it = network(&stream, &mlp(), 40);
    let weights = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0; 3], [0.0, 0.0, 1e-3]];
    set(&mut it, "one.weight", weights.concat());
    set(&mut it, "one.bias", vec![0.0; 5]);
    let x = Random(3).normals(40 * 3);
    let x = Tensor::from_slice(&stream, &x, [40, 3], Owner::Batches).unwrap();
    let before = it.state_dict().unwrap();
    let phi = orthogonality(&it, &x, &["two.weight", "one.weight"]);
    assert_eq!(phi, [2.0 / 5.0, 1.0], "two directions of five features; the three inputs");
    assert_eq!(it.state_dict().unwrap(), before);
    let infinite = [f32::INFINITY; 3];
    let infinite = Tensor::from_slice(&stream, &infinite, [1, 3], Owner::Batches).unwrap();
    assert!(orthogonality(&it, &infinite, &["two.weight"])[0].is_nan());
    let error = ActivationProbe::new(&it, &["three.weight".into()]).unwrap_err();
    assert!(error.to_string().contains("three.weight"), "{error}");
}

/// Each pixel is a sample: two equal channels are one direction, whoever reads them.
#[test]
fn pixels_are_samples() {
    let stream = host::stream(1);
    for (flattened, reader) in [(false, "two.weight"), (true, "classifier.weight")] {
        let graph = conv(flattened);
        let mut it = network(&stream, &graph, 8);
        let state = it.state_dict().unwrap();
        let weights = state.get("one.weight").unwrap().as_f32().unwrap();
        let x = host::images(&stream, &Random(4).normals(8 * 12), graph.input_dims());
        assert_eq!(orthogonality(&it, &x, &[reader]), [1.0]);
        let twice = [&weights[..18], &weights[..18], &weights[36..]].concat();
        set(&mut it, "one.weight", twice);
        set(&mut it, "one.bias", vec![0.5; 4]);
        assert_eq!(orthogonality(&it, &x, &[reader]), [0.75]);
    }
}

//! Whole hosts against PyTorch: twenty SGD steps on fixed data and weights.

use std::path::Path;

use crate::common::golden;
use crate::common::host::{self, BASELINE, DEEP, MINIMAL, Shape};
use meristem_nn::graph::Dims;
use meristem_nn::{
    HostData, HostTensor, Isa, Metrics, Network, NetworkOptions, StateDict, safetensors,
};

/// Relative tolerance of the losses. The requirement is 1e-4; PyTorch itself is about 1e-7 from
/// f64, so a different order of summation over twenty steps cannot cause a larger error than this.
const LOSS: f64 = 1e-5;
/// Tolerance of a weight tensor, |Δ|₂/|w|₂. The requirement is 1e-3.
const WEIGHTS: f64 = 1e-4;

/// The weights `<kind>/<name>` of a golden file.
fn weights(file: &golden::File, kind: &str) -> StateDict {
    let mut state = StateDict::default();
    for (key, tensor) in &file.tensors {
        let Some(name) = key.strip_prefix(kind).and_then(|k| k.strip_prefix('/')) else { continue };
        let tensor = if name.ends_with("num_batches_tracked") {
            HostTensor::scalar_i64(tensor.values[0] as i64)
        } else {
            HostTensor::f32(&tensor.shape, tensor.values.clone())
        };
        state.insert(name, tensor);
    }
    state
}

fn distance(got: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f32, y: f32| (f64::from(x) - f64::from(y)).powi(2);
    let apart: f64 = got.iter().zip(expected).map(|(g, e)| square(*g, *e)).sum();
    let norm: f64 = expected.iter().map(|e| square(*e, 0.0)).sum();
    (apart / norm.max(1e-24)).sqrt()
}

fn follow(name: &str, shape: Shape, isa: Isa) {
    let file = golden::read(&format!("host_{name}"));
    let images = &file.tensors["images"];
    let &[batches, batch, c, h, w] = &images.shape[..] else { panic!("images") };
    let dims = Dims { c, h, w };
    let stream = host::stream(1);
    let options = NetworkOptions::new(1, 0, isa, batch);
    let mut network = Network::new(&stream, host::bare(shape, dims), options).unwrap();
    network.load_state_dict(&weights(&file, "init"), true).unwrap();
    let labels: Vec<u32> = file.tensors["labels"].values.iter().map(|v| *v as u32).collect();
    let steps = file.tensors["losses"].values.len();
    for step in 0..steps {
        let n = step % batches;
        let x = &images.values[n * batch * dims.numel()..][..batch * dims.numel()];
        let x: Vec<f32> = x.iter().map(|v| v / 128.0 - 1.0).collect();
        let x = host::images(&stream, &x, dims);
        let y = host::labels(&stream, &labels[n * batch..][..batch]);
        network.train_step(&x, &y).unwrap();
    }
    let metrics = Metrics::parse(&network.metrics().to_vec().unwrap());
    assert_eq!(metrics.batch_losses.len(), steps);
    for (i, (got, expected)) in
        metrics.batch_losses.iter().zip(&file.tensors["losses"].values).enumerate()
    {
        let apart = (got - f64::from(*expected)).abs() / f64::from(*expected);
        assert!(apart <= LOSS, "{name} {isa}: loss of step {i}: {got}, expected {expected}");
    }
    let (got, expected) = (network.state_dict().unwrap(), weights(&file, "final"));
    assert_eq!(got.len(), expected.len());
    for ((name, got), (other, expected)) in got.iter().zip(expected.iter()) {
        assert_eq!((name, &got.shape), (other, &expected.shape));
        match (&got.data, &expected.data) {
            (HostData::F32(got), HostData::F32(expected)) => {
                let apart = distance(got, expected);
                assert!(apart <= WEIGHTS, "{name} {isa}: {apart:.2e} from PyTorch's");
            }
            (got, expected) => assert_eq!(got, expected, "{name}"),
        }
    }
}

#[test]
fn baseline() {
    Isa::available().into_iter().for_each(|isa| follow("baseline", BASELINE, isa));
}

#[test]
fn deep() {
    Isa::available().into_iter().for_each(|isa| follow("deep", DEEP, isa));
}

#[test]
fn minimal() {
    Isa::available().into_iter().for_each(|isa| follow("minimal", MINIMAL, isa));
}

/// Weights written by PyTorch's tools load, and come back as the same bytes.
#[test]
fn weights_pass_through_a_file_unchanged() {
    let file = golden::read("host_baseline");
    let state = weights(&file, "init");
    let network = |state: &StateDict| {
        let stream = host::stream(1);
        let graph = host::bare(BASELINE, Dims { c: 3, h: 16, w: 16 });
        let mut network =
            Network::new(&stream, graph, NetworkOptions::new(3, 0, Isa::portable(), 2));
        let network = network.as_mut().unwrap();
        network.load_state_dict(state, true).unwrap();
        network.state_dict().unwrap()
    };
    let out = network(&state);
    assert_eq!(out, state);
    let path = Path::new("w.safetensors");
    let bytes = safetensors::to_bytes(path, &out, &Default::default()).unwrap();
    assert_eq!(network(&safetensors::from_bytes(path, &bytes).unwrap().0), state);
}

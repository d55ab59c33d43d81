//! Described hosts against PyTorch: twenty SGD steps on fixed data and weights.

use std::path::Path;
use std::sync::Arc;

use meristem_device::{
    DType, Device, DeviceId, DeviceOptions, MemoryFormat, Owner, Stream, Tensor,
};
use meristem_grow::{HostSpec, TaskShape, host_graph};
use meristem_nn::graph::SgdConfig;
use meristem_nn::safetensors::Metadata;
use meristem_nn::{HostData, Isa, Metrics, Network, NetworkOptions, StateDict};

/// Relative tolerance of the losses. PyTorch itself is about 1e-7 from f64, so that a different
/// order of summation over twenty steps cannot cause a larger error than this.
const LOSS: f64 = 1e-5;
/// Tolerance of a weight tensor, |Δ|₂/|w|₂.
const WEIGHTS: f64 = 1e-4;

fn golden(name: &str) -> (StateDict, Metadata) {
    let path = format!("{}/../../golden/host_{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
    meristem_nn::safetensors::load(Path::new(&path)).unwrap()
}

/// The weights `<kind>/<name>` of a golden file.
fn weights(file: &StateDict, kind: &str) -> StateDict {
    let mut state = StateDict::default();
    for (key, tensor) in file.iter() {
        if let Some(name) = key.strip_prefix(kind).and_then(|rest| rest.strip_prefix('/')) {
            state.insert(name, tensor.clone());
        }
    }
    state
}

/// Images of a batch, u8 in PyTorch's order, as x = u8 / 128 − 1.
fn images(stream: &Stream, bytes: &[u8], shape: [usize; 4]) -> Tensor {
    let [_, c, h, w] = shape;
    let at = |i: usize| {
        let (sample, pixel, channel) = (i / (c * h * w), i % (c * h * w) / c, i % c);
        f32::from(bytes[(sample * c + channel) * h * w + pixel]) / 128.0 - 1.0
    };
    let values: Vec<f32> = (0..bytes.len()).map(at).collect();
    let format = MemoryFormat::ChannelsLast;
    let tensor =
        Tensor::empty_with_format(stream, shape, DType::F32, format, Owner::Batches).unwrap();
    tensor.copy_from_slice(&values).unwrap();
    tensor
}

/// The optimiser of `reference/hosts.py`.
const SGD: SgdConfig = SgdConfig { lr: 0.01, momentum: 0.9, weight_decay: 5e-4, clip_norm: 1.0 };

fn bytes<'a>(file: &'a StateDict, name: &str) -> &'a [u8] {
    let HostData::U8(bytes) = &file.get(name).unwrap().data else { panic!("{name}") };
    bytes
}

fn follow(name: &str, isa: Isa) {
    let (file, metadata) = golden(name);
    let shape = &file.get("images").unwrap().shape;
    let &[batches, batch, channels, height, width] = &shape[..] else { panic!("images") };
    let image = TaskShape { channels, height, width, classes: 10 };
    let spec = HostSpec::from_json(&metadata["description"], name).unwrap();
    let graph = Arc::new(host_graph(&spec, &image, SGD).unwrap());
    let options = DeviceOptions { threads: 1, ..DeviceOptions::default() };
    let stream = Device::open(DeviceId::Cpu(0), &options).unwrap().stream("env 0");
    let mut network = Network::new(&stream, graph, NetworkOptions::new(1, 0, isa, batch)).unwrap();
    network.load_state_dict(&weights(&file, "init"), true).unwrap();
    let expected = file.get("losses").unwrap().as_f32().unwrap().to_vec();
    let sample = channels * height * width;
    for step in 0..expected.len() {
        let n = step % batches;
        let pixels = &bytes(&file, "images")[n * batch * sample..][..batch * sample];
        let x = images(&stream, pixels, [batch, channels, height, width]);
        let labels = &bytes(&file, "labels")[n * batch..][..batch];
        let labels: Vec<u32> = labels.iter().map(|label| u32::from(*label)).collect();
        let y = Tensor::from_slice(&stream, &labels, [batch], Owner::Batches).unwrap();
        network.train_step(&x, &y).unwrap();
    }
    let metrics = Metrics::parse(&network.metrics().to_vec().unwrap());
    for (i, (got, expected)) in metrics.batch_losses.iter().zip(&expected).enumerate() {
        let apart = (got - f64::from(*expected)).abs() / f64::from(*expected);
        assert!(apart <= LOSS, "{name} {isa}: loss of step {i}: {got}, expected {expected}");
    }
    assert_eq!(metrics.batch_losses.len(), expected.len());
    let (got, expected) = (network.state_dict().unwrap(), weights(&file, "final"));
    assert_eq!(got.len(), expected.len());
    for ((key, got), (other, expected)) in got.iter().zip(expected.iter()) {
        assert_eq!((key, &got.shape), (other, &expected.shape));
        match (&got.data, &expected.data) {
            (HostData::F32(got), HostData::F32(expected)) => {
                let apart = distance(got, expected);
                assert!(apart <= WEIGHTS, "{name} {isa}: {key}: {apart:.2e} from PyTorch's");
            }
            (got, expected) => assert_eq!(got, expected, "{key}"),
        }
    }
}

fn distance(got: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f32, y: f32| (f64::from(x) - f64::from(y)).powi(2);
    let apart: f64 = got.iter().zip(expected).map(|(g, e)| square(*g, *e)).sum();
    let norm: f64 = expected.iter().map(|e| square(*e, 0.0)).sum();
    (apart / norm.max(1e-24)).sqrt()
}

#[test]
fn residual_layers_train_as_in_pytorch() {
    Isa::available().into_iter().for_each(|isa| follow("residual", isa));
}

#[test]
fn saved_values_products_and_flat_images_train_as_in_pytorch() {
    Isa::available().into_iter().for_each(|isa| follow("joined", isa));
}

#[test]
fn gates_of_channels_and_loaded_values_train_as_in_pytorch() {
    Isa::available().into_iter().for_each(|isa| follow("squeezed", isa));
}

#[test]
fn norms_over_channels_train_as_in_pytorch() {
    Isa::available().into_iter().for_each(|isa| follow("normed", isa));
}

/// The script has its own generator: masks are those of seed 1 and env 0.
#[test]
fn dropout_trains_as_in_pytorch_with_the_same_masks() {
    Isa::available().into_iter().for_each(|isa| follow("dropped", isa));
}

#[test]
fn signals_train_as_in_pytorch() {
    Isa::available().into_iter().for_each(|isa| follow("signals", isa));
}

#[test]
fn branches_groups_and_odd_windows_train_as_in_pytorch() {
    Isa::available().into_iter().for_each(|isa| follow("mixed", isa));
}

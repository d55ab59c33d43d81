//! Models of every blueprint, style and host, decoded and checked like a reader of ONNX.

#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use meristem_grow::{
    AlphaTarget, BlueprintSet, GateInputs, Germination, GradientHealth, Host, HostSpec, Optimisers,
    Rules, Stage, Style, TaskShape, Tempo,
};
use meristem_nn::graph::{ConvGeometry, Dims, Graph, GraphBuilder, PoolGeometry, UnaryFunction};
use meristem_nn::kernels::elementwise;
use meristem_nn::{HostTensor, Isa, StateDict};
use proptest::prelude::*;
use prost::Message;

use super::messages::{FLOAT, GraphProto, ModelProto, TensorProto, UINT8};
use super::{OPSET, OnnxError, OnnxNetwork, Preprocessing, encode};

/// All operators that a model may have, with their attributes.
const OPERATORS: [(&str, &[&str]); 25] = [
    ("Add", &[]),
    ("AveragePool", &["kernel_shape", "strides", "pads", "count_include_pad"]),
    ("BatchNormalization", &["epsilon"]),
    ("Cast", &["to"]),
    ("Concat", &["axis"]),
    ("Conv", &["kernel_shape", "strides", "pads", "group", "dilations"]),
    ("Div", &[]),
    ("Elu", &[]),
    ("Erf", &[]),
    ("Flatten", &["axis"]),
    ("GlobalAveragePool", &[]),
    ("HardSwish", &[]),
    ("InstanceNormalization", &["epsilon"]),
    ("LeakyRelu", &["alpha"]),
    ("MaxPool", &["kernel_shape", "strides", "pads"]),
    ("Mul", &[]),
    ("ReduceMean", &["axes"]),
    ("Relu", &[]),
    ("Reshape", &[]),
    ("Sigmoid", &[]),
    ("Softplus", &[]),
    ("Sqrt", &[]),
    ("Sub", &[]),
    ("Tanh", &[]),
    ("Transpose", &["perm"]),
];

/// A state with a value for every tensor of a graph.
fn state_of(graph: &Graph) -> StateDict {
    let mut state = StateDict::default();
    for param in &graph.params {
        let len = param.shape.iter().product();
        state.insert(&param.name, HostTensor::f32(&param.shape, vec![0.5; len]));
    }
    for buffer in graph.buffers.iter().filter(|buffer| !buffer.counter) {
        state.insert(&buffer.name, HostTensor::f32(&[buffer.len], vec![1.0; buffer.len]));
    }
    state
}

fn model_of(graph: &Graph, alphas: &[f32], constants: Option<&[(f32, f32)]>) -> ModelProto {
    let Dims { c, h, w } = graph.input_dims();
    let preprocessing = constants.map(|constants| Preprocessing { bytes: true, constants });
    model_of_samples(graph, alphas, &[c, h, w], preprocessing)
}

fn model_of_samples(
    graph: &Graph,
    alphas: &[f32],
    sample: &[usize],
    preprocessing: Option<Preprocessing<'_>>,
) -> ModelProto {
    let state = state_of(graph);
    let metadata = [("classes".to_string(), "[]".to_string())];
    let exported = OnnxNetwork {
        graph,
        state: &state,
        alphas,
        sample,
        preprocessing,
        outputs: None,
        metadata: &metadata,
    };
    ModelProto::decode(&encode(&exported).unwrap()[..]).unwrap()
}

/// Checks that each value is produced once, before its use, that each value is used, and that
/// tensors have the bytes for their shapes.
fn check(model: &ModelProto) -> &GraphProto {
    assert_eq!(model.opset_import[0].version, OPSET);
    let graph = model.graph.as_ref().unwrap();
    let operators: BTreeMap<&str, &[&str]> = OPERATORS.into_iter().collect();
    let mut known: BTreeSet<&str> = graph.input.iter().map(|input| &*input.name).collect();
    for tensor in &graph.initializer {
        assert!(known.insert(&tensor.name), "{} is defined twice", tensor.name);
        let elements: i64 = tensor.dims.iter().product();
        let bytes = if tensor.data_type == FLOAT { 4 } else { 8 };
        assert_eq!(tensor.raw_data.len() as i64, elements * bytes, "{}", tensor.name);
    }
    let mut read = BTreeSet::new();
    for node in &graph.node {
        let attributes: Vec<&str> = node.attribute.iter().map(|a| &*a.name).collect();
        let mut known_attributes = operators[&*node.op_type].to_vec();
        // Pooling windows without padding have no `pads`, dense convolutions no `dilations`.
        let may_lack = |name: &str| ["pads", "dilations"].contains(&name);
        known_attributes.retain(|name| !may_lack(name) || attributes.contains(name));
        assert_eq!(known_attributes, attributes, "{}", node.op_type);
        for input in &node.input {
            assert!(known.contains(&**input), "{} reads {input} too early", node.name);
            read.insert(&**input);
        }
        assert!(known.insert(&node.output[0]), "{} is produced twice", node.output[0]);
    }
    assert!(known.contains("logits"));
    let unread: Vec<_> = known.difference(&read).filter(|name| **name != "logits").collect();
    assert!(unread.is_empty(), "nothing reads {unread:?}");
    graph
}

/// A host with a module in each chosen slot, advanced to `stage`.
fn grown(spec: HostSpec, image: TaskShape, choices: &[(usize, Style, Stage)]) -> Host {
    let set = Arc::new(BlueprintSet::standard());
    let slots = spec.slots().to_vec();
    let mut host = Host::new(spec, image, &slots, set, Rules::default()).unwrap();
    for (index, (blueprint, style, stage)) in choices.iter().copied().enumerate() {
        let germination = Germination {
            blueprint,
            style,
            tempo: Tempo::Fast,
            alpha_target: AlphaTarget::Full,
            score_pp: None,
        };
        if index >= host.slots().len() || host.germinate(index, germination).is_err() {
            continue;
        }
        let inputs = GateInputs {
            gradient_health: GradientHealth::from_norms(&[1.0, 0.5]),
            contribution_pp: Some(99.0),
            ..GateInputs::default()
        };
        for _ in 0..80 {
            if host.slots()[index].stage == stage {
                break;
            }
            host.step();
            let _ = match host.slots()[index].stage {
                Stage::Holding => host.fossilize(index, &inputs),
                _ => host.advance(index, &inputs),
            };
        }
        // A module in Blending has an alpha above 0 from its first step on.
        host.step();
    }
    host
}

fn styles() -> impl Strategy<Value = Style> {
    prop::sample::select(vec![
        Style::LinearAdd,
        Style::LinearMultiply,
        Style::SigmoidAdd,
        Style::LinearGate,
    ])
}

fn stages() -> impl Strategy<Value = Stage> {
    let all =
        [Stage::Germinated, Stage::Training, Stage::Blending, Stage::Holding, Stage::Fossilized];
    prop::sample::select(all.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every grown host has a valid model with the documented inputs.
    #[test]
    fn every_grown_host_is_exported(
        channels in 1usize..4,
        size in (8usize..20, 8usize..20),
        host in (1usize..9, 2usize..5, 0usize..4),
        choices in prop::collection::vec((0usize..7, styles(), stages()), 0..4),
        bytes: bool,
    ) {
        let (width, blocks, pools) = host;
        let pools = pools.min(blocks);
        let text = format!("cnn:channels={width},blocks={blocks},kernel=3,pools={pools}");
        let spec: HostSpec = text.parse().unwrap();
        let image = TaskShape { channels, height: size.0, width: size.1, classes: 5 };
        prop_assume!(spec.validate(&image).is_ok());
        let host = grown(spec, image, &choices);
        let graph = host.graph(&Optimisers::default()).unwrap();
        let scales = vec![(0.1, -0.2); channels];
        let model = model_of(&graph, &host.alphas(), bytes.then_some(&scales[..]));
        let found = check(&model);
        let tensor = found.input[0].r#type.as_ref().unwrap().tensor_type.as_ref().unwrap();
        prop_assert_eq!(tensor.elem_type, if bytes { UINT8 } else { FLOAT });
        let dims: Vec<Option<i64>> =
            tensor.shape.as_ref().unwrap().dim.iter().map(|dim| dim.dim_value).collect();
        let [c, h, w] = [channels, size.0, size.1].map(|n| Some(n as i64));
        prop_assert_eq!(dims, if bytes { [None, h, w, c] } else { [None, c, h, w] });
        // A module is in the model exactly if its alpha is not 0.
        let named = |slot: &str| found.initializer.iter().any(|t| t.name.starts_with(slot));
        for (slot, alpha) in host.slots().iter().zip(host.alphas()) {
            let own = named(&format!("slots.{}.", slot.name));
            prop_assert_eq!(own, alpha != 0.0, "{} at {}", slot.name, alpha);
        }
    }
}

#[test]
fn every_preset_with_every_blueprint_is_exported() {
    let image = TaskShape { channels: 3, height: 32, width: 32, classes: 10 };
    for (name, _) in meristem_grow::PRESETS {
        let spec: HostSpec = name.parse().unwrap();
        for blueprint in 0..BlueprintSet::standard().len() {
            let host =
                grown(spec.clone(), image, &[(blueprint, Style::LinearGate, Stage::Fossilized)]);
            assert_eq!(host.alphas()[0], 1.0, "{spec} {blueprint}");
            let graph = host.graph(&Optimisers::default()).unwrap();
            check(&model_of(&graph, &host.alphas(), None));
        }
    }
}

/// A graph with the operations of windows and branches, and its model.
#[test]
fn operations_between_blocks_are_exported() {
    let mut b = GraphBuilder::new(Dims { c: 3, h: 16, w: 6 }, Optimisers::default().host);
    let x = b.input();
    let window = PoolGeometry { kernel: [3, 2], stride: [2, 1], padding: [1, 0] };
    let x = b.max_pool2d_with(x, "max", window).unwrap();
    let x = b.avg_pool2d(x, "mean", window).unwrap();
    let square = b.multiply(x, x).unwrap();
    let x = b.concat(&[x, square, x]).unwrap();
    let geometry = ConvGeometry::new([2, 1]).dilation([2, 3]);
    let x = b.conv2d(x, "apart", 4, geometry, true).unwrap();
    let flat = b.flatten(x);
    let logits = b.linear(flat, "fc", 2, true, None).unwrap();
    let graph = b.finish(logits).unwrap();
    let model = model_of(&graph, &[], None);
    let found = check(&model);
    let shape = found.initializer.iter().find(|tensor| tensor.name == "shape.0.-1.1.1").unwrap();
    assert_eq!(shape.dims, [4]);
    let of = |operator: &str| found.node.iter().find(|node| node.op_type == operator).unwrap();
    assert_eq!(of("Mul").input, ["AveragePool.1", "AveragePool.1"]);
    assert_eq!(of("Concat").input, ["AveragePool.1", "Mul.2", "AveragePool.1"]);
    assert_eq!(of("Concat").attribute[0].i, Some(1), "channels");
    let dilations = of("Conv").attribute.iter().find(|of| of.name == "dilations").unwrap();
    assert_eq!(dilations.ints, [2, 3]);
    for (operator, count) in [("MaxPool", None), ("AveragePool", Some(1))] {
        let attribute = |name: &str| of(operator).attribute.iter().find(|of| of.name == name);
        assert_eq!(attribute("kernel_shape").unwrap().ints, [3, 2]);
        assert_eq!(attribute("strides").unwrap().ints, [2, 1]);
        // Rows and columns before the image, then after it.
        assert_eq!(attribute("pads").unwrap().ints, [1, 0, 1, 0]);
        assert_eq!(attribute("count_include_pad").and_then(|of| of.i), count);
    }
}

/// A graph with a layer norm and an RMS norm, and its model.
#[test]
fn norms_over_channels_are_exported() {
    let mut b = GraphBuilder::new(Dims { c: 3, h: 4, w: 6 }, Optimisers::default().host);
    let x = b.layer_norm(b.input(), "layer").unwrap();
    let x = b.rms_norm(x, "rms").unwrap();
    let x = b.global_avg_pool(x);
    let logits = b.linear(x, "fc", 2, true, None).unwrap();
    let model = model_of(&b.finish(logits).unwrap(), &[], None);
    let found = check(&model);
    let means: Vec<_> = found.node.iter().filter(|node| node.op_type == "ReduceMean").collect();
    assert_eq!(means.len(), 3, "mean and variance, and a mean square");
    assert!(means.iter().all(|mean| mean.attribute[0].ints == [1]), "over the channels");
    let of = |name: &str| found.initializer.iter().filter(|t| t.name.starts_with(name)).count();
    assert_eq!((of("layer."), of("rms."), of("epsilon")), (2, 1, 1));
}

/// The error function, as the integral of its derivative by the midpoint rule: within 1e-8 for |x|
/// up to 5.
fn erf(x: f64) -> f64 {
    let (steps, factor) = (10_000, 2.0 / std::f64::consts::PI.sqrt());
    let width = x / f64::from(steps);
    let heights = (0..steps).map(|i| (-((f64::from(i) + 0.5) * width).powi(2)).exp());
    factor * width * heights.sum::<f64>()
}

/// The value of a model of operators of one element, as the ONNX specification defines them.
fn evaluate(graph: &GraphProto, x: f64) -> f64 {
    let constant = |tensor: &TensorProto| {
        f64::from(f32::from_le_bytes(tensor.raw_data[..4].try_into().unwrap()))
    };
    let mut values: BTreeMap<&str, f64> =
        graph.initializer.iter().map(|tensor| (&*tensor.name, constant(tensor))).collect();
    values.insert(&graph.input[0].name, x);
    for node in &graph.node {
        let inputs: Vec<f64> = node.input.iter().map(|name| values[&**name]).collect();
        let x = inputs[0];
        let value = match &*node.op_type {
            "Add" => x + inputs[1],
            "Mul" => x * inputs[1],
            "Erf" => erf(x),
            "Flatten" => x,
            "Relu" => x.max(0.0),
            "Sigmoid" => 1.0 / (1.0 + (-x).exp()),
            "Tanh" => x.tanh(),
            "LeakyRelu" => x.max(0.0) + f64::from(node.attribute[0].f.unwrap()) * x.min(0.0),
            "Elu" => x.max(0.0) + x.min(0.0).exp_m1(),
            "Softplus" => x.exp().ln_1p(),
            "HardSwish" => x * (x / 6.0 + 0.5).clamp(0.0, 1.0),
            other => panic!("no value of {other}"),
        };
        values.insert(&node.output[0], value);
    }
    values["logits"]
}

/// Every function has operators with its values, up to a few roundings in f32.
#[test]
fn functions_of_one_element_keep_their_values() {
    let functions = [
        UnaryFunction::Relu,
        UnaryFunction::Sigmoid,
        UnaryFunction::Tanh,
        UnaryFunction::LeakyRelu { slope: 0.2 },
        UnaryFunction::Elu,
        UnaryFunction::Gelu,
        UnaryFunction::GeluTanh,
        UnaryFunction::Silu,
        UnaryFunction::Softplus,
        UnaryFunction::HardSwish,
    ];
    let x: Vec<f32> = (-50i8..=50).map(|i| 0.1 * f32::from(i)).collect();
    for function in functions {
        let mut b = GraphBuilder::new(Dims { c: 1, h: 1, w: 1 }, Optimisers::default().host);
        let input = b.input();
        let logits = match function {
            UnaryFunction::Relu => b.relu(input),
            UnaryFunction::Sigmoid => b.sigmoid(input),
            UnaryFunction::Tanh => b.tanh(input),
            UnaryFunction::LeakyRelu { slope } => b.leaky_relu(input, slope).unwrap(),
            UnaryFunction::Elu => b.elu(input),
            UnaryFunction::Gelu => b.gelu(input),
            UnaryFunction::GeluTanh => b.gelu_tanh(input),
            UnaryFunction::Silu => b.silu(input),
            UnaryFunction::Softplus => b.softplus(input),
            UnaryFunction::HardSwish => b.hard_swish(input),
        };
        let model = model_of(&b.finish(logits).unwrap(), &[], None);
        let mut expected = vec![0.0; x.len()];
        elementwise::apply(Isa::portable(), function, &x, &mut expected);
        for (x, expected) in x.iter().zip(expected) {
            let (got, expected) = (evaluate(check(&model), (*x).into()), f64::from(expected));
            // A value is below 5 and good to 8 roundings; constants of a model are f32.
            assert!((got - expected).abs() < 5e-6, "{function:?}({x}): {got}, not {expected}");
        }
    }
}

#[test]
fn networks_that_cannot_be_exported_are_named() {
    let mut b = GraphBuilder::new(Dims { c: 3, h: 1, w: 1 }, Optimisers::default().host);
    let x = b.input();
    let y = b.linear(x, "a", 2, true, None).unwrap();
    let other = b.another_input(Dims { c: 1, h: 1, w: 1 });
    let both = b.concat(&[x, y, other]).unwrap();
    let logits = b.linear(both, "b", 2, true, None).unwrap();
    let graph = b.finish(logits).unwrap();
    let mut state = state_of(&graph);
    let of = |state: &StateDict, alphas: &[f32], scales: Option<&[(f32, f32)]>| {
        let preprocessing = scales.map(|constants| Preprocessing { bytes: true, constants });
        let (graph, sample) = (&graph, &[3, 1, 1][..]);
        encode(&OnnxNetwork {
            graph,
            state,
            alphas,
            sample,
            preprocessing,
            outputs: None,
            metadata: &[],
        })
        .unwrap_err()
    };
    let error = of(&state, &[], None);
    assert_eq!(error, OnnxError::Unsupported { operation: "a second input" });
    assert!(error.to_string().contains("cannot export `a second input` to ONNX"), "{error}");
    let error = of(&state, &[1.0], None);
    assert_eq!(error, OnnxError::Count { what: "alphas", expected: 0, got: 1 });
    let error = of(&state, &[], Some(&[(1.0, 0.0)]));
    assert_eq!(error.to_string(), "cannot export: expected 3 channels, got 1");
    state.insert("a.weight", HostTensor::f32(&[5], vec![0.0; 5]));
    let error = of(&state, &[], None);
    assert!(matches!(&error, OnnxError::Tensor { name, expected: 6, .. } if name == "a.weight"));
    assert!(error.to_string().contains("f32 [5]"), "{error}");
}

#[test]
fn numbers_are_in_the_units_of_the_targets() {
    let mut b = GraphBuilder::new(Dims { c: 6, h: 1, w: 1 }, Optimisers::default().host);
    let y = b.linear(b.input(), "a", 2, true, None).unwrap();
    let graph = b.finish(y).unwrap();
    let state = state_of(&graph);
    let model = |constants: &[(f32, f32)]| {
        encode(&OnnxNetwork {
            graph: &graph,
            state: &state,
            alphas: &[],
            sample: &[6],
            preprocessing: None,
            outputs: Some(constants),
            metadata: &[],
        })
    };
    let model = ModelProto::decode(&model(&[(2.0, 1.0), (3.0, 0.0)]).unwrap()[..]).unwrap();
    let graph = model.graph.unwrap();
    let last: Vec<&str> = graph.node.iter().rev().take(3).map(|node| &*node.op_type).collect();
    assert_eq!(last, ["Add", "Mul", "Flatten"]);
    assert_eq!(
        (&*graph.output[0].name, &*graph.node.last().unwrap().output[0]),
        ("outputs", "outputs")
    );
    let constant = |name: &str| {
        let tensor = graph.initializer.iter().find(|tensor| tensor.name == name).unwrap();
        let (numbers, _) = tensor.raw_data.as_chunks::<4>();
        numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>()
    };
    assert_eq!(
        (constant("outputs.scale"), constant("outputs.shift")),
        (vec![2.0, 3.0], vec![1.0, 0.0])
    );
}

/// Vectors and signals have their own axes, and become images of one row inside the model.
#[test]
fn vectors_and_signals_are_inputs_with_their_own_axes() {
    for (sample, dims) in
        [(&[6][..], Dims { c: 6, h: 1, w: 1 }), (&[2, 3], Dims { c: 2, h: 1, w: 3 })]
    {
        let mut b = GraphBuilder::new(dims, Optimisers::default().host);
        let x = b.input();
        let x = b.flatten(x);
        let logits = b.linear(x, "a", 4, true, None).unwrap();
        let graph = b.finish(logits).unwrap();
        let constants = vec![(2.0, 1.0); dims.c];
        for bytes in [None, Some(false), Some(true)] {
            let preprocessing = bytes.map(|bytes| Preprocessing { bytes, constants: &constants });
            let model = model_of_samples(&graph, &[], sample, preprocessing);
            let graph = check(&model);
            let input = &graph.input[0];
            assert_eq!(input.name, "inputs");
            let about = format!("{input:?}");
            assert!(about.contains(if bytes == Some(true) { "2" } else { "1" }), "{about}");
            let operators: Vec<&str> = graph.node.iter().map(|node| &*node.op_type).collect();
            let before: &[&str] = match bytes {
                None => &["Reshape"],
                Some(false) => &["Reshape", "Mul", "Add"],
                Some(true) => &["Cast", "Reshape", "Mul", "Add"],
            };
            assert_eq!(&operators[..before.len()], before);
        }
    }
}

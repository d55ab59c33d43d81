//! Further features that are found by measuring gradients: formulas against PyTorch, the function
//! that is kept, and what must not happen.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use crate::common::golden::{self, Golden};
use crate::common::host;
use crate::network::{self, batch, train};
use crate::widen::{BATCH, convolutions, f32s, flattened, outputs};
use meristem_device::{Owner, Stream, Tensor};
use meristem_nn::graph::{ConvGeometry, Dims, Graph, GraphBuilder, NodeId, SgdConfig, WidthInit};
use meristem_nn::{FurtherFeatures, HostTensor, Metrics, Network, StateDict, WidthProbe};

const SGD: SgdConfig = SgdConfig { lr: 0.05, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };

/// Further features that the golden files have.
const COUNT: usize = 3;

/// A graph whose first layer has this width.
pub(crate) type Build<'a> = &'a dyn Fn(usize) -> Arc<Graph>;

/// Measures batches for a layer of width `from` that gets `by` further features.
pub(crate) fn measure(
    network: &Network,
    (build, from, by): (Build<'_>, usize, usize),
    init: WidthInit,
    batches: &[(Tensor, Tensor)],
) -> FurtherFeatures {
    let wide = build(from + by);
    let measured = WidthProbe::features(network, &wide, init).unwrap();
    let mut probe = WidthProbe::new(network, &wide, build(from + measured), init).unwrap();
    for _ in 0..2 {
        batches.iter().for_each(|(inputs, targets)| probe.add(inputs, targets).unwrap());
        assert!(probe.flops().unwrap() > 0);
        if let Some(further) = probe.end_pass().unwrap() {
            return further;
        }
    }
    panic!("{init:?} needs more than two passes");
}

fn mlp(width: usize) -> Arc<Graph> {
    let mut b = GraphBuilder::new(Dims { c: 4, h: 1, w: 1 }, SGD);
    let x = b.linear(b.input(), "one", width, true, None).unwrap();
    let x = b.relu(x);
    let x = b.linear(x, "two", 6, true, None).unwrap();
    let x = b.relu(x);
    let x = b.linear(x, "classifier", 3, true, None).unwrap();
    Arc::new(b.finish(x).unwrap())
}

fn conv(width: usize) -> Arc<Graph> {
    let mut b = GraphBuilder::new(Dims { c: 2, h: 6, w: 6 }, SGD);
    let x = b.conv2d(b.input(), "one", width, ConvGeometry::same(3), true).unwrap();
    let x = b.relu(x);
    let x = b.max_pool2d(x, "pool", 2, 2).unwrap();
    let x = b.conv2d(x, "two", 5, ConvGeometry::same(3), true).unwrap();
    let x = b.relu(x);
    let x = b.global_avg_pool(x);
    let x = b.linear(x, "classifier", 3, true, None).unwrap();
    Arc::new(b.finish(x).unwrap())
}

/// A convolution `one` of images of two channels, what `then` adds to it, and a classifier.
fn convolution(
    size: usize,
    width: usize,
    then: fn(&mut GraphBuilder, NodeId) -> NodeId,
) -> Arc<Graph> {
    let mut b = GraphBuilder::new(Dims { c: 2, h: size, w: size }, SGD);
    let x = b.conv2d(b.input(), "one", width, ConvGeometry::same(3), true).unwrap();
    let x = then(&mut b, x);
    let x = b.linear(x, "classifier", 3, true, None).unwrap();
    Arc::new(b.finish(x).unwrap())
}

/// Two convolutions, the second with a stride and without a bias. All positions of their outputs
/// are measured.
pub(crate) fn strided(width: usize) -> Arc<Graph> {
    convolution(4, width, |b, x| {
        let x = b.relu(x);
        let x = b.conv2d(x, "two", 5, ConvGeometry::same(3).stride([2, 2]), false).unwrap();
        let x = b.relu(x);
        b.global_avg_pool(x)
    })
}

/// A linear layer reads the convolution's output.
fn flat(width: usize) -> Arc<Graph> {
    convolution(3, width, |b, x| {
        let x = b.flatten(x);
        let x = b.relu(x);
        let x = b.linear(x, "two", 5, true, None).unwrap();
        b.relu(x)
    })
}

/// The reader has a kernel, so flatten does not make it a linear layer.
fn flat_and_kernel(width: usize) -> Arc<Graph> {
    convolution(3, width, |b, x| {
        let x = b.flatten(x);
        b.conv2d(x, "two", 5, ConvGeometry::same(3), true).unwrap()
    })
}

/// An image is flattened, and the vector once more.
fn flat_twice(width: usize) -> Arc<Graph> {
    convolution(3, width, |b, x| {
        let x = b.flatten(x);
        let x = b.relu(x);
        b.flatten(x)
    })
}

/// A convolution after softplus, which is not 0 at 0.
fn softplus(width: usize) -> Arc<Graph> {
    convolution(4, width, |b, x| {
        let x = b.softplus(x);
        let x = b.conv2d(x, "two", 5, ConvGeometry::same(3), true).unwrap();
        b.global_avg_pool(x)
    })
}

/// The samples of a golden case as two batches.
fn halves(stream: &Stream, inputs: &BTreeMap<String, Golden>, dims: Dims) -> Vec<(Tensor, Tensor)> {
    let (x, labels) = (&inputs["x"].values, &inputs["labels"].values);
    let half = labels.len() / 2;
    let part = |x: &[f32]| match (dims.h, dims.w) {
        (1, 1) => Tensor::from_slice(stream, x, [half, dims.c], Owner::Batches).unwrap(),
        _ => host::images(stream, x, dims),
    };
    let labelled = |(x, labels): (&[f32], &[f32])| {
        let labels: Vec<u32> = labels.iter().map(|label| *label as u32).collect();
        (part(x), host::labels(stream, &labels))
    };
    x.chunks(x.len() / 2).zip(labels.chunks(half)).map(labelled).collect()
}

/// A network with the weights of a golden case, and its batches.
fn ready(
    stream: &Stream,
    inputs: &BTreeMap<String, Golden>,
    graph: &Arc<Graph>,
) -> (Network, Vec<(Tensor, Tensor)>) {
    let mut network = network::network(stream, graph, 24);
    let mut state = StateDict::default();
    for (name, Golden { shape, values }) in inputs.iter().filter(|(name, _)| name.contains('.')) {
        state.insert(name.clone(), HostTensor::f32(shape, values.clone()));
    }
    network.load_state_dict(&state, true).unwrap();
    let batches = halves(stream, inputs, graph.input_dims());
    (network, batches)
}

/// The largest difference of a matrix from PyTorch's, as a part of its largest element.
fn apart(case: &Value, key: &str, got: &[f64], expected: &Golden) {
    let largest = expected.values.iter().fold(0f64, |most, x| most.max(f64::from(x.abs())));
    let difference = got.iter().zip(&expected.values).map(|(a, b)| (a - f64::from(*b)).abs());
    let most = difference.fold(0.0, f64::max);
    assert_eq!(got.len(), expected.values.len());
    // Gradients are sums of products in f32, in another order than PyTorch's: as far from the exact
    // ones as its are, or a few times as far. 1e-6 is for the rounding of the features to f32.
    let limit = 8.0 * case["torch_error"][format!("out.{key}")].as_f64().unwrap() + 1e-6 * largest;
    assert!(most <= limit, "{case} {key}: {most:e} of {largest}, limit {limit:e}");
}

/// `Σ_j a_j b_jᵀ` of the further features: `a` and `b` have `[features][…]`.
fn product(a: &[f32], b: &[f32]) -> Vec<f64> {
    let (rows, columns) = (a.len() / COUNT, b.len() / COUNT);
    let at = |i: usize, j: usize| {
        let of = |k: usize| f64::from(a[k * rows + i]) * f64::from(b[k * columns + j]);
        (0..COUNT).map(of).sum()
    };
    (0..rows).flat_map(|i| (0..columns).map(move |j| at(i, j))).collect()
}

/// Further columns of `two.weight`, `[features][rows][kernel]`, of a layer with `features`
/// features, of which `from` are old. If a linear layer reads an image, the image is the kernel.
fn columns(state: &StateDict, from: usize, features: usize) -> Vec<f32> {
    let tensor = state.get("two.weight").unwrap();
    let (weights, rows) = (tensor.as_f32().unwrap(), tensor.shape[0]);
    let kernel = weights.len() / (rows * features);
    let at = |c: usize, row: usize| &weights[(row * features + c) * kernel..][..kernel];
    (from..features).flat_map(|c| (0..rows).flat_map(move |row| at(c, row).to_vec())).collect()
}

#[test]
fn gradmax_and_tiny_are_those_of_pytorch() {
    let (stream, file) = (host::stream(2), golden::read("widths"));
    let cases = file.cases();
    assert_eq!(cases.len(), 5);
    for case in &cases {
        let name = case["case"].as_str().unwrap();
        let [inputs, expected] = ["in", "out"].map(|kind| file.tensors(name, kind));
        let (build, from): (Build<'_>, _) = match name {
            "gradmax-conv" => (&conv, 4),
            "tiny-strided" => (&strided, 4),
            "tiny-flattened" => (&flat, 4),
            _ => (&mlp, 5),
        };
        let (mut network, batches) = ready(&stream, &inputs, &build(from));
        let is_tiny = name.starts_with("tiny");
        let init = if is_tiny { WidthInit::Tiny } else { WidthInit::Gradmax };
        let further = measure(&network, (build, from, COUNT), init, &batches);
        network.widen_with(build(from + COUNT), &further).unwrap();
        let state = network.state_dict().unwrap();
        let outgoing = columns(&state, from, from + COUNT);
        let own = |name: &str| f32s(&state, name).to_vec().split_off(inputs[name].values.len());
        let (weights, biases) = (own("one.weight"), own("one.bias"));
        if !is_tiny {
            apart(case, "projector", &product(&outgoing, &outgoing), &expected["projector"]);
            assert!(weights.iter().all(|x| *x == 0.0), "{name}");
            continue;
        }
        let losses = &expected["losses"].values;
        let least = losses.iter().copied().fold(f32::INFINITY, f32::min);
        let chosen = losses.iter().position(|loss| *loss == least).unwrap();
        // Powers of 2 for linear layers, of 4 for images.
        let factor = if name == "tiny-mlp" { 2f64 } else { 4.0 };
        let amplitude = 0.0625 * factor.powi(chosen as i32);
        let with_bias = |(weights, bias): (&[f32], &f32)| [weights, &[*bias]].concat();
        let incoming = weights.chunks(weights.len() / COUNT).zip(&biases).flat_map(with_bias);
        let found: Vec<f64> = product(&outgoing, &incoming.collect::<Vec<f32>>())
            .into_iter()
            .map(|x| x / amplitude)
            .collect();
        apart(case, "product", &found, &expected["product"]);
        // The loss with the features is the one that PyTorch has with this amplitude.
        network.reset_metrics().unwrap();
        batches.iter().for_each(|(x, y)| network.eval_step(x, y, 0).unwrap());
        let metrics = Metrics::parse(&network.metrics().to_vec().unwrap());
        let loss = metrics.eval[0].loss().unwrap();
        // Sums of at most 64 products in three layers differ by 1e-5. The features differ from
        // PyTorch's by a few times that part of their size, and change the loss by less than 1.
        assert!((loss - f64::from(least)).abs() < 5e-5, "{name}: {loss} and {least}");
    }
}

/// Also through batch norm, a depthwise convolution, a pool, and a flattened image. The tolerance
/// is that of [`crate::widen`], and for `gradmax` the bias of 1e-6 of four features.
#[test]
fn firefly_and_gradmax_keep_the_function_and_then_learn() {
    let stream = host::stream(2);
    let with_norms = |width| convolutions(SGD.into(), [width, 6]);
    let with_flatten = |width| flattened(SGD.into(), [width, 6]);
    let cases: [(WidthInit, Build<'_>); 3] = [
        (WidthInit::Firefly, &with_norms),
        (WidthInit::Firefly, &with_flatten),
        (WidthInit::Gradmax, &with_flatten),
    ];
    for (init, build) in cases {
        let dims = build(5).input_dims();
        let batches: Vec<_> = (0..3).map(|step| batch(&stream, BATCH, dims, 90 + step)).collect();
        let mut it = network::network(&stream, &build(5), BATCH);
        train(&mut it, 0..5, BATCH);
        let (before, state) = (outputs(&mut it), it.state_dict().unwrap());
        let further = measure(&it, (build, 5, 4), init, &batches);
        assert_eq!(it.state_dict().unwrap(), state, "{init:?}: a probe changes nothing");
        assert_eq!(further, measure(&it, (build, 5, 4), init, &batches), "{init:?}");
        it.widen_with(build(9), &further).unwrap();
        let largest = before.iter().fold(0f32, |most, x| most.max(x.abs()));
        for (old, new) in before.iter().zip(outputs(&mut it)) {
            assert!((old - new).abs() <= 2e-5 * largest, "{init:?}: {old} and {new}");
        }
        let wide = it.state_dict().unwrap();
        train(&mut it, 5..7, BATCH);
        let trained = it.state_dict().unwrap();
        let incoming = |state: &StateDict| f32s(state, "one.weight")[5 * 27..].to_vec();
        for feature in 0..4 {
            let [then, now] = [&wide, &trained].map(incoming);
            let of = feature * 27..(feature + 1) * 27;
            assert_ne!(then[of.clone()], now[of], "{init:?}: feature {feature} does not learn");
        }
    }
}

/// The chosen candidates have larger gradients of their outgoing weights than the mean one.
#[test]
fn firefly_has_larger_gradients_than_zero() {
    let stream = host::stream(2);
    let build = |width| flattened(SGD.into(), [width, 6]);
    let batches: Vec<_> =
        (0..3).map(|step| batch(&stream, BATCH, build(5).input_dims(), 90 + step)).collect();
    let mut it = network::network(&stream, &build(5), BATCH);
    train(&mut it, 0..5, BATCH);
    let further = measure(&it, (&build, 5, 4), WidthInit::Firefly, &batches);
    let mut zero = network::network(&stream, &build(5), BATCH);
    train(&mut zero, 0..5, BATCH);
    zero.widen(build(9), WidthInit::Zero).unwrap();
    it.widen_with(build(9), &further).unwrap();
    let outgoing = |network: &mut Network| {
        let mut sums = vec![0.0; 4 * 256 * 6];
        for (x, y) in &batches {
            network.differentiate(x, y, 1.0).unwrap();
            let gradient = columns(&network.gradient_dict().unwrap(), 5, 9);
            sums.iter_mut().zip(gradient).for_each(|(sum, x)| *sum += f64::from(x));
        }
        sums.iter().map(|x| x * x).sum::<f64>()
    };
    let (chosen, random) = (outgoing(&mut it), outgoing(&mut zero));
    assert!(chosen > 1.5 * random, "{chosen} {random}");
}

/// Batches of three classes.
pub(crate) fn batches(stream: &Stream, dims: Dims) -> Vec<(Tensor, Tensor)> {
    let labels: Vec<u32> = (0..BATCH as u32).map(|sample| sample * sample % 3).collect();
    let inputs = (0..3).map(|step| batch(stream, BATCH, dims, 90 + step).0);
    inputs.map(|inputs| (inputs, host::labels(stream, &labels))).collect()
}

/// The score of a layer with `by` further features.
fn score(
    network: &Network,
    (build, from, by): (Build<'_>, usize, usize),
    init: WidthInit,
    batches: &[(Tensor, Tensor)],
) -> f32 {
    let wide = build(from + 1);
    let measured = WidthProbe::features(network, &wide, init).unwrap();
    let mut probe = WidthProbe::new(network, &wide, build(from + measured), init).unwrap();
    assert!(probe.score(by).unwrap().is_nan(), "without a batch");
    batches.iter().for_each(|(inputs, targets)| probe.add(inputs, targets).unwrap());
    probe.score(by).unwrap()
}

/// The gradient ratio is the one of the features of `gradmax`, once the network has them.
#[test]
fn the_gradient_ratio_is_that_of_features_of_gradmax() {
    let stream = host::stream(2);
    let with_flatten = |width| flattened(SGD.into(), [width, 6]);
    for (build, by) in [(&mlp as Build<'_>, 3), (&conv, 2), (&with_flatten, 4)] {
        let mut it = network::network(&stream, &build(5), BATCH);
        let batches = batches(&stream, build(5).input_dims());
        let ratio = score(&it, (build, 5, by), WidthInit::Gradmax, &batches);
        let further = measure(&it, (build, 5, by), WidthInit::Gradmax, &batches);
        it.widen_with(build(5 + by), &further).unwrap();
        let mut sums = vec![];
        for (x, y) in &batches {
            it.differentiate(x, y, 1.0).unwrap();
            let gradients = it.gradient_dict().unwrap();
            let [weight, bias] = ["one.weight", "one.bias"].map(|name| f32s(&gradients, name));
            let incoming = weight.len() / bias.len();
            let of_each =
                weight.chunks(incoming).zip(bias).map(|(row, bias)| [row, &[*bias]].concat());
            let all = of_each.collect::<Vec<_>>().concat();
            sums.resize(all.len(), 0f64);
            sums.iter_mut().zip(all).for_each(|(sum, x)| *sum += f64::from(x));
        }
        let (old, new) = sums.split_at(sums.len() / (5 + by) * 5);
        let mean = |of: &[f64], features: usize| {
            (of.iter().map(|x| x * x).sum::<f64>() / features as f64).sqrt()
        };
        let expected = mean(new, by) / mean(old, 5);
        // A gradient is a sum of at most 24 · 36 products in f32: its error is within 5e-5 of the
        // sum of their sizes. The bound leaves a factor of 20 for terms that cancel.
        let apart = (f64::from(ratio) - expected).abs();
        assert!(apart < 1e-3 * expected && ratio > 0.0, "{by}: {ratio}, expected {expected}");
    }
}

#[test]
fn more_features_have_a_larger_natural_score_and_unknown_ones_none() {
    let stream = host::stream(2);
    let it = network::network(&stream, &mlp(5), BATCH);
    let batches = batches(&stream, mlp(5).input_dims());
    let of = |by| score(&it, (&mlp, 5, by), WidthInit::Tiny, &batches);
    let scores = [1, 2, 5, 9].map(of);
    // Four inputs and the bias: no more than five features.
    assert!(scores[0] > 0.0 && scores[0] < scores[1] && scores[1] < scores[2], "{scores:?}");
    assert_eq!(scores[2], scores[3], "{scores:?}");
    let dims = mlp(5).input_dims();
    let infinite = host::images(&stream, &vec![f32::INFINITY; BATCH * dims.numel()], dims);
    let infinite = [(infinite, batches[0].1.clone())];
    for init in [WidthInit::Gradmax, WidthInit::Tiny] {
        assert!(score(&it, (&mlp, 5, 2), init, &infinite).is_nan(), "{init:?}");
    }
    let mut probe = WidthProbe::new(&it, &mlp(7), mlp(21), WidthInit::Firefly).unwrap();
    probe.add(&batches[0].0, &batches[0].1).unwrap();
    let error = probe.score(2).unwrap_err().to_string();
    assert!(error.contains("`gradmax` or `tiny`") && error.contains("firefly"), "{error}");
}

#[test]
fn an_initialisation_that_does_not_suit_the_layer_is_refused() {
    let stream = host::stream(1);
    let (norms, flat) = ([5, 6], [7, 6]);
    let it = network::network(&stream, &convolutions(SGD.into(), norms), BATCH);
    for init in [WidthInit::Gradmax, WidthInit::Tiny] {
        let error = WidthProbe::features(&it, &convolutions(SGD.into(), flat), init).unwrap_err();
        assert!(error.to_string().contains("layer `one.weight`"), "{error}");
    }
    for (build, words) in [
        (&flat_and_kernel as Build<'_>, "activation functions"),
        (&softplus, "sigmoid or softplus"),
    ] {
        let it = network::network(&stream, &build(5), BATCH);
        let error = WidthProbe::features(&it, &build(7), WidthInit::Tiny).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    let it = network::network(&stream, &flat_twice(5), BATCH);
    let batches = batches(&stream, flat_twice(5).input_dims());
    assert!(score(&it, (&flat_twice, 5, 2), WidthInit::Tiny, &batches) > 0.0);
    let mut it = network::network(&stream, &mlp(5), BATCH);
    let error = it.widen(mlp(7), WidthInit::Tiny).unwrap_err();
    assert!(error.to_string().contains("WidthProbe"), "{error}");
    let wide = mlp(7);
    let mut probe = WidthProbe::new(&it, &wide, mlp(11), WidthInit::Gradmax).unwrap();
    let error = probe.end_pass().unwrap_err();
    assert!(error.to_string().contains("at least one"), "{error}");
    let other = WidthProbe::features(&it, &conv(5), WidthInit::Firefly);
    assert!(other.is_err(), "another network");
}

/// Features that the reader has in abundance are worth little, whatever the activation function:
/// with more features than samples it fits each sample's desired change, up to directions of hardly
/// any variance. Without the division by the slope the score with gelu is 0.11.
#[test]
fn the_natural_score_does_not_depend_on_the_slope_of_the_activation() {
    let stream = host::stream(2);
    type Function = fn(&mut GraphBuilder, NodeId) -> NodeId;
    let functions: [(&str, Function); 5] = [
        ("relu", GraphBuilder::relu),
        ("gelu", GraphBuilder::gelu),
        ("gelu_tanh", GraphBuilder::gelu_tanh),
        ("silu", GraphBuilder::silu),
        ("hard_swish", GraphBuilder::hard_swish),
    ];
    for (name, function) in functions {
        let build = |width| {
            let mut b = GraphBuilder::new(Dims { c: 6, h: 1, w: 1 }, SGD);
            let x = b.linear(b.input(), "one", width, true, None).unwrap();
            let x = b.dropout(x, "drop", 0.5).unwrap();
            let x = function(&mut b, x);
            let x = b.linear(x, "two", 3, true, None).unwrap();
            Arc::new(b.finish(x).unwrap())
        };
        let it = network::network(&stream, &build(200), BATCH);
        let batches = batches(&stream, build(200).input_dims());
        let score = score(&it, (&build, 200, 8), WidthInit::Tiny, &batches);
        assert!(score < 0.05, "{name}: {score}");
    }
}

/// Other ways through the graph do not matter, nor what lies on them.
#[test]
fn a_layer_in_a_branch_is_measured() {
    let stream = host::stream(2);
    let build = |width| {
        let mut b = GraphBuilder::new(Dims { c: 4, h: 1, w: 1 }, SGD);
        let other = b.linear(b.input(), "other", 6, true, None).unwrap();
        let x = b.linear(b.input(), "one", width, true, None).unwrap();
        let other = b.sigmoid(other);
        let other = b.linear(other, "last", 5, true, None).unwrap();
        let x = b.relu(x);
        let x = b.linear(x, "two", 5, true, None).unwrap();
        let x = b.add(x, other).unwrap();
        let x = b.linear(x, "classifier", 3, true, None).unwrap();
        Arc::new(b.finish(x).unwrap())
    };
    let it = network::network(&stream, &build(5), BATCH);
    let batches = batches(&stream, build(5).input_dims());
    for init in [WidthInit::Gradmax, WidthInit::Tiny] {
        assert!(score(&it, (&build, 5, 2), init, &batches) > 0.0, "{init:?}");
    }
}

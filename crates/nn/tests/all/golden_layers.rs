//! Every layer, forward and backward through a plan, against PyTorch.
//!
//! Tolerance of a tensor: PyTorch's own distance from f64 (`torch_error`), plus ours. Ours is a
//! number of ulps (2^-23) of the tensor's largest value, by operation:
//! - exact operations (ReLU, leaky ReLU, max pooling, straight-through, flatten, concat): none,
//!   the same bits;
//! - pointwise ones: each of up to four roundings is half an ulp, and `tanh` and `exp` are good
//!   to 2 ulps: 8; other functions of one element as `kernels/functions.rs` derives: at most 16
//!   roundings of the larger of 1 and the value;
//! - sums of K products (convolution, linear, averages, channel scales, mixes): a rounding per
//!   term, half an ulp of the partial sum, which add up like √K; K ≤ 425 here, and a partial sum is
//!   at most about twice the largest result: 32;
//! - norms: as sums, and the cancellation in x − mean, |mean|/σ ≤ 16 ulps, enters every factor of
//!   the gradients: 64.

use std::collections::BTreeMap;

use crate::common::golden::{self, Golden};
use crate::common::{Case, Outcome, to_nchw, to_nhwc};
use meristem_nn::graph::{
    BlendMode, BlendOperands, ConvGeometry, Dims, GraphBuilder, NodeId, PoolGeometry, SgdConfig,
};
use meristem_nn::kernels::{loss, optim};
use meristem_nn::plan::PlanMode;
use meristem_nn::{Isa, Result};
use serde_json::Value;

const SGD: SgdConfig = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };

/// Host, module, the module's input, and a gate, if any.
fn blended(x: &[NodeId]) -> BlendOperands {
    BlendOperands { host: x[0], module: x[1], input: x[2], gate: x.get(3).copied() }
}

fn ulps(op: &str) -> f64 {
    match op {
        "relu" | "leaky_relu" | "max_pool2d" | "global_max_pool" | "straight_through" => 0.0,
        "flatten" | "concat" => 0.0,
        "elu" | "gelu" | "gelu_tanh" | "silu" | "softplus" | "hard_swish" => 8.0,
        "sigmoid" | "tanh" | "add" | "multiply" | "blend_add" | "blend_multiply" | "sgd" => 8.0,
        "batch_norm" | "group_norm" | "layer_norm" | "rms_norm" => 64.0,
        _ => 32.0,
    }
}

struct Check<'a> {
    case: &'a Value,
    isa: Isa,
}

impl Check<'_> {
    fn name(&self) -> &str {
        self.case["case"].as_str().unwrap()
    }

    #[track_caller]
    fn close(&self, key: &str, got: &[f32], expected: &Golden) {
        let torch = self.case["torch_error"][key].as_f64().unwrap();
        let largest = expected.values.iter().fold(0f64, |m, v| m.max(f64::from(*v).abs()));
        let op = self.case["op"].as_str().unwrap();
        let limit = torch + ulps(op) * f64::from(f32::EPSILON) * largest;
        assert_eq!(got.len(), expected.values.len(), "{} {key}", self.name());
        for (i, (g, e)) in got.iter().zip(&expected.values).enumerate() {
            let apart = (f64::from(*g) - f64::from(*e)).abs();
            let what = format!("{} ({}) {key}[{i}]", self.name(), self.isa);
            assert!(apart <= limit, "{what}: {g}, PyTorch {e}, {apart:.2e} over {limit:.2e}");
        }
    }
}

fn dims(t: &Golden) -> Dims {
    match *t.shape {
        [_, c, h, w] => Dims { c, h, w },
        [_, c] => Dims { c, h: 1, w: 1 },
        [_] => Dims { c: 1, h: 1, w: 1 },
        _ => panic!("{:?}", t.shape),
    }
}

/// Two numbers of a case, for height and width.
fn pair(case: &Value, key: &str) -> [usize; 2] {
    [0, 1].map(|axis| case[key][axis].as_u64().unwrap() as usize)
}

fn window(case: &Value) -> PoolGeometry {
    let [kernel, stride, padding] = ["kernel", "stride", "padding"].map(|key| pair(case, key));
    PoolGeometry { kernel, stride, padding }
}

/// The graph of one layer over these inputs. Its parameters are named `l.…`, or `s` for the mix.
fn layer(b: &mut GraphBuilder, case: &Value, x: &[NodeId], out: usize) -> Result<NodeId> {
    let number = |key: &str| case[key].as_u64().unwrap() as usize;
    let bias = case["bias"].as_bool().unwrap_or(false);
    match case["op"].as_str().unwrap() {
        "conv2d" => {
            let of = |key: &str| {
                if case[key].is_number() { [number(key); 2] } else { pair(case, key) }
            };
            let apart = case.get("dilation").map_or([1; 2], |_| of("dilation"));
            let geometry = ConvGeometry::new(of("kernel")).stride(of("stride"));
            let geometry = geometry.padding(of("padding")).groups(number("groups"));
            let geometry = geometry.dilation(apart);
            b.conv2d(x[0], "l", out, geometry, bias)
        }
        "batch_norm" => b.batch_norm(x[0], "l"),
        "group_norm" => b.group_norm(x[0], "l", number("groups"), 1.0),
        "layer_norm" => b.layer_norm(x[0], "l"),
        "rms_norm" => b.rms_norm(x[0], "l"),
        "relu" => Ok(b.relu(x[0])),
        "sigmoid" => Ok(b.sigmoid(x[0])),
        "tanh" => Ok(b.tanh(x[0])),
        "leaky_relu" => b.leaky_relu(x[0], case["negative_slope"].as_f64().unwrap() as f32),
        "elu" => Ok(b.elu(x[0])),
        "gelu" => Ok(b.gelu(x[0])),
        "gelu_tanh" => Ok(b.gelu_tanh(x[0])),
        "silu" => Ok(b.silu(x[0])),
        "softplus" => Ok(b.softplus(x[0])),
        "hard_swish" => Ok(b.hard_swish(x[0])),
        "max_pool2d" if case["kernel"].is_number() => {
            b.max_pool2d(x[0], "l", number("kernel"), number("stride"))
        }
        "max_pool2d" => b.max_pool2d_with(x[0], "l", window(case)),
        "avg_pool2d" => b.avg_pool2d(x[0], "l", window(case)),
        "global_max_pool" => Ok(b.global_max_pool(x[0])),
        "flatten" => Ok(b.flatten(x[0])),
        "global_avg_pool" => Ok(b.global_avg_pool(x[0])),
        "linear" => b.linear(x[0], "l", out, bias, None),
        "add" => b.add(x[0], x[1]),
        "multiply" => b.multiply(x[0], x[1]),
        "concat" => b.concat(x),
        "channel_scale" => b.scale_channels(x[0], x[1], 1.0),
        "norm_mix" => b.tanh_mix(x[0], x[1], "s"),
        "blend_add" => b.blend(BlendMode::Add, 0, blended(x)),
        "blend_multiply" => b.blend(BlendMode::Multiply, 0, blended(x)),
        "blend_gate" => b.blend(BlendMode::Gate, 0, blended(x)),
        "straight_through" => b.straight_through(x[0], x[1]),
        op => panic!("no graph for {op}"),
    }
}

/// Names of a layer's golden inputs, in the order of the graph's inputs.
fn input_names(op: &str) -> &'static [&'static str] {
    match op {
        "add" | "multiply" => &["a", "b"],
        "concat" => &["a", "b", "c"],
        "channel_scale" => &["x", "s"],
        "norm_mix" => &["x", "y"],
        "blend_add" | "blend_multiply" => &["h", "m", "x"],
        "blend_gate" => &["h", "m", "x", "g"],
        "straight_through" => &["h", "m"],
        _ => &["x"],
    }
}

fn run_layer(file: &golden::File, case: &Value, isa: Isa) {
    let (name, op) = (case["case"].as_str().unwrap(), case["op"].as_str().unwrap());
    let [inputs, outputs] = ["in", "out"].map(|kind| file.tensors(name, kind));
    let names = input_names(op);
    let mut b = GraphBuilder::new(dims(&inputs[names[0]]), SGD);
    let first = b.input();
    let rest: Vec<_> = names[1..].iter().map(|n| b.another_input(dims(&inputs[*n]))).collect();
    let nodes = [vec![first], rest].concat();
    let out = outputs["y"].shape[1];
    let output = layer(&mut b, case, &nodes, out).unwrap();
    let parameter = |name: &str| if name == "s" { "s".into() } else { format!("l.{name}") };
    let tensors: BTreeMap<String, Vec<f32>> = inputs
        .iter()
        .filter(|(name, _)| !names.contains(&name.as_str()))
        .map(|(name, t)| (parameter(name), t.values.clone()))
        .collect();
    let of = Case {
        graph: b.finish_at(output),
        batch: inputs[names[0]].shape[0],
        steps: 1,
        inputs: names.iter().map(|n| inputs[*n].values.clone()).collect(),
        tensors,
        alphas: case["alpha"].as_f64().map(|a| a as f32).into_iter().collect(),
    };
    // Batch norm in evaluation has no backward pass, because networks never train in evaluation
    // mode.
    let training = case["training"].as_bool().unwrap_or(true);
    let mode = if training { PlanMode::Gradient } else { PlanMode::Infer };
    let gradient = file.tensors(name, "grad_out");
    let got = of.run(isa, mode, true, &gradient["y"].values).unwrap();
    let check = Check { case, isa };
    check.close("out.y", &got.output, &outputs["y"]);
    if training {
        check_gradients(&check, &got, &file.tensors(name, "grad"), names);
    }
    for (key, buffer) in [("running_mean", "l.running_mean"), ("running_var", "l.running_var")] {
        if let Some(expected) = outputs.get(key) {
            check.close(&format!("out.{key}"), &got.buffers[buffer], expected);
            assert_eq!(got.counters, [1]);
        }
    }
}

fn check_gradients(
    check: &Check<'_>,
    got: &Outcome,
    expected: &BTreeMap<String, Golden>,
    names: &[&str],
) {
    for (key, expected) in expected {
        let values = match names.iter().position(|n| n == key) {
            Some(input) => got.inputs[input].as_ref(),
            None if key == "s" => got.params.get("s"),
            None => got.params.get(&format!("l.{key}")),
        };
        let values = values.unwrap_or_else(|| panic!("{}: no gradient of {key}", check.name()));
        check.close(&format!("grad.{key}"), values, expected);
    }
}

fn run_loss(file: &golden::File, case: &Value, isa: Isa) {
    let name = case["case"].as_str().unwrap();
    let [inputs, outputs, grads] = ["in", "out", "grad"].map(|kind| file.tensors(name, kind));
    let logits = &inputs["logits"];
    let labels: Vec<u32> = inputs["labels"].values.iter().map(|v| *v as u32).collect();
    let mut gradient = vec![f32::NAN; logits.values.len()];
    let classes = logits.shape[1];
    let sums =
        loss::softmax_cross_entropy(isa, classes, &logits.values, &labels, &mut gradient, &mut []);
    let check = Check { case, isa };
    check.close("out.loss", &[(sums.loss / labels.len() as f64) as f32], &outputs["loss"]);
    check.close("out.correct", &[sums.correct as f32], &outputs["correct"]);
    check.close("grad.logits", &gradient, &grads["logits"]);
}

fn run_sgd(file: &golden::File, case: &Value, isa: Isa) {
    let name = case["case"].as_str().unwrap();
    let inputs = file.tensors(name, "in");
    let number = |key: &str| case[key].as_f64().unwrap() as f32;
    let sgd = SgdConfig {
        lr: number("lr"),
        momentum: number("momentum"),
        weight_decay: number("weight_decay"),
        clip_norm: 1.0,
    };
    let mut param = inputs["param"].values.clone();
    let mut momentum = vec![0.0; param.len()];
    for i in 0..3 {
        let gradient = &inputs[&format!("grad{i}")].values;
        optim::sgd_step(isa, &sgd, 1.0, &mut param, gradient, &mut momentum);
    }
    Check { case, isa }.close("out.y", &param, &file.tensors(name, "out")["y"]);
}

fn run_clip(file: &golden::File, case: &Value, isa: Isa) {
    let name = case["case"].as_str().unwrap();
    let [inputs, outputs] = ["in", "out"].map(|kind| file.tensors(name, kind));
    let square: f64 = inputs.values().map(|t| optim::grad_norm_sq(isa, &t.values)).sum();
    let norm = square.sqrt();
    let clip = optim::clip_coefficient(norm, case["max_norm"].as_f64().unwrap() as f32);
    let check = Check { case, isa };
    check.close("out.norm", &[norm as f32], &outputs["norm"]);
    for key in ["a", "b"] {
        let clipped: Vec<f32> = inputs[key].values.iter().map(|v| v * clip).collect();
        check.close(&format!("out.{key}"), &clipped, &outputs[key]);
    }
}

#[test]
fn every_case() {
    for (name, least) in [("layers", 90), ("windows", 30), ("activations", 24), ("norms", 16)] {
        let file = golden::read(name);
        assert!(file.cases().len() >= least, "{name}: {} cases", file.cases().len());
        run_cases(&file);
    }
}

fn run_cases(file: &golden::File) {
    for case in &file.cases() {
        for isa in Isa::available() {
            match case["op"].as_str().unwrap() {
                "softmax_cross_entropy" => run_loss(file, case, isa),
                "sgd" => run_sgd(file, case, isa),
                "clip_grad_norm" => run_clip(file, case, isa),
                _ => run_layer(file, case, isa),
            }
        }
    }
}

#[test]
fn image_order_goes_back_and_forth() {
    let d = Dims { c: 3, h: 2, w: 5 };
    let x: Vec<f32> = (0..60).map(|v| v as f32).collect();
    assert_eq!(to_nhwc(&x, d)[..4], [0.0, 10.0, 20.0, 1.0]);
    assert_eq!(to_nchw(&to_nhwc(&x, d), d), x);
}

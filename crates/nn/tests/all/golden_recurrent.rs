//! Layers over sequences, forward and backward through a plan, and Adam, against PyTorch.
//!
//! Tolerance of a tensor: PyTorch's own distance from f64 (`torch_error`), plus ours, a number of
//! ulps (2^-23) of the tensor's largest value: embeddings are copies and sums of a few rows, 8;
//! layer norm as in `golden_layers`, 64; an LSTM adds up K ≤ 28 products a gate (half an ulp each,
//! like √K) and its activations are good to 4 ulps, some 8 ulps a step, which later steps carry on
//! with a factor below 1, and its weight gradients sum over up to 160 rows: 128. Adam has five
//! steps of a dozen roundings each, but of a parameter only the last of each counts: 16.

use crate::common::Case;
use crate::common::golden::{self, Golden};
use meristem_nn::Isa;
use meristem_nn::graph::{AdamConfig, Dims, GraphBuilder, LstmNodes, SgdConfig};
use meristem_nn::kernels::optim::{AdamStep, adam_step};
use meristem_nn::plan::PlanMode;
use serde_json::Value;

const SGD: SgdConfig = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };

fn ulps(op: &str) -> f64 {
    match op {
        "embedding" => 8.0,
        "adam" => 16.0,
        "layer_norm" => 64.0,
        _ => 128.0,
    }
}

#[track_caller]
fn close(case: &Value, isa: Isa, key: &str, got: &[f32], expected: &Golden) {
    let torch = case["torch_error"][key].as_f64().unwrap();
    let largest = expected.values.iter().fold(0f64, |m, v| m.max(f64::from(*v).abs()));
    let limit = torch + ulps(case["op"].as_str().unwrap()) * f64::from(f32::EPSILON) * largest;
    assert_eq!(got.len(), expected.values.len(), "{} {key}", case["case"]);
    for (i, (g, e)) in got.iter().zip(&expected.values).enumerate() {
        let apart = (f64::from(*g) - f64::from(*e)).abs();
        let what = format!("{} ({isa}) {key}[{i}]", case["case"]);
        assert!(apart <= limit, "{what}: {g}, PyTorch {e}, {apart:.2e} over {limit:.2e}");
    }
}

fn vector(c: usize) -> Dims {
    Dims { c, h: 1, w: 1 }
}

fn run_layer(file: &golden::File, case: &Value, isa: Isa) {
    let (name, op) = (case["case"].as_str().unwrap(), case["op"].as_str().unwrap());
    let [inputs, outputs, gradients, given] =
        ["in", "out", "grad", "grad_out"].map(|kind| file.tensors(name, kind));
    let columns = |t: &Golden| *t.shape.last().unwrap();
    let x = &inputs["x"];
    let mut b = GraphBuilder::new(vector(columns(x)), SGD);
    let (names, output): (&[&str], _) = match op {
        "layer_norm" => (&["x"], b.layer_norm(b.input(), "l").unwrap()),
        "embedding" => {
            let (entries, size) = (inputs["weight"].shape[0], inputs["weight"].shape[1]);
            let indices = b.indices(columns(x));
            (&["", "x"], b.embedding(indices, "l", entries, size).unwrap())
        }
        _ => {
            let hidden = case["hidden"].as_u64().unwrap() as usize;
            let keep = b.another_input(vector(1));
            let state = b.lstm_state(hidden);
            (&["x", "keep", "state"], b.lstm(LstmNodes { x: b.input(), keep, state }, "l").unwrap())
        }
    };
    let rows = x.values.len() / columns(x);
    // The first input of a graph is f32; an embedding does not read it.
    let unused = vec![0.0; rows * columns(x)];
    let of = Case {
        graph: b.finish_at(output),
        batch: rows,
        steps: case["steps"].as_u64().unwrap_or(1) as usize,
        inputs: names
            .iter()
            .map(|n| inputs.get(*n).map_or(unused.clone(), |t| t.values.clone()))
            .collect(),
        tensors: inputs.iter().map(|(n, t)| (format!("l.{n}"), t.values.clone())).collect(),
        alphas: vec![],
    };
    let got = of.run(isa, PlanMode::Gradient, true, &given["y"].values).unwrap();
    close(case, isa, "out.y", &got.output, &outputs["y"]);
    for (key, expected) in &gradients {
        let values = match names.iter().position(|n| n == key) {
            Some(input) => got.inputs[input].as_ref(),
            None => got.params.get(&format!("l.{key}")),
        };
        let values = values.unwrap_or_else(|| panic!("{name}: no gradient of {key}"));
        close(case, isa, &format!("grad.{key}"), values, expected);
    }
    if let Some(last) = outputs.get("last") {
        close(case, isa, "out.last", &got.states[0], last);
    }
}

fn run_adam(file: &golden::File, case: &Value, isa: Isa) {
    let name = case["case"].as_str().unwrap();
    let [inputs, outputs] = ["in", "out"].map(|kind| file.tensors(name, kind));
    let number = |key: &str| case[key].as_f64().unwrap() as f32;
    let (lr, eps) = (number("lr"), number("eps"));
    let adam = AdamConfig { lr, betas: [0.9, 0.999], eps, weight_decay: 0.0, clip_norm: 1.0 };
    let mut param = inputs["param"].values.clone();
    let (mut average, mut square) = (vec![0.0; param.len()], vec![0.0; param.len()]);
    for i in 0..5 {
        let gradient = &inputs[&format!("grad{i}")].values;
        let step = AdamStep::new(&adam, 1.0, i + 1);
        adam_step(isa, &step, &mut param, gradient, &mut average, &mut square);
    }
    close(case, isa, "out.y", &param, &outputs["y"]);
    close(case, isa, "out.exp_avg", &average, &outputs["exp_avg"]);
    close(case, isa, "out.exp_avg_sq", &square, &outputs["exp_avg_sq"]);
}

#[test]
fn every_case() {
    let file = golden::read("recurrent");
    let cases = file.cases();
    assert_eq!(cases.len(), 15);
    for case in &cases {
        for isa in Isa::available() {
            match case["op"].as_str().unwrap() {
                "adam" => run_adam(&file, case, isa),
                _ => run_layer(&file, case, isa),
            }
        }
    }
}

//! Losses, their gradients, and the sums of their scores, against PyTorch.
//!
//! Tolerance of a tensor: PyTorch's own distance from f64 (`torch_error`), plus ours, in ulps
//! (2⁻²³) of the tensor's largest value. A loss of numbers is f64 up to its conversion: 1. A
//! gradient of numbers is a difference, a product and the factor 1/(n·k), each half an ulp: 2.
//! Binary cross-entropy adds ln(1 + e^(−|z|)), good to 4 ulps of at most ln 2, which means do not
//! increase: 4 of 1; and in the gradient a sigmoid good to 7·2⁻²⁴ of at most 1, then two roundings:
//! 5 of 1/(n·k). Softmax has exponentials good to 2 ulps of at most 1, whose arguments, up to 88
//! where they matter, have an error of half an ulp each, a sum in f64, and two products: 50.

use crate::common::golden;
use meristem_nn::Isa;
use meristem_nn::kernels::loss::{
    ClassTargets, ElementLoss, ElementSums, Elements, element_loss, smoothed_cross_entropy,
};
use meristem_nn::target_squares;
use serde_json::Value;

const ULP: f64 = f32::EPSILON as f64;

/// Panics unless every value is within PyTorch's error and `ours` of the expected one.
#[track_caller]
fn close(case: &Value, key: &str, got: &[f64], expected: &[f32], ours: f64) {
    let torch = case["torch_error"][key].as_f64().unwrap();
    assert_eq!(got.len(), expected.len(), "{case} {key}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let apart = (got - f64::from(*expected)).abs();
        let limit = torch + ours;
        assert!(apart <= limit, "{case} {key}[{i}]: {got}, PyTorch {expected}, limit {limit:e}");
    }
}

fn largest(values: &[f32]) -> f64 {
    values.iter().fold(0.0, |most, v| f64::from(v.abs()).max(most))
}

fn run_elements(file: &golden::File, case: &Value, loss: ElementLoss, isa: Isa) {
    let name = case["case"].as_str().unwrap();
    let [inputs, outputs, grads] = ["in", "out", "grad"].map(|kind| file.tensors(name, kind));
    let (values, targets) = (&inputs["values"], &inputs["targets"].values);
    let [samples, width] = values.shape[..] else { panic!("{name}") };
    let mut gradient = vec![f32::NAN; values.values.len()];
    let of = Elements { loss, outputs: width };
    let sums = element_loss(isa, of, &values.values, targets, &mut gradient, &mut []);
    let (is_binary, elements) = (loss == ElementLoss::BinaryCrossEntropy, gradient.len() as f64);
    let expected = &outputs["loss"].values;
    let ours = ULP * largest(expected) + if is_binary { 4.0 * ULP } else { 0.0 };
    close(case, "out.loss", &[sums.loss / samples as f64], expected, ours);
    let expected = &grads["values"].values;
    let ours = if is_binary { 5.0 / elements } else { 2.0 * largest(expected) } * ULP;
    let gradient: Vec<f64> = gradient.into_iter().map(f64::from).collect();
    close(case, "grad.values", &gradient, expected, ours);
    let ElementSums { true_positives, false_positives, false_negatives, residual_squares, .. } =
        sums;
    let counts = [true_positives, false_positives, false_negatives].map(|n| n as f64);
    if is_binary {
        assert_eq!(counts, [0, 1, 2].map(|i| f64::from(outputs["counts"].values[i])), "{name}");
        assert_eq!(residual_squares, 0.0);
    } else {
        assert_eq!(counts, [0.0; 3]);
        // PyTorch's sums, up to 1e4, have the errors of f32; ours are converted to it.
        let own = [residual_squares, target_squares(targets, width)];
        for (key, own) in ["residual_squares", "target_squares"].into_iter().zip(own) {
            let expected = &outputs[key].values;
            close(case, &format!("out.{key}"), &[own], expected, ULP * largest(expected));
        }
    }
}

fn run_classes(file: &golden::File, case: &Value, isa: Isa) {
    let name = case["case"].as_str().unwrap();
    let [inputs, outputs, grads] = ["in", "out", "grad"].map(|kind| file.tensors(name, kind));
    let values = &inputs["values"];
    let labels: Vec<u32> = inputs["labels"].values.iter().map(|v| *v as u32).collect();
    let weights = inputs.get("weights").map(|w| &w.values[..]).unwrap_or_default();
    let label_smoothing = case["label_smoothing"].as_f64().unwrap() as f32;
    let of = ClassTargets { classes: values.shape[1], label_smoothing, weights };
    let mut gradient = vec![f32::NAN; values.values.len()];
    let sums = smoothed_cross_entropy(isa, of, &values.values, &labels, &mut gradient, &mut []);
    assert_eq!(sums.correct as f32, outputs["correct"].values[0], "{name}");
    // Targets of a sample add up to the largest weight at most.
    let most = weights.iter().fold(1f32, |most, w| w.max(most));
    let ours = 50.0 * ULP * f64::from(most);
    let expected = &outputs["loss"].values;
    let samples = labels.len() as f64;
    close(case, "out.loss", &[sums.loss / samples], expected, ours + ULP * largest(expected));
    let gradient: Vec<f64> = gradient.into_iter().map(f64::from).collect();
    close(case, "grad.values", &gradient, &grads["values"].values, ours / samples);
}

#[test]
fn every_case() {
    let file = golden::read("losses");
    let cases = file.cases();
    assert!(cases.len() >= 80, "{} cases", cases.len());
    for case in &cases {
        for isa in Isa::available() {
            let loss = match case["op"].as_str().unwrap() {
                "binary_cross_entropy" => ElementLoss::BinaryCrossEntropy,
                "mse" => ElementLoss::Square,
                "l1" => ElementLoss::Absolute,
                "huber" => ElementLoss::Huber { delta: case["delta"].as_f64().unwrap() as f32 },
                "cross_entropy" => {
                    run_classes(&file, case, isa);
                    continue;
                }
                op => panic!("no loss for {op}"),
            };
            run_elements(&file, case, loss, isa);
        }
    }
}

//! Runs on vectors and signals: generated datasets, and arrays of floats.

use std::fs;

use crate::common::runs::outcome;
use crate::common::{Meristem, of_kind};
use crate::resume::{Moment, killed_at};

/// A network of two convolutions for signals.
const SIGNALS: &str = r#"
layers = [
  { conv2d = { out = 8, kernel = [1, 5], stride = [1, 2], padding = [0, 2] } },
  "batch_norm",
  "relu",
  { slot = { name = "early" } },
  { conv2d = { out = 8, kernel = [1, 3], stride = [1, 2], padding = [0, 1] } },
  "relu",
  { slot = { name = "late" } },
  "flatten",
  { linear = { out = "classes" } },
]
"#;

const SMALL: &str = "--envs 2 --steps 10 --max-batches 8 --batch 32 --control-split 0.2 --quiet";

/// Files of the signals host in a new folder.
fn with_host() -> Meristem {
    let m = Meristem::new();
    fs::write(m.path("signals.toml"), SIGNALS).unwrap();
    m
}

#[test]
fn a_run_on_signals_grows_and_resumes_with_the_same_bits() {
    let m = with_host();
    let run = format!("train --dataset mnist1d --host signals.toml --controller random {SMALL}");
    m.ok(&format!("{run} --run-dir whole"));
    let events = m.events("whole");
    let grown = of_kind(&events, "module_germinated");
    assert!(!grown.is_empty());
    let start = format!("{run} --run-dir run --checkpoint-every 2");
    assert!(killed_at(&m, &start, "run", Moment::Events(events.len() / 2)));
    m.ok("train --resume run --quiet");
    assert_eq!(outcome(&m, "run").weights, outcome(&m, "whole").weights);
    // Streamed samples, and another number of threads, change no bit.
    m.ok(&format!("{run} --run-dir other --data-budget 1KiB --threads 1"));
    assert_eq!(outcome(&m, "other").weights, outcome(&m, "whole").weights);
    m.ok("runs verify run");
    m.ok("runs report run --out report.html");
}

#[test]
fn vectors_are_learnt_evaluated_and_exported() {
    let m = Meristem::new();
    let run = "train --dataset blobs --host mlp:16,16 --envs 2 --steps 4 --controller none";
    let said = m.ok(&format!("{run} --run-dir run")).stdout;
    assert!(said.contains("4,000 samples per step"), "{said}");
    let weights = "run/weights/env-0.safetensors";
    let report = m.ok(&format!("eval --weights {weights} --dataset blobs --split test --json"));
    let report: serde_json::Value = serde_json::from_str(&report.stdout).unwrap();
    // Five classes, whose clouds hardly overlap.
    assert!(report["accuracy"].as_f64().unwrap() > 0.9, "{report}");
    for (flags, input) in
        [("", "vectors f32 [N, 2]"), ("--with-preprocessing", "vectors f32 [N, 2]")]
    {
        let said = m.ok(&format!("export onnx {weights} --out m{}.onnx {flags}", flags.len()));
        assert!(said.stdout.contains(input), "{}", said.stdout);
    }
    let grown = format!("{run} --blueprints vectors --run-dir grown --quiet");
    m.ok(&grown
        .replace("--controller none", "--controller random")
        .replace("--steps 4", "--steps 12"));
    let blueprints: Vec<String> = of_kind(&m.events("grown"), "module_germinated")
        .iter()
        .map(|event| event["blueprint"].as_str().unwrap().to_string())
        .collect();
    assert!(blueprints.iter().any(|name| name == "mlp"), "{blueprints:?}");
    assert!(blueprints.iter().all(|name| name.starts_with("mlp")), "{blueprints:?}");
    m.ok("eval --weights grown/weights/env-0.safetensors --dataset blobs");
    m.ok("export onnx grown/weights/env-0.safetensors --out grown.onnx");
    // The weights continue with their constants.
    m.ok(&format!("{run} --init {weights} --run-dir further"));
    let info = m.ok("data info --dataset mnist1d").stdout;
    assert!(info.contains("signals   1×40 (channels × points)"), "{info}");
    let json = m.ok("data info --dataset blobs --json").stdout;
    assert!(json.contains("\"kind\":\"vector\"") && json.contains("\"stored\":\"f32\""), "{json}");
    m.ok("data verify --dataset spirals");
}

#[test]
fn mistakes_with_inputs_are_named() {
    let m = Meristem::new();
    let vectors = ["a host for vectors of 2 features, such as mlp:64,64", "docs/hosts.md"];
    m.fails("train --dataset blobs", 2, &vectors);
    m.fails("train --dataset mnist1d", 2, &["a host for signals of 1×40"]);
    let augmented = "train --dataset spirals --host mlp:8 --augment flip";
    m.fails(augmented, 2, &["`augment` must be none for vectors, got flip"]);
    m.fails("train --dataset blobs --data-root . --host mlp:8", 2, &["no data root for dataset"]);
    m.fails("train --dataset blobz --host mlp:8", 2, &["did you mean `blobs`?"]);
    let published = "train --dataset blobs --host mlp:8 --normalize imagenet";
    m.fails(published, 2, &["one number for each channel"]);
    let bare = "--envs 1 --steps 1 --controller none --quiet";
    m.ok(&format!("train --dataset blobs --host mlp:8 {bare} --run-dir r"));
    let weights = "r/weights/env-0.safetensors";
    m.fails(&format!("eval --weights {weights}"), 2, &["made for 2×1×1"]);
}

/// With a learning rate of 0 the network stays as it is: weights of 2 double the loss, balanced
/// classes keep it, and a label that is spread over all classes has at least the loss of guessing.
#[test]
fn weights_and_smoothing_of_the_loss() {
    let m = Meristem::new();
    let run = "train --dataset blobs --host mlp:8 --envs 1 --steps 1 --lr 0 --controller none";
    let loss = |name: &str, flags: &str| {
        m.ok(&format!("{run} {flags} --quiet --run-dir {name}"));
        of_kind(&m.events(name), "step_completed")[0]["train_loss"].as_f64().unwrap()
    };
    let plain = loss("plain", "");
    let doubled = loss("doubled", "--class-weights 2,2,2,2,2");
    // The sums of f32 losses are f64: each loss has a rounding error of 2^-24.
    assert!((doubled - 2.0 * plain).abs() < 1e-6 * plain, "{doubled} {plain}");
    assert!((loss("balanced", "--class-weights balanced") - plain).abs() < 1e-6 * plain);
    assert_eq!(loss("sharp", "--label-smoothing 0 --class-weights none"), plain);
    assert!(loss("smooth", "--label-smoothing 1") > 5_f64.ln());
    for (flags, words) in [
        ("--class-weights 1,2", "one number for each of the 5 classes"),
        ("--class-weights 1,-2", "at least 0"),
        ("--class-weights equal", "none, balanced, or one number"),
        ("--label-smoothing 1.5", "1"),
        ("--label-smoothing NaN", "label-smoothing"),
    ] {
        m.fails(&format!("{run} {flags} --run-dir refused"), 2, &[words]);
        assert!(!m.path("refused").exists());
    }
}

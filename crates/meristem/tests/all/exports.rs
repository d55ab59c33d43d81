//! `--normalize`, `eval --logits`, `meristem export onnx` and TensorBoard's event files.

use std::collections::BTreeMap;
use std::fs;

use meristem::nn::safetensors::load;
use serde_json::Value;

use crate::common::runs::save;
use crate::common::{Meristem, TINY, of_kind};

const WEIGHTS: &str = "run/weights/env-0.safetensors";

fn trained(flags: &str) -> Meristem {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --run-dir run --quiet {flags}"));
    m
}

fn metadata(m: &Meristem, name: &str) -> Value {
    let (_, metadata) = load(&m.path(name)).unwrap();
    serde_json::from_str(&metadata["normalization"]).unwrap()
}

#[test]
fn chosen_constants_are_used_and_reported() {
    let m = trained("--normalize mean=0.5;std=0.25");
    let summary = m.json("run/summary.json");
    assert_eq!(summary["dataset"]["normalize"], "mean=0.5;std=0.25");
    assert_eq!(summary["dataset"]["mean"], serde_json::json!([0.5]));
    let started = of_kind(&m.events("run"), "run_started")[0].clone();
    assert_eq!(started["normalize"], "mean=0.5;std=0.25");
    assert_eq!(metadata(&m, WEIGHTS), serde_json::json!({"mean": [0.5], "std": [0.25]}));

    // `eval` gives the accuracy of the report, with the constants of the file.
    let eval = |flags: &str| -> Value {
        let said = m.ok(&format!("eval --json --weights {WEIGHTS} {flags}"));
        serde_json::from_str(&said.stdout).unwrap()
    };
    let own = eval("");
    assert_eq!(own["accuracy"], summary["envs"][0]["test_accuracy"]);
    assert_eq!(own["normalization"], "weights");
    let given = eval("--normalize data");
    assert_eq!(given["normalization"], "given");
    assert_ne!(given["loss"], own["loss"]);
    assert_eq!(eval("--normalize mean=0.5;std=0.25")["loss"], own["loss"]);

    // The dataset's constants, given as numbers, give the bits of the default.
    m.ok(&format!("train {TINY} --run-dir usual --quiet"));
    let usual = metadata(&m, "usual/weights/env-0.safetensors");
    let numbers = format!("mean={};std={}", usual["mean"][0], usual["std"][0]);
    m.ok(&format!("train {TINY} --run-dir same --quiet --normalize {numbers}"));
    assert_eq!(
        m.bytes("usual/weights/env-0.safetensors"),
        m.bytes("same/weights/env-0.safetensors")
    );
    assert_eq!(m.json("usual/summary.json")["dataset"]["normalize"], "data");
    m.fails(
        "train --resume run --normalize data",
        2,
        &["--normalize cannot be changed on resume", "--threads"],
    );
}

#[test]
fn initial_weights_with_other_constants_cause_a_note() {
    let m = trained("--normalize mean=0.5;std=0.25");
    let begin =
        |flags: &str| m.ok(&format!("train {TINY} --init {WEIGHTS} --quiet {flags}")).stderr;
    let told = begin("--run-dir usual");
    assert!(told.contains("trained with --normalize \"mean=0.5;std=0.25\""), "{told}");
    assert_eq!(begin("--run-dir same --normalize mean=0.5;std=0.25"), "");
    // A resumed run prints no such note.
    let told = m.ok("train --resume usual --rounds 2 --quiet").stderr;
    assert!(!told.contains("--normalize"), "{told}");

    let (state, mut metadata) = load(&m.path(WEIGHTS)).unwrap();
    metadata.insert("normalization".into(), r#"{"mean": [0.5], "std": [0.0]}"#.into());
    save(&m.path("bad.safetensors"), &state, &metadata);
    m.fails(
        &format!("train {TINY} --init bad.safetensors --run-dir bad --quiet"),
        2,
        &["bad.safetensors", "positive standard deviations"],
    );
    assert!(!m.path("bad").exists());
}

#[cfg(unix)]
#[test]
fn a_table_has_the_permissions_of_a_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let m = trained("");
    m.ok("export csv run --out table.csv");
    fs::write(m.path("any"), "").unwrap();
    let mode = |name: &str| fs::metadata(m.path(name)).unwrap().permissions().mode();
    assert_eq!(mode("table.csv"), mode("any"));
}

#[test]
fn invalid_constants_are_refused() {
    let m = Meristem::new();
    for command in ["train --run-dir run --quiet", "data info --dataset embedded"] {
        m.fails(
            &format!("{command} --normalize cifar10"),
            2,
            &["`normalize`: got `cifar10`", "the images have 1"],
        );
        m.fails(
            &format!("{command} --normalize cifar"),
            2,
            &["did you mean `cifar10`?", "mean=A,B,C;std=D,E,F"],
        );
    }
    assert!(!m.path("run").exists());
    let told = m.ok("data info --dataset embedded --normalize mean=0.1;std=2").stdout;
    assert!(told.contains("normalize mean=0.1;std=2"), "{told}");
    let told = m.ok("data info --dataset embedded --json").stdout;
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["normalization"]["normalize"], "data");
    assert_eq!(told["normalization"]["mean"], told["mean"]);
}

#[test]
fn logits_are_an_array_in_the_order_of_the_split() {
    let m = trained("");
    let said = m.ok(&format!("eval --json --weights {WEIGHTS} --logits logits.npy"));
    let report: Value = serde_json::from_str(&said.stdout).unwrap();
    let bytes = m.bytes("logits.npy");
    let header = String::from_utf8_lossy(&bytes[10..128]).into_owned();
    assert!(header.contains("'descr': '<f4'") && header.contains("(2500, 10)"), "{header}");
    assert!(bytes[..128].starts_with(b"\x93NUMPY\x01\x00\x76\x00") && bytes[127] == b'\n');
    let values: Vec<f32> =
        bytes[128..].chunks_exact(4).map(|v| f32::from_le_bytes(v.try_into().unwrap())).collect();
    assert_eq!(values.len(), 2500 * 10);
    // Rows are in the order of the images. `.ci/check_exports.py` compares them with another
    // program.
    assert_ne!(values[..10], values[10..20], "{report}");
    m.fails(
        &format!("eval --weights {WEIGHTS} --logits logits.npy"),
        2,
        &["`logits`", "would be overwritten"],
    );
    m.fails(
        &format!("eval --weights {WEIGHTS} --logits none/logits.npy"),
        2,
        &["`logits`", "existing folder"],
    );
}

#[test]
fn a_network_is_exported_as_an_onnx_model() {
    let m = trained("");
    let said = m.ok(&format!("export onnx {WEIGHTS} --out a.onnx")).stdout;
    assert_eq!(said, "a.onnx: images f32 [N, 1, 28, 28] to logits f32 [N, 10], opset 17\n");
    let model = m.bytes("a.onnx");
    for words in ["blocks.0.conv.weight", "Ankle boot", "images", "logits", "BatchNormalization"] {
        let found = model.windows(words.len()).any(|window| window == words.as_bytes());
        assert!(found, "{words}");
    }
    let said = m.ok(&format!("export onnx {WEIGHTS} --out b.onnx --with-preprocessing")).stdout;
    assert!(said.contains("u8 [N, 28, 28, 1]"), "{said}");

    // A file from PyTorch has neither topology nor constants.
    let (state, _) = load(&m.path(WEIGHTS)).unwrap();
    save(&m.path("plain.safetensors"), &state, &BTreeMap::new());
    let plain = "export onnx plain.safetensors --out c.onnx";
    m.fails(plain, 2, &["`image-size`", "no topology", "such as 32x32"]);
    m.fails(&format!("{plain} --image-size 28x28"), 2, &["no `topology`", "--host is required"]);
    m.fails(
        &format!("{plain} --image-size 28x28 --host minimal --with-preprocessing"),
        2,
        &["`with-preprocessing`", "--normalize"],
    );
    m.fails(
        &format!("{plain} --image-size 28x28 --host baseline"),
        2,
        &["plain.safetensors", "blocks.0.conv.weight"],
    );
    m.fails(
        &format!("{plain} --image-size 28x28 --host minimal --normalize imagenet"),
        2,
        &["`normalize`", "have 1"],
    );
    m.fails(&format!("{plain} --image-size 28"), 2, &["rows and columns, such as 32x32"]);
    assert!(!m.path("c.onnx").exists());
    let said = m.ok(&format!("{plain} --image-size 28x28 --host minimal"));
    assert!(said.stderr.contains("no normalisation constants"), "{}", said.stderr);
}

#[test]
fn files_without_a_network_are_not_exported() {
    let m = trained("");
    let onnx = |rest: &str| format!("export onnx {rest}");
    m.fails(&onnx("nothing --out a.onnx"), 2, &["nothing", "RUN/weights"]);
    fs::write(m.path("torn"), &m.bytes(WEIGHTS)[..200]).unwrap();
    m.fails(&onnx("torn --out a.onnx"), 1, &["torn"]);
    fs::write(m.path("foreign"), "hello").unwrap();
    m.fails(&onnx("foreign --out a.onnx"), 1, &["foreign"]);
    fs::write(m.path("full"), "x").unwrap();
    m.fails(&onnx(&format!("{WEIGHTS} --out full")), 2, &["`out`", "would be overwritten"]);
    m.fails(&onnx(&format!("{WEIGHTS} --out none/a")), 2, &["`out`", "existing folder"]);
    m.fails(&onnx(&format!("{WEIGHTS} --out run")), 2, &["`out`", "not a folder"]);
    m.fails(
        &onnx(&format!("{WEIGHTS} --out a.onnx --image-size 9x9")),
        2,
        &["`image-size`", "28x28, as in the file"],
    );
    m.fails(
        &onnx(&format!("{WEIGHTS} --out a.onnx --normalize mean=0;std=1")),
        2,
        &["`normalize`", "no other constants"],
    );
    m.fails(
        &onnx(&format!("{WEIGHTS} --out a.onnx --normalize data")),
        2,
        &["`normalize`", "reads no dataset"],
    );
    assert!(!m.path("a.onnx").exists());
    m.ok(&onnx("run/weights/env-1.safetensors --out a.onnx"));
}

/// Event files in a folder.
fn boards(m: &Meristem, folder: &str) -> Vec<String> {
    let all = fs::read_dir(m.path(folder)).unwrap();
    all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_run_is_exported_as_an_event_file() {
    let m = Meristem::new();
    let random = TINY.replace("none", "random");
    m.ok(&format!("train {random} --tensorboard --run-dir run --quiet"));
    let [live] = &boards(&m, "run/tensorboard")[..] else { panic!() };
    let name = live.strip_prefix("events.out.tfevents.").unwrap();
    assert!(name.strip_suffix(".meristem").unwrap().parse::<u64>().is_ok(), "{live}");
    let said = m.ok("export tensorboard run --out board").stdout;
    let [exported] = &boards(&m, "board")[..] else { panic!() };
    assert!(said.contains(exported.as_str()) && said.contains("records"), "{said}");
    // Both files are computed from the same events.
    assert_eq!(m.bytes(&format!("board/{exported}")), m.bytes(&format!("run/tensorboard/{live}")));
    m.fails("export tensorboard run --out board", 2, &["`out`", "without event files"]);
    m.fails("export tensorboard board --out b", 2, &["board is not the folder of a run"]);
    m.fails("export tensorboard nowhere --out b", 2, &["nowhere is not the folder of a run"]);
    fs::write(m.path("file"), "").unwrap();
    m.fails("export tensorboard run --out file", 2, &["`out`", "a folder that can be created"]);
    fs::remove_file(m.path("run/events.jsonl")).unwrap();
    m.fails("export tensorboard run --out b", 1, &["events.jsonl"]);
    assert!(!m.path("b").exists(), "a refused export leaves a folder");
}

/// An incomplete line is skipped until it is complete; an unknown line is counted.
#[test]
fn damaged_events_are_omitted_from_the_event_file() {
    let m = trained("");
    m.ok("export tensorboard run --out whole");
    let whole = m.bytes(&format!("whole/{}", boards(&m, "whole")[0]));
    let events = String::from_utf8(m.bytes("run/events.jsonl")).unwrap();
    let mut events = crate::common::runs::without_checksums(&events).into_bytes();
    events.extend(b"{\"v\":1,\"seq\":9999,\"seconds\":1,\"event\":\"comet_seen\"}\n{\"torn\":");
    fs::write(m.path("run/events.jsonl"), &events).unwrap();
    let said = m.ok("export tensorboard run --out rest");
    assert!(said.stderr.contains("left out: 1 of kinds that"), "{}", said.stderr);
    assert_eq!(m.bytes(&format!("rest/{}", boards(&m, "rest")[0])), whole);
}

/// The event file does not change a bit of a run; a resumed run writes a new file.
#[test]
fn an_event_file_does_not_change_the_run() {
    let m = trained("--tensorboard");
    m.ok(&format!("train {TINY} --run-dir plain --quiet"));
    assert_eq!(m.bytes(WEIGHTS), m.bytes("plain/weights/env-0.safetensors"));
    assert!(!m.path("plain/tensorboard").exists());
    // Resumed from its last checkpoint, with an older event file that has later steps.
    fs::remove_file(m.path("plain/summary.json")).unwrap();
    fs::create_dir(m.path("plain/tensorboard")).unwrap();
    let older = "events.out.tfevents.9000000000.meristem";
    fs::write(m.path("plain/tensorboard").join(older), "older").unwrap();
    m.ok("train --resume plain --tensorboard --quiet");
    let newer = boards(&m, "plain/tensorboard");
    assert_eq!(newer, ["events.out.tfevents.9000000001.meristem"], "later by name, and alone");
    assert_eq!(m.bytes(WEIGHTS), m.bytes("plain/weights/env-0.safetensors"));
}

#[cfg(target_os = "linux")]
#[test]
fn an_event_file_that_cannot_be_written_is_an_error_before_the_run() {
    let m = trained("");
    fs::remove_file(m.path("run/summary.json")).unwrap();
    fs::write(m.path("run/tensorboard"), "a file").unwrap();
    let before = m.bytes(WEIGHTS);
    m.fails("train --resume run --tensorboard --quiet", 1, &["cannot write", "run/tensorboard"]);
    assert_eq!(m.bytes(WEIGHTS), before);
    m.ok("train --resume run --quiet");
}

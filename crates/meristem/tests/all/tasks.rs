//! Runs of other tasks than one class for each sample: numbers and several labels.

use std::fs;
use std::path::Path;

use meristem::data::{DatasetFiles, DatasetSpec, Residency, Source, Split, cache};
use meristem::device::Device;
use meristem::nn::{HostTensor, StateDict, safetensors};
use serde_json::Value;

use crate::common::runs::outcome;
use crate::common::{Meristem, of_kind};
use crate::resume::{Moment, killed_at};

const NUMBERS: &str = "train --dataset friedman --host mlp:16,16 --blueprints vectors";
const SMALL: &str = "--envs 2 --steps 10 --max-batches 8 --batch 32 --control-split 0.2 --quiet";

/// A file of vectors in which label k is present where feature k is above its mean, and numbers
/// that are sums of two features.
fn arrays(m: &Meristem, name: &str, targets: &str) {
    const SAMPLES: usize = 600;
    let feature = |i: usize, k: usize| ((i * 37 + k * 101 + i * i * (k + 3)) % 97) as f32 / 97.0;
    let mut state = StateDict::default();
    for (split, from) in [("train", 0), ("test", SAMPLES)] {
        let row = |i: usize| [0, 1, 2].map(|k| feature(from + i, k));
        let of =
            |values: fn([f32; 3]) -> [f32; 3]| (0..SAMPLES).flat_map(|i| values(row(i))).collect();
        let inputs: Vec<f32> = of(|row| row);
        let values: Vec<f32> = match targets {
            "labels" => of(|row| row.map(|x| f32::from(u8::from(x > 0.5)))),
            _ => of(|[a, b, c]| [a + b, 1000.0 * (b - c), 7.0]),
        };
        state.insert(format!("{split}_inputs"), HostTensor::f32(&[SAMPLES, 3], inputs));
        state.insert(format!("{split}_{targets}"), HostTensor::f32(&[SAMPLES, 3], values));
    }
    let bytes = safetensors::to_bytes(Path::new(name), &state, &Default::default()).unwrap();
    fs::write(m.path(name), bytes).unwrap();
}

/// Everything in the folder of a run that people or programs read.
fn texts(m: &Meristem, run: &str) -> String {
    let files = ["events.jsonl", "summary.json"].map(|file| m.path(&format!("{run}/{file}")));
    files.map(|path| fs::read_to_string(path).unwrap()).concat()
}

#[test]
fn numbers_grow_resume_and_are_never_called_accurate() {
    let m = Meristem::new();
    let run = format!("{NUMBERS} --controller random {SMALL}");
    m.ok(&format!("{run} --run-dir whole --tensorboard"));
    let events = m.events("whole");
    assert!(!of_kind(&events, "module_germinated").is_empty());
    assert_eq!(events[0]["task"], "regress");
    let start = format!("{run} --run-dir run --checkpoint-every 2");
    assert!(killed_at(&m, &start, "run", Moment::Events(events.len() / 2)));
    m.ok("train --resume run --quiet");
    assert_eq!(outcome(&m, "run").weights, outcome(&m, "whole").weights);
    m.ok(&format!("{run} --run-dir other --data-budget 1KiB --threads 1"));
    assert_eq!(outcome(&m, "other").weights, outcome(&m, "whole").weights);
    let text = texts(&m, "run");
    assert!(text.contains("\"control_r2\":") && text.contains("\"test_r2\":"));
    assert!(text.contains("\"r2_without\":"), "contributions of modules");
    let mut said = text;
    for command in [
        "runs verify run",
        "runs run",
        "runs run --json",
        "runs compare run whole",
        "runs compare run whole --json --plot curves.svg",
        "runs report run --out report.html",
        "export csv run",
        "eval --weights run/weights/env-0.safetensors --dataset friedman",
        "eval --weights run/weights/env-0.safetensors --dataset friedman --json",
        "data info --dataset friedman",
        "export onnx run/weights/env-1.safetensors --out m.onnx",
    ] {
        said.push_str(&m.ok(command).stdout);
    }
    said.push_str(&m.ok(&format!("{NUMBERS} --envs 1 --steps 2 --run-dir short")).stdout);
    for file in ["curves.svg", "report.html"] {
        said.push_str(&fs::read_to_string(m.path(file)).unwrap());
    }
    let at = said.to_lowercase().find("accura");
    assert_eq!(at.map(|at| &said[at - 40..at + 20]), None, "numbers have no accuracy");
    for words in ["(task regress)", "control R²", "numbers   1: y", "to outputs f32 [N, 1]"] {
        assert!(said.contains(words), "{words}");
    }
    let board = fs::read_dir(m.path("whole/tensorboard")).unwrap().filter_map(Result::ok);
    let board =
        board.map(|file| file.path()).find(|path| path.to_string_lossy().contains("tfevents"));
    let board = String::from_utf8_lossy(&fs::read(board.unwrap()).unwrap()).into_owned();
    assert!(board.contains("control_r2/env 0") && !board.contains("accuracy"));
}

/// The definition: one minus the residual squares over the squares around the mean. Outputs and
/// targets are f32 of about 1, in sums of 1,000: 1e-5.
#[test]
fn r2_is_that_of_the_outputs_and_targets() {
    let m = Meristem::new();
    m.ok(&format!("{NUMBERS} --envs 1 --steps 3 --controller none --quiet --run-dir run"));
    let eval = "eval --weights run/weights/env-0.safetensors --dataset friedman --split test";
    let report = m.ok(&format!("{eval} --json --logits outputs.npy")).stdout;
    let report: Value = serde_json::from_str(&report).unwrap();
    let file = fs::read(m.path("outputs.npy")).unwrap();
    let (numbers, _) = file[file.len() - 4 * 1000..].as_chunks::<4>();
    let outputs: Vec<f32> = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let files =
        DatasetFiles::open(&DatasetSpec { source: Source::Friedman, ..DatasetSpec::embedded() });
    let device = Device::open(meristem::device::DeviceId::Cpu(0), &Default::default()).unwrap();
    let data =
        cache::load_files(&device, &files.unwrap(), Split::Test, Residency::Resident).unwrap();
    let targets = data.targets().to_vec::<f32>().unwrap();
    let mean = targets.iter().map(|y| f64::from(*y)).sum::<f64>() / 1000.0;
    let squares = |of: &dyn Fn(usize) -> f64| (0..1000).map(|i| of(i) * of(i)).sum::<f64>();
    let residuals = squares(&|i| f64::from(targets[i]) - f64::from(outputs[i]));
    let expected = 1.0 - residuals / squares(&|i| f64::from(targets[i]) - mean);
    let found = report["r2"].as_f64().unwrap();
    assert!((found - expected).abs() < 1e-5, "{found} {expected}");
    assert!(found > 0.5, "{found}");
    let summary = m.json("run/summary.json");
    assert_eq!(summary["envs"][0]["test_r2"], report["r2"]);
}

#[test]
fn labels_and_several_numbers_are_learnt_from_arrays() {
    let m = Meristem::new();
    let run =
        "train --dataset arrays --host mlp:16 --envs 2 --steps 12 --batch 32 --controller none";
    for (targets, score, least) in [("labels", "f1", 0.8), ("targets", "r2", 0.8)] {
        let file = format!("{targets}.safetensors");
        arrays(&m, &file, targets);
        m.ok(&format!("{run} --data-root {file} --quiet --run-dir {targets}"));
        let summary = m.json(&format!("{targets}/summary.json"));
        let found = summary["envs"][0][&*format!("test_{score}")].as_f64().unwrap();
        assert!(found > least, "{targets}: {found}");
        assert!(!texts(&m, targets).contains("accuracy"), "{targets}");
        let weights = format!("{targets}/weights/env-0.safetensors");
        let report = m.ok(&format!(
            "eval --weights {weights} --dataset arrays --data-root {file} --split test --json"
        ));
        let report: Value = serde_json::from_str(&report.stdout).unwrap();
        // Batches of another size are summed in another order.
        assert!((report[score].as_f64().unwrap() - found).abs() < 1e-12, "{report} {found}");
        // The same weights mean something else on other targets.
        let other = "eval --dataset friedman --weights";
        let words = if targets == "labels" { "task multilabel" } else { "other training targets" };
        m.fails(&format!("{other} {weights}"), 2, &[words]);
    }
    let weights = "labels/weights/env-0.safetensors";
    let wrong =
        format!("eval --weights {weights} --dataset arrays --data-root targets.safetensors");
    m.fails(&wrong, 2, &["trained for task multilabel", "are for regress"]);
    let init = format!("{run} --data-root targets.safetensors --run-dir refused --init {weights}");
    m.fails(&init, 2, &["trained for task multilabel", "are for regress"]);
    assert!(!m.path("refused").exists());
    // A constant output has nothing to explain, and does not disturb the others.
    assert_eq!(m.json("targets/summary.json")["dataset"]["target_std"][2], 1.0);
}

#[test]
fn every_loss_and_controller_trains_numbers() {
    let m = Meristem::new();
    for loss in ["mse", "huber --huber-delta 0.5", "l1"] {
        let name = loss.split(' ').next().unwrap();
        m.ok(&format!(
            "{NUMBERS} --loss {loss} --envs 1 --steps 2 --controller none --quiet --run-dir {name}"
        ));
        let text = texts(&m, name);
        assert!(text.contains("\"test_r2\":0."), "{loss}");
    }
    for controller in ["heuristic", "ppo --rounds 2", "ppo --rounds 2 --reward shaped --twin on"] {
        m.ok(&format!("{NUMBERS} --controller {controller} {SMALL}"));
    }
    let study = format!(
        "control eval {} --controllers none,heuristic --seeds 2 --run-dir study",
        &NUMBERS[6..]
    );
    let said = m.ok(&format!("{study} --envs 1 --steps 4 --max-batches 4")).stdout;
    let text = fs::read_to_string(m.path("study/study.json")).unwrap();
    assert!(said.contains("test R²") && text.contains("\"test_r2\":"), "{said}");
    assert!(!(said + &text).contains("accuracy"));
}

#[test]
fn mistakes_with_tasks_are_named() {
    let m = Meristem::new();
    arrays(&m, "labels.safetensors", "labels");
    let labels = "train --dataset arrays --data-root labels.safetensors --host mlp:8";
    let classes = "train --dataset blobs --host mlp:8";
    for (command, words) in [
        (format!("{NUMBERS} --task classify"), "dataset friedman has numbers"),
        (format!("{classes} --task regress"), "dataset blobs has one class for each sample"),
        (format!("{labels} --task regress"), "has several labels for each sample"),
        (format!("{NUMBERS} --loss cross-entropy"), "mse, huber, l1, of task regress"),
        (format!("{classes} --loss mse"), "cross-entropy, of task classify"),
        (format!("{labels} --loss mse"), "binary-cross-entropy, of task multilabel"),
        (format!("{NUMBERS} --label-smoothing 0.1"), "`label-smoothing`"),
        (format!("{NUMBERS} --class-weights balanced"), "`class-weights`"),
        (format!("{NUMBERS} --huber-delta 0"), "`huber-delta`"),
        (format!("{NUMBERS} --huber-delta 2"), "loss huber, instead of mse"),
        (format!("{NUMBERS} --task guess"), "auto | classify | multilabel | regress"),
        (format!("{NUMBERS} --loss rmse"), "did you mean `mse`?"),
    ] {
        m.fails(&format!("{command} --run-dir refused"), 2, &[words]);
        assert!(!m.path("refused").exists(), "{command}");
    }
}

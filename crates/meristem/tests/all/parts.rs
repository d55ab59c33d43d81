//! Runs in which envs have different parts of the data: folds, bootstrap samples, shares, and runs
//! on some of the classes (D14).

use std::fs;

use serde_json::{Value, json};

use crate::common::runs::{assert_same, outcome};
use crate::common::{Meristem, of_kind};
use crate::resume::{Moment, killed_at};

/// A network that learns the points quickly.
const POINTS: &str =
    "train --dataset blobs --host mlp:16 --controller none --batch 64 --steps 2 --quiet";

/// Growing hosts on folds of unequal size: env 0 trains on 128 samples in 4 batches, the others on
/// 129 in 5, so that the fifth batch has no part for env 0.
pub(crate) const UNEQUAL: &str = "train --dataset mnist1d --host conv1d:8,16 --steps 8 --quiet \
    --controller random --folds 3 --train-share 0.04819 --bootstrap --batch 32 \
    --hot-scope deny --checkpoint-every 2";

fn parts(m: &Meristem, run: &str) -> Vec<Value> {
    let summary = m.json(&format!("{run}/summary.json"));
    summary["envs"].as_array().unwrap().iter().map(|env| env["part"].clone()).collect()
}

#[test]
fn folds_are_held_out_in_turn_and_summarised() {
    let m = Meristem::new();
    let said = m.ok(&POINTS.replace("--quiet", "--folds 5 --run-dir run")).stdout;
    let flat = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat.contains("3,200 training, 800 control, 1,000 test samples, 5 folds"), "{said}");
    assert!(said.contains("4, fold 4"), "{said}");
    let part = |fold| json!({"fold": fold, "train_samples": 3200, "control_samples": 800});
    let expected: Vec<Value> = (0..5).map(part).collect();
    assert_eq!(parts(&m, "run"), expected);
    let events = m.events("run");
    assert_eq!(of_kind(&events, "run_started")[0]["parts"], json!(expected));
    let summary = m.json("run/summary.json");
    let scores = summary["envs"].as_array().unwrap().iter();
    let scores: Vec<f64> = scores.map(|env| env["control_accuracy"].as_f64().unwrap()).collect();
    let mean = scores.iter().sum::<f64>() / 5.0;
    let variance = scores.iter().map(|score| (score - mean).powi(2)).sum::<f64>() / 4.0;
    let folds = &summary["folds"];
    assert_eq!(folds["count"], 5);
    assert!((folds["control_accuracy_mean"].as_f64().unwrap() - mean).abs() < 1e-12);
    assert!((folds["control_accuracy_std"].as_f64().unwrap() - variance.sqrt()).abs() < 1e-12);
    let line = format!(
        "5 folds held out: accuracy {:.1} ± {:.1} %",
        100.0 * mean,
        100.0 * variance.sqrt()
    );
    assert!(said.contains(&line), "{line} is not in\n{said}");
    // The written settings start the same run again.
    m.ok("train --config run/config.toml --run-dir again --quiet");
    assert_eq!(outcome(&m, "again").weights, outcome(&m, "run").weights);
    let compared = m.ok("runs compare run again").stdout;
    assert!(compared.contains("control over folds"), "{compared}");
}

#[test]
fn scores_of_folds_have_the_name_of_the_score() {
    let m = Meristem::new();
    let numbers = POINTS.replace("blobs", "friedman");
    m.ok(&format!("{numbers} --folds 2 --envs 4 --run-dir run"));
    let folds = &m.json("run/summary.json")["folds"];
    assert!(folds["control_r2_mean"].as_f64().is_some(), "{folds}");
    assert_eq!(folds["count"], 2);
    let held_out: Vec<Value> = parts(&m, "run").iter().map(|part| part["fold"].clone()).collect();
    assert_eq!(held_out, [0, 1, 0, 1]);
}

#[test]
fn envs_of_unequal_parts_resume_with_the_same_bits() {
    let m = Meristem::new();
    m.ok(&format!("{UNEQUAL} --run-dir whole"));
    let expected = outcome(&m, "whole");
    let events = m.events("whole");
    let started = of_kind(&events, "run_started")[0];
    assert_eq!((&started["batches"], &started["images_per_step"]), (&5.into(), &json!([128, 129])));
    assert!(!of_kind(&events, "module_germinated").is_empty());
    let start = format!("{UNEQUAL} --run-dir run");
    assert!(killed_at(&m, &start, "run", Moment::Events(events.len() / 2)));
    m.ok("train --resume run --quiet --threads 3");
    assert_same(&outcome(&m, "run"), &expected, "killed and resumed");
    // Streamed samples and another number of threads change no bit.
    m.ok(&format!("{UNEQUAL} --run-dir other --data-budget 1KiB --threads 1"));
    assert_eq!(outcome(&m, "other").weights, expected.weights);
    // The parts do not depend on the devices, and neither does the order of a device's first env.
    m.ok(&format!("{UNEQUAL} --run-dir devices --devices cpu:0,cpu:1,cpu:2"));
    assert_eq!(parts(&m, "devices"), parts(&m, "whole"));
    let first = |run: &str| m.bytes(&format!("{run}/weights/env-0.safetensors"));
    assert!(first("devices") == first("whole"), "weights of env 0");
    m.ok("runs verify run");
    m.ok("runs report run --out report.html");
}

#[test]
fn envs_of_one_fold_divide_its_samples_if_they_are_dealt() {
    let m = Meristem::new();
    m.ok(&format!("{POINTS} --folds 2 --envs 4 --epoch dealt --run-dir run"));
    let events = m.events("run");
    assert_eq!(of_kind(&events, "run_started")[0]["images_per_step"], json!([1000, 1000]));
}

#[test]
fn all_classes_are_the_whole_dataset_and_some_keep_their_numbers() {
    let m = Meristem::new();
    m.ok(&format!("{POINTS} --run-dir whole"));
    m.ok(&format!("{POINTS} --run-dir all --classes 4,1,0,3,2"));
    assert_eq!(outcome(&m, "all").weights, outcome(&m, "whole").weights);
    m.ok(&format!("{POINTS} --run-dir some --classes 1,3 --control-split 0.1"));
    let summary = m.json("some/summary.json");
    let data = &summary["dataset"];
    assert_eq!(data["classes"].as_array().unwrap().len(), 5);
    let samples = ["train_samples", "control_samples", "test_samples"].map(|key| &data[key]);
    assert_eq!(samples, [1440, 160, 400]);
    assert!(summary["envs"][0]["test_accuracy"].as_f64().unwrap() > 0.9, "{summary}");
}

#[test]
fn a_class_with_fewer_samples_than_folds_is_noted() {
    let m = Meristem::new();
    let row =
        |i: usize| format!("{},{}\n", i % 7, ["a", "b", "rare"][if i < 2 { 2 } else { i % 2 }]);
    let rows: String = (0..60).map(row).collect();
    fs::write(m.path("t.csv"), format!("x,kind\n{rows}")).unwrap();
    let table = "--dataset table --data-root t.csv --target kind";
    let said =
        m.ok(&format!("{} {table} --folds 3 --run-dir run", POINTS.replace("--dataset blobs", "")));
    let flat = said.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat.contains("class `rare` has 2 samples, fewer than the 3 folds"), "{flat}");
}

#[test]
fn ranks_have_the_parts_of_their_envs() {
    let m = Meristem::new();
    let run = "train --dataset blobs --host mlp:16 --blueprints vectors --controller ppo \
               --policy-hidden 16 --envs 4 --rounds 1 --steps 3 --batch 64 --folds 2 --quiet";
    m.ok(&format!("{run} --ranks 2 --run-dir run"));
    let held_out: Vec<Value> = parts(&m, "run").iter().map(|part| part["fold"].clone()).collect();
    assert_eq!(held_out, [0, 1, 0, 1]);
}

#[test]
fn impossible_parts_are_refused() {
    let m = Meristem::new();
    let refused = |settings: &str, words: &[&str]| {
        m.fails(&format!("{POINTS} {settings} --run-dir run"), 2, words);
        assert!(!m.path("run").exists(), "{settings}");
    };
    refused("--folds 1", &["`folds`: got 1, expected 2 to 4096"]);
    refused("--folds 3 --envs 4", &["`envs`: got 4, expected a multiple of 3"]);
    refused("--folds 3 --control-split 0.1", &["`control-split`", "one of 3 folds"]);
    refused("--folds 3 --data-parallel", &["`folds`", "none with data-parallel"]);
    let most = "at most 800, the number of samples of the most frequent class";
    refused("--folds 801 --envs 801", &["`folds`: got 801", most]);
    refused("--train-share 0.0001", &["`train-share`", "at least one of 4000 samples"]);
    refused("--train-share 0", &["`train-share`: got 0, expected"]);
    refused("--classes 5", &["`classes`: got `5`", "numbers from 0 to 4"]);
    refused("--classes 1,1", &["`classes`: got `1` twice"]);
    refused("--dataset friedman --classes 1", &["`classes`", "only classify has classes"]);
    // Six envs share the four samples outside of a fold.
    fs::write(m.path("t.csv"), "x,kind\n1,a\n2,a\n3,a\n4,b\n5,b\n6,b\n").unwrap();
    let table = "--dataset table --data-root t.csv --target kind --folds 3 --envs 18";
    refused(&format!("{table} --epoch dealt"), &["`epoch`: got dealt", "no sample for env 12"]);
}

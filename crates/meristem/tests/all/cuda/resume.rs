//! Resumed runs, and the precisions between which they may change.

use std::fs;
use std::process::Stdio;

use super::{BARE, GROWING, run};
use crate::common::process::{Process, wait_for};
use crate::common::runs::{assert_same, outcome, with_images};
use crate::common::{Meristem, of_kind};

/// A killed run resumes with the bits of an uninterrupted run, at every precision.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_killed_run_resumes() {
    for precision in ["f32", "bf16"] {
        kill(&format!("{GROWING} --precision {precision}"));
    }
}

pub(super) fn kill(arguments: &str) {
    kill_in(with_images(), arguments);
}

pub(super) fn kill_in(m: Meristem, arguments: &str) {
    let expected = run(&m, arguments, "whole", 1);
    let grew = |kind| !of_kind(&expected.events, kind).is_empty();
    assert!(grew("module_germinated") || grew("layer_widened"), "nothing grew");
    let start = format!("{arguments} --devices cuda:0 --run-dir killed");
    let mut command = m.command();
    command.args(start.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = Process::start(&mut command);
    let events = || fs::read_to_string(m.path("killed/events.jsonl")).unwrap_or_default();
    wait_for("some steps", || events().matches("step_completed").count() >= 5);
    child.kill().unwrap();
    child.wait().unwrap();
    m.ok("train --resume killed --quiet");
    assert_same(&outcome(&m, "killed"), &expected, "killed");
}

/// A run that was resumed at another precision keeps it when it is killed and resumed again.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_resumed_run_keeps_its_last_precision() {
    let m = with_images();
    let killed_after = |arguments: &str, steps: usize| {
        let mut command = m.command();
        command.args(arguments.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = Process::start(&mut command);
        let events = || fs::read_to_string(m.path("moved/events.jsonl")).unwrap_or_default();
        wait_for("some steps", || events().matches("step_completed").count() >= steps);
        child.kill().unwrap();
        child.wait().unwrap();
    };
    killed_after(&format!("{BARE} --steps 12 --devices cuda:0 --run-dir moved"), 6);
    killed_after("train --resume moved --precision bf16 --quiet", 18);
    let said = m.ok("train --resume moved --quiet");
    assert!(!said.stderr.contains("warning"), "{}", said.stderr);
    let text = fs::read_to_string(m.path("moved/summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&text).unwrap();
    let stretches = summary["computed"].as_array().unwrap();
    let precisions: Vec<_> = stretches.iter().map(|of| of["precision"].as_str().unwrap()).collect();
    assert_eq!(precisions, ["f32", "bf16"], "{summary}");
    assert!(stretches[1]["step"].as_u64().unwrap() >= 1, "{summary}");
}

/// Training works at every precision, with different results; a resumed run may change its
/// precision.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn hosts_train_at_every_precision() {
    let m = with_images();
    let mut weights = vec![];
    for precision in ["f32", "tf32", "bf16"] {
        let of = run(&m, &format!("{BARE} --steps 5 --precision {precision}"), precision, 1);
        let started = of_kind(&of.events, "run_started")[0];
        let said = (precision != "f32").then_some(precision);
        assert_eq!(started.get("precision").and_then(|of| of.as_str()), said);
        let steps = of_kind(&of.events, "step_completed");
        let loss = |step: &&serde_json::Value| step["train_loss"].as_f64().unwrap();
        let [first, last] =
            [&steps[..3], &steps[steps.len() - 3..]].map(|envs| envs.iter().map(loss).sum::<f64>());
        assert!(last < first, "{precision}: {first} {last}");
        weights.push(of.weights);
    }
    assert!(weights[0] != weights[1] && weights[1] != weights[2] && weights[0] != weights[2]);
    let accuracy = |precision: &str| {
        let file = "--weights f32/weights/env-0.safetensors";
        let data = "--dataset arrays --data-root images.safetensors --device cuda:0 --json";
        let report = m.ok(&format!("eval {file} {data} --precision {precision}")).stdout;
        serde_json::from_str::<serde_json::Value>(&report).unwrap()["loss"].as_f64().unwrap()
    };
    assert_ne!(accuracy("f32"), accuracy("bf16"));
    fs::remove_file(m.path("f32/summary.json")).unwrap();
    let said = m.ok("train --resume f32 --precision tf32 --quiet");
    let warning = "warning: the run changes from precision f32 to tf32;";
    assert!(said.stderr.contains(warning), "{}", said.stderr);
    fs::remove_file(m.path("bf16/summary.json")).unwrap();
    let words = ["got bf16, expected f32 on cpu"];
    m.fails("train --resume bf16 --devices cpu --quiet", 2, &words);
}

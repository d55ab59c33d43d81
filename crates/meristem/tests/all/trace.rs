//! `--trace` and `--memory`: timeline and memory of a run (H8, V3).

#[path = "../../../device/tests/all/common/trace.rs"]
#[allow(dead_code, reason = "shared with the tests of the device")]
pub(crate) mod read;

use std::path::Path;

use meristem::device::Owner;
use serde_json::Value;

use crate::common::{Meristem, TINY};
use read::{Read, Slice};

/// Names of the spans directly below the span `name`, in order.
fn below<'a>(lane: &'a [Slice], name: &str) -> Vec<&'a str> {
    let outer = lane.iter().find(|s| s.name == name).unwrap();
    let inside =
        |s: &&Slice| s.depth == outer.depth + 1 && outer.start <= s.start && s.end <= outer.end;
    lane.iter().filter(inside).map(|s| s.name.as_str()).collect()
}

#[test]
fn a_trace_shows_the_run_and_changes_nothing() {
    let m = Meristem::new();
    m.ok(&format!(
        "train {TINY} --control-split 0.02 --checkpoint-every 0 --run-dir plain --quiet"
    ));
    for threads in [1, 2] {
        let run = format!("run{threads}");
        let said = m.ok(&format!(
            "train {TINY} --control-split 0.02 --checkpoint-every 0 --threads {threads} --run-dir \
             {run} --trace {run}.json"
        ));
        assert!(said.stdout.contains(&format!("trace: {run}.json (")), "{}", said.stdout);
        let weights = |run: &str| m.bytes(&format!("{run}/weights/env-1.safetensors"));
        assert_eq!(weights(&run), weights("plain"));

        let read = Read::file(&m.path(&format!("{run}.json")));
        let summary = m.json(&format!("{run}/summary.json"));
        assert_eq!(summary["trace"]["dropped"], 0);
        let host = &read.lanes["main"];
        assert_eq!(below(host, "run"), ["round 0", "report and save"]);
        assert_eq!(below(host, "round 0"), ["step 0", "step 1", "step 2", "policy update"]);
        let step = ["train_epoch", "recompute statistics", "evaluate", "read", "decide"];
        assert_eq!(below(host, "step 1"), step);
        assert_eq!(below(host, "train_epoch"), Vec::<&str>::new());
        assert!(read.lanes.contains_key("env 0") && read.lanes.contains_key("env 1"));
        let steps = read.of("launch").into_iter().filter(|s| s.name == "train_step");
        assert_eq!(steps.count() as u64, summary["training_steps"].as_u64().unwrap());
        let read_backs = host.iter().filter(|s| s.category == "copy_to_host" && s.depth > 2);
        assert!(read_backs.count() >= 3);
        let peak = |owner: &str| read.memory.iter().map(|m| m[owner]).max().unwrap();
        for owner in ["dataset", "parameters", "activations", "batches"] {
            assert_eq!(summary["memory"]["owners"][owner]["peak"], peak(owner), "{owner}");
        }
    }
    // The written configuration starts the run again, without overwriting the trace.
    m.ok("train --config run1/config.toml --run-dir again --quiet");
    assert_eq!(m.json("again/summary.json")["trace"], Value::Null);
}

#[test]
fn memory_is_printed_by_owner() {
    let m = Meristem::new();
    let said = m.ok(&format!("train {TINY} --run-dir run --memory --export w.safetensors"));
    let evaluated = m.ok("eval --weights w.safetensors --memory --trace e.json");
    let bench = m.ok("bench host --host minimal --envs 2 --batch 32 --seconds 0.1 --memory");
    for stdout in [said.stdout, evaluated.stdout, bench.stdout] {
        let named = |owner: &Owner| stdout.lines().any(|line| line.contains(owner.name()));
        assert!(Owner::ALL.iter().all(named), "{stdout}");
        assert!(stdout.contains("taken from the system"), "{stdout}");
    }
    assert!(!Read::file(&m.path("e.json")).of("launch").is_empty());
    let said = m.ok("eval --weights w.safetensors --memory --json");
    let report: Value = serde_json::from_str(&said.stdout).unwrap();
    assert!(report["memory"]["owners"]["dataset"]["current"].as_u64().unwrap() > 1_000_000);
    let said = m.ok("eval --weights w.safetensors --json");
    let report: Value = serde_json::from_str(&said.stdout).unwrap();
    assert!(report.get("accuracy").is_some() && report.get("memory").is_none(), "{report}");
}

#[test]
fn a_trace_that_cannot_be_written_is_found_before_the_training() {
    let m = Meristem::new();
    let words = ["`trace`", "gone/run.json", "an existing folder"];
    m.fails(&format!("train {TINY} --run-dir run --trace gone/run.json"), 2, &words);
    assert!(!Path::new(&m.path("run")).exists());
    m.fails("bench host --trace gone/run.json", 2, &words);
}

#[test]
fn a_failed_run_leaves_a_complete_trace() {
    let m = Meristem::new();
    let said = m.run(&format!("train {TINY} --lr 1e6 --steps 50 --run-dir run --trace run.json"));
    assert_eq!(said.code, Some(1), "{}", said.stderr);
    assert!(!Read::file(&m.path("run.json")).of("launch").is_empty());
}

/// Files named by the user are never overwritten: traces, configurations, weights, events.
#[test]
fn results_overwrite_no_file() {
    let m = Meristem::new();
    std::fs::write(m.path("mine.toml"), "steps = 1\n").unwrap();
    for flags in ["--trace mine.toml", "--export mine.toml", "--export a --trace a", "--export ."] {
        let flag = flags.split_whitespace().rev().nth(1).unwrap().replace("--", "");
        let words = [&format!("`{flag}`: got "), "expected "].map(|word| word.to_string());
        m.fails(&format!("train --config mine.toml {flags}"), 2, &words.each_ref().map(|w| &**w));
    }
    let bench = "bench host --host minimal --envs 1 --batch 8 --seconds 0.1 --trace t.json";
    m.ok(bench);
    let trace = m.bytes("t.json");
    m.fails(bench, 2, &["`trace`: got t.json", "would be overwritten"]);
    m.fails("train --run-dir there --trace t.json", 2, &["would be overwritten"]);
    assert_eq!((m.bytes("t.json"), m.bytes("mine.toml")), (trace, b"steps = 1\n".into()));
    assert_eq!(names(&m), ["mine.toml", "t.json"], "nothing is left of what could not start");
}

/// An error after the trace was opened removes the trace.
#[test]
fn a_refused_command_leaves_no_trace() {
    let m = Meristem::new();
    std::fs::write(m.path("a.jsonl"), "{\"step\": 1, \"op\": \"JUMP\"}\n").unwrap();
    let run = format!("train {TINY} --run-dir run --trace t.json");
    m.fails(&format!("{run} --controller fixed:a.jsonl"), 2, &["JUMP"]);
    m.fails(&format!("{run} --dataset arrays --data-root a.jsonl"), 1, &["a.jsonl"]);
    m.ok(&format!("train {TINY} --run-dir run --quiet"));
    let eval = "eval --weights run/weights/env-0.safetensors --trace t.json";
    m.fails(&format!("{eval} --dataset arrays --data-root a.jsonl"), 1, &["a.jsonl"]);
    assert_eq!(names(&m), ["a.jsonl", "run"]);
}

/// Names of the files in the folder.
fn names(m: &Meristem) -> Vec<String> {
    let entries = std::fs::read_dir(m.folder.path()).unwrap();
    let mut names: Vec<String> =
        entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

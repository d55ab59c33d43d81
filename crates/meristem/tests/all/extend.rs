//! Runs that are extended by steps or rounds.

#![cfg(unix)]

use std::fs;

use serde_json::{Value, json};

use crate::common::Meristem;
use crate::common::runs::{assert_same, outcome, with_images};
use crate::resume::{Moment, killed_at};

const RUN: &str = "train --dataset arrays --data-root images.safetensors --preset quick \
                   --host minimal --slots r0,r1 --envs 2 --batch 16 --control-split 0.2 --quiet \
                   --checkpoint-every 4 --min-training-steps 1";

/// Runs `short`, extends it by `more`, and expects the results of `long`.
fn extended_equals(short: &str, more: &str, long: &str) -> (Meristem, Value) {
    let m = with_images();
    m.ok(&format!("{RUN} {short} --run-dir run"));
    let said = m.ok(&format!("train --resume run {more}"));
    assert!(said.stdout.contains("  extended to "), "{}", said.stdout);
    m.ok(&format!("{RUN} {long} --run-dir whole"));
    let [got, expected] = ["run", "whole"].map(|run| outcome(&m, run).without_extension());
    assert_same(&got, &expected, more);
    let config = |run: &str| {
        let text = fs::read_to_string(m.path(run).join("config.toml")).unwrap();
        text.lines().filter(|line| !line.starts_with("run_dir")).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(config("run"), config("whole"));
    // The run is complete, so the same command has no effect.
    let events = m.bytes("run/events.jsonl");
    for again in ["", more] {
        let said = m.ok(&format!("train --resume run {again}"));
        assert!(said.stdout.contains("run is complete; there is nothing to resume"), "{again}");
    }
    assert_eq!(m.bytes("run/events.jsonl"), events);
    let extended = m.json("run/summary.json")["extended"].take();
    let told: Vec<Value> =
        m.events("run").into_iter().filter(|event| event["event"] == "run_extended").collect();
    assert_eq!(told.len(), extended.as_array().unwrap().len());
    assert_eq!(told[0]["steps"], extended[0]["steps"]);
    let listed: Value = serde_json::from_str(&m.ok("runs . --json").stdout).unwrap();
    assert_eq!(listed["runs"][0]["steps"], listed["runs"][1]["steps"]);
    (m, extended)
}

/// The last checkpoint is after step 8. So the last two steps are repeated, including the planned
/// last step, in which more is measured.
#[test]
fn a_run_of_10_steps_extended_to_20_is_a_run_of_20() {
    let (short, long) = ("--controller random --steps 10", "--controller random --steps 20");
    let (_, extended) = extended_equals(short, "--steps 20", long);
    assert_eq!(extended, json!([{ "round": 0, "step": 8, "steps": 20, "rounds": 1 }]));
}

#[test]
fn steps_and_rounds_are_added_together() {
    let (short, long) =
        ("--controller random --steps 5", "--controller random --steps 7 --rounds 2");
    extended_equals(short, "--steps 7 --rounds 2", long);
}

#[test]
fn a_policy_learns_in_more_rounds() {
    let ppo = "--controller ppo --policy-hidden 16 --steps 6 --rounds";
    extended_equals(&format!("{ppo} 2"), "--rounds 4", &format!("{ppo} 4"));
}

/// A run without a checkpoint starts again, with the new length.
#[test]
fn a_run_without_checkpoints_starts_again() {
    let m = with_images();
    let run = format!("{RUN} --controller none --checkpoint-every 0");
    m.ok(&format!("{run} --steps 2 --run-dir run"));
    fs::remove_dir_all(m.path("run/checkpoints")).unwrap_or_default();
    m.ok("train --resume run --steps 4 --quiet");
    m.ok(&format!("{run} --steps 4 --run-dir whole"));
    let [got, expected] = ["run", "whole"].map(|run| outcome(&m, run).without_extension());
    assert_same(&got, &expected, "from the start");
}

/// Kills before, during and after the write of the new length.
#[test]
fn a_killed_extension_resumes_with_the_same_bits() {
    let m = with_images();
    let run = format!("{RUN} --controller random");
    m.ok(&format!("{run} --steps 10 --run-dir run"));
    let cut =
        m.events("run").iter().position(|e| e["event"] == "checkpoint_written" && e["step"] == 8);
    let cut = cut.unwrap();
    for lines in [cut, cut + 2, cut + 20, cut + 60] {
        // A kill before any change of the folder leaves the short run.
        let longer =
            killed_at(&m, "train --resume run --quiet --steps 20", "run", Moment::Events(lines));
        let said = killed_at(&m, "train --resume run --quiet", "run", Moment::Events(lines + 5));
        assert!(longer || said || m.path("run/summary.json").exists());
    }
    m.ok("train --resume run --quiet --steps 20");
    m.ok(&format!("{run} --steps 20 --run-dir whole"));
    let [got, expected] = ["run", "whole"].map(|run| outcome(&m, run).without_extension());
    assert_same(&got, &expected, "killed");
    let told = m.events("run");
    assert_eq!(told.iter().filter(|event| event["event"] == "run_extended").count(), 1);
}

/// Folders of a process that was killed after it had removed the summary, and after it had also
/// written the new settings.
#[test]
fn a_kill_while_the_length_is_recorded_leaves_a_run_of_one_length() {
    let m = with_images();
    let run = format!("{RUN} --controller random");
    m.ok(&format!("{run} --steps 6 --run-dir run"));
    let before = outcome(&m, "run");
    fs::remove_file(m.path("run/summary.json")).unwrap();
    m.ok("train --resume run --quiet");
    assert_same(&outcome(&m, "run"), &before, "the short run");
    let config = fs::read_to_string(m.path("run/config.toml")).unwrap();
    fs::remove_file(m.path("run/summary.json")).unwrap();
    fs::write(m.path("run/config.toml"), config.replace("\nsteps = 6\n", "\nsteps = 9\n")).unwrap();
    m.ok("train --resume run --quiet");
    m.ok(&format!("{run} --steps 9 --run-dir whole"));
    let [got, expected] = ["run", "whole"].map(|run| outcome(&m, run).without_extension());
    assert_same(&got, &expected, "the long run");
}

#[test]
fn unsupported_extensions_are_refused_by_name() {
    let m = with_images();
    let refused = |settings: &str, more: &str, words: &[&str]| {
        let _ = fs::remove_dir_all(m.path("run"));
        m.ok(&format!("{RUN} {settings} --run-dir run"));
        let files = ["config.toml", "summary.json", "events.jsonl"];
        let before = files.map(|file| m.bytes(&format!("run/{file}")));
        m.fails(&format!("train --resume run {more}"), 2, words);
        assert_eq!(files.map(|file| m.bytes(&format!("run/{file}"))), before, "{more}");
    };
    let none = "--controller none --steps 3";
    refused(none, "--steps 2", &["`steps`: got 2, expected at least 3"]);
    refused(&format!("{none} --rounds 2"), "--rounds 1", &["`rounds`: got 1, expected at least 2"]);
    let words = ["`steps`: got 5, expected 3, because rounds of 3 steps are complete", "--rounds"];
    refused(&format!("{none} --rounds 2"), "--steps 5", &words);
    let cosine = format!("{none} --lr-schedule cosine");
    refused(&cosine, "--steps 5", &["lr-schedule cosine", "--config RUN/config.toml --steps 5"]);
    let ppo = "--controller ppo --policy-hidden 8 --steps 3 --rounds 1";
    refused(ppo, "--steps 5", &["controller ppo learns from whole episodes", "--rounds"]);
    let words = ["--lr cannot be changed on resume", "--steps", "--config run/config.toml"];
    refused(none, "--lr 0.5", &words);
}

/// The heuristic depends on the number of remaining steps: it plants only modules that can become
/// permanent.
#[test]
fn a_controller_that_used_the_number_of_steps_causes_a_warning() {
    let m = with_images();
    m.ok(&format!("{RUN} --controller heuristic --steps 5 --run-dir run"));
    let said = m.ok("train --resume run --steps 9");
    assert!(said.stderr.contains("has planned for an end after 5 steps"), "{}", said.stderr);
    m.ok(&format!("{RUN} --controller random --steps 5 --run-dir other"));
    let said = m.ok("train --resume other --steps 9");
    assert!(!said.stderr.contains("warning"), "{}", said.stderr);
}

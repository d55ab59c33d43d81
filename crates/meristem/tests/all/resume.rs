//! Runs killed at any moment and resumed: the same bits and events as without the kills (U4).

#![cfg(unix)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::Meristem;
use crate::common::process::{Process, wait_for};
use crate::common::runs::{assert_same, outcome, with_images, without_checksums};

/// Settings of two rounds of growing hosts on a few small images, with a checkpoint after every
/// second step.
pub(crate) const RUN: &str = "train --dataset arrays --data-root images.safetensors \
    --controller heuristic --preset quick --host minimal --slots r0,r1 --envs 3 --rounds 2 \
    --steps 24 --batch 16 --control-split 0.2 --checkpoint-every 2 --quiet \
    --parameters-per-image 99 --max-gap 99";

/// Removes newer settings from a configuration, to make it equal to an older one.
pub(crate) fn remove_newer_settings(config: &Path) {
    let text = fs::read_to_string(config).unwrap();
    let later = ["governor_", "comm_deadline", "data_parallel", "telemetry", "reward_", "epoch"];
    let later = |line: &&str| later.iter().any(|name| line.starts_with(name));
    let older: String =
        text.lines().filter(|line| !later(line)).flat_map(|line| [line, "\n"]).collect();
    assert!(older.len() < text.len());
    fs::write(config, older).unwrap();
}

/// Moment to kill a run: after a number of events, or during the write of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Moment {
    Events(usize),
    TornCheckpoint,
}

impl Moment {
    fn has_come(self, m: &Meristem, run: &str) -> bool {
        match self {
            Moment::Events(lines) => {
                let text = fs::read(m.path(run).join("events.jsonl")).unwrap_or_default();
                text.iter().filter(|&&byte| byte == b'\n').count() >= lines
            }
            Moment::TornCheckpoint => {
                fs::read_dir(m.path(run).join("checkpoints")).is_ok_and(|mut files| {
                    files.any(|f| file_name(&f.unwrap().path()).starts_with('.'))
                })
            }
        }
    }
}

/// Starts a run and kills it at `moment`. Returns whether it was killed before its end.
pub(crate) fn killed_at(m: &Meristem, arguments: &str, run: &str, moment: Moment) -> bool {
    let mut command = m.command();
    command.args(arguments.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = Process::start(&mut command);
    let started = Instant::now();
    while !moment.has_come(m, run) && child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < Duration::from_secs(120), "{moment:?} within two minutes");
    }
    // The exact position of the kill is intentionally random.
    child.kill().unwrap();
    !child.wait().unwrap().success()
}

#[test]
fn a_run_killed_at_any_moment_has_the_results_of_an_uninterrupted_run() {
    let m = with_images();
    m.ok(&format!("{RUN} --run-dir whole"));
    let expected = outcome(&m, "whole");
    let grown = expected.events.iter().filter(|e| e["event"] == "module_germinated").count();
    assert!(grown > 0, "nothing grew, nothing was shown");
    let lines = expected.events.len();
    let mut kills = 0;
    for attempt in 0..5 {
        let run = format!("run-{attempt}");
        let resume = format!("train --resume {run} --quiet --threads {}", attempt % 3);
        // Kills are spread over both rounds; every third kill is during the write of a checkpoint.
        for kill in 0..6 {
            let moment = match (attempt + kill) % 3 {
                2 => Moment::TornCheckpoint,
                _ => Moment::Events(1 + (6 * attempt + 31 * kill) * lines / 200),
            };
            let start = format!("{RUN} --run-dir {run}");
            let arguments = if kill == 0 { &start } else { &resume };
            kills += u32::from(killed_at(&m, arguments, &run, moment));
        }
        m.ok(&resume);
        assert_same(&outcome(&m, &run), &expected, &format!("attempt {attempt}"));
        let left = fs::read_dir(m.path(&run).join("checkpoints")).unwrap();
        let left: Vec<String> = left.map(|f| file_name(&f.unwrap().path())).collect();
        assert!(left.len() <= 3 && left.iter().all(|f| !f.starts_with('.')), "{left:?}");
    }
    assert!(kills >= 20, "only {kills} kills came before the end");
}

/// Results do not depend on the positions of checkpoints.
#[test]
fn the_interval_of_checkpoints_changes_no_bit() {
    let m = with_images();
    m.ok(&format!("{RUN} --run-dir often --checkpoint-every 1"));
    m.ok(&format!("{RUN} --run-dir never --checkpoint-every 0"));
    let (often, never) = (outcome(&m, "often"), outcome(&m, "never"));
    assert_eq!(often.weights, never.weights);
    assert_eq!(often.envs, never.envs);
}

#[test]
fn a_stopped_run_resumes_and_a_complete_run_is_unchanged() {
    let m = with_images();
    m.ok(&format!("{RUN} --run-dir whole"));
    let before = m.bytes("whole/events.jsonl");
    let said = m.ok("train --resume whole");
    assert!(said.stdout.contains("env"), "{}", said.stdout);
    assert!(
        said.stdout.contains("whole is complete; there is nothing to resume"),
        "{}",
        said.stdout
    );
    assert_eq!(m.bytes("whole/events.jsonl"), before);
    // A summary with the older names of keys is equivalent.
    let mut summary = m.json("whole/summary.json");
    summary["v"] = 1.into();
    let written = m.bytes("whole/summary.json");
    let mut older = without_checksums(&String::from_utf8(written.clone()).unwrap());
    for (name, before) in [
        ("v", "version"),
        ("step_seconds_total", "step_seconds"),
        ("counterfactual_cost", "validation"),
    ] {
        let renamed = older.replace(&format!("\"{name}\":"), &format!("\"{before}\":"));
        assert_ne!(renamed, older, "{name}");
        older = renamed;
    }
    fs::write(m.path("whole/summary.json"), older).unwrap();
    let told = m.ok("train --resume whole --json").stdout;
    assert_eq!(serde_json::from_str::<Value>(&told).unwrap(), summary);
    fs::write(m.path("whole/summary.json"), written).unwrap();
    let mut child = background(&m, "--run-dir stopped --export best.safetensors");
    wait_for("a step", || {
        fs::read_to_string(m.path("stopped/events.jsonl"))
            .is_ok_and(|t| t.contains("step_completed"))
    });
    std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(3), "stopped");
    let best = m.bytes("best.safetensors");
    m.ok("train --resume stopped --quiet");
    assert_same(&outcome(&m, "stopped"), &outcome(&m, "whole"), "stopped");
    assert_ne!(m.bytes("best.safetensors"), best, "what it wrote when it stopped is its own");
}

/// A policy resumes with the same bits: the checkpoint has its rollout, optimiser and hidden state,
/// and the state of its teacher.
#[test]
fn a_policy_resumes_with_the_same_bits() {
    assert_resumes_with_the_same_bits("--ppo-demonstrations 1 --ppo-minibatches 2");
}

/// A policy on three ranks resumes with the same bits, including unsent gradients.
#[test]
fn a_policy_on_ranks_resumes_with_the_same_bits() {
    let events = assert_resumes_with_the_same_bits("--ranks 3 --exchange topk:0.05");
    let updates: Vec<&Value> = events.iter().filter(|e| e["event"] == "policy_updated").collect();
    let fingerprints: Vec<&str> =
        updates.iter().map(|update| update["fingerprint"].as_str().unwrap()).collect();
    assert_eq!(fingerprints.len(), 2);
    assert_ne!(fingerprints[0], fingerprints[1], "it learned");
}

/// One host on two ranks, killed twice while it grows, resumes with the same bits, including unsent
/// gradients.
#[test]
fn a_host_on_ranks_resumes_with_the_same_bits() {
    assert_a_host_on_ranks_resumes("--exchange topk:0.05");
}

/// The same for local steps: momentum of the outer step, unsent differences, and the optimisers of
/// all ranks.
#[test]
fn a_host_of_local_steps_resumes_with_the_same_bits() {
    for exchange in ["diloco:2:topk:0.05 --optimizer adam", "diloco:3:int8"] {
        assert_a_host_on_ranks_resumes(&format!("--exchange {exchange}"));
    }
}

fn assert_a_host_on_ranks_resumes(exchange: &str) {
    let m = with_images();
    // The last value of a repeated flag takes effect.
    let ranks = format!("--data-parallel --envs 1 --ranks 2 {exchange} --rounds 1");
    let run = format!("{RUN} {ranks} --host cnn:channels=12,blocks=2,kernel=3,pools=1");
    m.ok(&format!("{run} --run-dir whole"));
    let events = m.events("whole");
    assert!(events.iter().any(|e| e["event"] == "module_germinated"));
    let lines = events.len();
    assert!(killed_at(&m, &format!("{run} --run-dir cut"), "cut", Moment::Events(lines / 3)));
    assert!(killed_at(&m, "train --resume cut --quiet", "cut", Moment::Events(2 * lines / 3)));
    m.ok("train --resume cut --quiet --threads 1");
    assert_same(&outcome(&m, "cut"), &outcome(&m, "whole"), exchange);
}

fn assert_resumes_with_the_same_bits(ranks: &str) -> Vec<Value> {
    let m = with_images();
    let run = format!("{RUN} --controller ppo --policy-hidden 16 --steps 12 --epoch full {ranks}");
    m.ok(&format!("{run} --run-dir whole"));
    let start = format!("{run} --run-dir cut");
    let lines = m.events("whole").len();
    assert!(killed_at(&m, &start, "cut", Moment::Events(lines / 4)));
    assert!(killed_at(&m, "train --resume cut --quiet", "cut", Moment::Events(2 * lines / 3)));
    m.ok("train --resume cut --quiet");
    assert_same(&outcome(&m, "cut"), &outcome(&m, "whole"), "ppo");
    m.events("whole")
}

/// A checkpoint has the policy. Before the first checkpoint, the policy file is required.
#[test]
fn a_run_from_a_policy_resumes_without_its_file() {
    let m = with_images();
    let ppo = format!("{RUN} --controller ppo --steps 8");
    m.ok(&format!("{ppo} --policy-hidden 16 --rounds 1 --run-dir first"));
    let from = format!("{ppo} --policy first/policy.safetensors");
    m.ok(&format!("{from} --run-dir whole"));
    let lines = m.events("whole").len();
    assert!(killed_at(&m, &format!("{from} --run-dir cut"), "cut", Moment::Events(lines / 2)));
    fs::rename(m.path("first"), m.path("elsewhere")).unwrap();
    remove_newer_settings(&m.path("cut/config.toml"));
    m.ok("train --resume cut --quiet");
    assert_same(&outcome(&m, "cut"), &outcome(&m, "whole"), "from a policy");
    assert!(m.bytes("cut/policy.safetensors") == m.bytes("whole/policy.safetensors"));
    fs::create_dir_all(m.path("early/weights")).unwrap();
    fs::copy(m.path("cut/config.toml"), m.path("early/config.toml")).unwrap();
    let words = ["no checkpoint and cannot start again", "first/policy.safetensors"];
    m.fails("train --resume early", 2, &words);
}

/// A run in the background, killed when the handle is dropped.
pub(crate) fn background(m: &Meristem, flags: &str) -> Process {
    let mut command = m.command();
    command.args(RUN.split_whitespace()).args(flags.split_whitespace());
    Process::start(command.stdout(Stdio::null()).stderr(Stdio::null()))
}

/// The last checkpoint of `run`.
pub(crate) fn newest(m: &Meristem) -> Option<PathBuf> {
    let entries = fs::read_dir(m.path("run/checkpoints")).ok()?;
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| !file_name(path).starts_with('.')).max()
}

pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

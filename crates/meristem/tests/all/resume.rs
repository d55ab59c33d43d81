//! Runs killed at any moment and resumed: the same bits and events as without the kills (U4).

#![cfg(unix)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::common::Meristem;
use crate::common::process::{Process, output, wait_for};
use crate::common::runs::{assert_same, outcome, with_images, without_checksums};
use meristem::nn::safetensors;
use serde_json::Value;

/// Settings of two rounds of growing hosts on a few small images, with a checkpoint after every
/// second step.
const RUN: &str = "train --dataset arrays --data-root images.safetensors --controller heuristic \
                   --preset quick --host minimal --slots r0,r1 --envs 3 --rounds 2 --steps 24 \
                   --batch 16 --control-split 0.2 --checkpoint-every 2 --quiet \
                   --parameters-per-image 99 --max-gap 99";

/// Removes newer settings from a configuration, so that it is like an older one.
fn as_once_written(config: &Path) {
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

/// Starts a run and kills it at that moment. Returns whether it was killed before its end.
pub(crate) fn killed_at(m: &Meristem, arguments: &str, run: &str, moment: Moment) -> bool {
    let mut command = m.command();
    command.args(arguments.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = Process::start(&mut command);
    let started = Instant::now();
    while !moment.has_come(m, run) && child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < Duration::from_secs(120), "{moment:?} within two minutes");
    }
    // The exact position at the kill is random, which is intended.
    child.kill().unwrap();
    !child.wait().unwrap().success()
}

#[test]
fn a_run_killed_at_any_moment_ends_as_if_it_had_not_been() {
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
        // Kills are spread over both rounds, each attempt a little later; every third kill is
        // during a checkpoint.
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
fn how_often_checkpoints_are_written_changes_no_bit() {
    let m = with_images();
    m.ok(&format!("{RUN} --run-dir often --checkpoint-every 1"));
    m.ok(&format!("{RUN} --run-dir never --checkpoint-every 0"));
    let (often, never) = (outcome(&m, "often"), outcome(&m, "never"));
    assert_eq!(often.weights, never.weights);
    assert_eq!(often.envs, never.envs);
}

#[test]
fn a_stopped_run_goes_on_and_a_complete_one_is_left_alone() {
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
    // A summary from before its keys had the names of today is the same summary.
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

/// A policy resumes with the same bits: the checkpoint has its rollout, optimiser and memory, and
/// its teacher's memory.
#[test]
fn a_policy_resumes_to_the_same_bits() {
    resumes_to_the_same_bits("--ppo-demonstrations 1");
}

/// A policy on three ranks resumes with the same bits, including unsent gradients.
#[test]
fn a_policy_on_ranks_resumes_to_the_same_bits() {
    let events = resumes_to_the_same_bits("--ranks 3 --exchange topk:0.05");
    let updates: Vec<&Value> = events.iter().filter(|e| e["event"] == "policy_updated").collect();
    let fingerprints: Vec<&str> =
        updates.iter().map(|update| update["fingerprint"].as_str().unwrap()).collect();
    assert_eq!(fingerprints.len(), 2);
    assert_ne!(fingerprints[0], fingerprints[1], "it learned");
}

/// One host on two ranks, killed twice while it grows, resumes with the same bits, including unsent
/// gradients.
#[test]
fn a_host_on_ranks_resumes_to_the_same_bits() {
    let m = with_images();
    // The last of two equal flags counts.
    let ranks = "--data-parallel --envs 1 --ranks 2 --exchange topk:0.05 --rounds 1";
    let run = format!("{RUN} {ranks} --host cnn:channels=12,blocks=2,kernel=3,pools=1");
    m.ok(&format!("{run} --run-dir whole"));
    let events = m.events("whole");
    assert!(events.iter().any(|e| e["event"] == "module_germinated"));
    let lines = events.len();
    assert!(killed_at(&m, &format!("{run} --run-dir cut"), "cut", Moment::Events(lines / 3)));
    assert!(killed_at(&m, "train --resume cut --quiet", "cut", Moment::Events(2 * lines / 3)));
    m.ok("train --resume cut --quiet --threads 1");
    assert_same(&outcome(&m, "cut"), &outcome(&m, "whole"), "two ranks");
}

fn resumes_to_the_same_bits(ranks: &str) -> Vec<Value> {
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

/// A checkpoint has the policy. Before the first checkpoint, the file that the run started from is
/// required.
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
    as_once_written(&m.path("cut/config.toml"));
    m.ok("train --resume cut --quiet");
    assert_same(&outcome(&m, "cut"), &outcome(&m, "whole"), "from a policy");
    assert!(m.bytes("cut/policy.safetensors") == m.bytes("whole/policy.safetensors"));
    fs::create_dir_all(m.path("early/weights")).unwrap();
    fs::copy(m.path("cut/config.toml"), m.path("early/config.toml")).unwrap();
    let words = ["no checkpoint and cannot start again", "first/policy.safetensors"];
    m.fails("train --resume early", 2, &words);
}

#[test]
fn what_cannot_be_resumed_is_said_and_left_alone() {
    let m = with_images();
    m.fails("train --resume nowhere", 2, &["cannot resume nowhere", "not a folder"]);
    fs::create_dir(m.path("empty")).unwrap();
    m.fails("train --resume empty", 2, &["config.toml"]);
    m.fails("train --resume empty --seed 3", 2, &["--seed cannot be changed", "--threads"]);
    m.fails("train --resume empty --config x.toml", 2, &["own settings", "--config"]);
    m.fails("train --resume empty --comm-deadline 0", 2, &["`comm-deadline`: got 0"]);
    let mut child = background(&m, "--run-dir run --steps 100000 --governor-penalty -9");
    wait_for("two checkpoints", || {
        fs::read_dir(m.path("run/checkpoints")).is_ok_and(|files| files.count() >= 2)
    });
    child.kill().unwrap();
    child.wait().unwrap();
    let newest = newest(&m).unwrap();
    let whole = fs::read(&newest).unwrap();
    let events = m.bytes("run/events.jsonl");
    let resume = "train --resume run --quiet";
    let summary = stopped_summary(&m);
    fs::write(&newest, &whole[..whole.len() / 2]).unwrap();
    let name = file_name(&newest);
    m.fails(resume, 1, &[&name, "remove this file"]);
    fs::write(&newest, &whole).unwrap();
    // A checkpoint of another version: removing it would not help.
    let (tensors, mut metadata) = safetensors::load(&newest).unwrap();
    metadata.insert("version".into(), "1".into());
    safetensors::save(&newest, &tensors, &metadata).unwrap();
    let words = [&name, "version 1", "version 2", "resume with the version of meristem"];
    let said = m.fails(resume, 1, &words);
    assert!(!said.stderr.contains("remove"), "{}", said.stderr);
    fs::write(&newest, &whole).unwrap();
    // Another seed in the folder's configuration: the checkpoint is sound and stays.
    let config = fs::read_to_string(m.path("run/config.toml")).unwrap();
    fs::write(m.path("run/config.toml"), config.replace("seed = 42", "seed = 43")).unwrap();
    let words = [
        &name,
        "began with `seed = 42`, but config.toml has `seed = 43`",
        "restore",
        "run/config.toml",
    ];
    let said = m.fails(resume, 2, &words);
    assert!(!said.stderr.contains("remove"), "{}", said.stderr);
    fs::write(m.path("run/config.toml"), config.replace("minimal", "baseline")).unwrap();
    m.fails(resume, 2, &[&name, "began with `host = \"minimal\"`", "restore"]);
    fs::write(m.path("run/config.toml"), &config).unwrap();
    // Missing settings of the governor have their defaults, which differ from the settings of this
    // run.
    as_once_written(&m.path("run/config.toml"));
    m.fails(resume, 2, &[&name, "began with `governor_penalty = -9.0`", "restore"]);
    fs::write(m.path("run/config.toml"), &config).unwrap();
    // A damaged configuration is reported, not the checkpoints, and nothing starts.
    let part: String = config.lines().take(5).map(|line| format!("{line}\n")).collect();
    for damaged in ["", &part] {
        fs::write(m.path("run/config.toml"), damaged).unwrap();
        m.fails(resume, 2, &["config.toml was changed or damaged"]);
    }
    fs::write(m.path("run/config.toml"), &config).unwrap();
    // Events that are shorter than the checkpoint requires; the summary stays.
    fs::write(m.path("run/events.jsonl"), &events[..100]).unwrap();
    fs::write(m.path("run/summary.json"), &summary).unwrap();
    m.fails(resume, 2, &["events.jsonl has 100 bytes"]);
    assert_eq!(m.bytes("run/summary.json"), summary);
    // Zero bytes are left by a system crash; truncation at the right length is damage, too.
    let mut holed = events.clone();
    holed[60] = 0;
    fs::write(m.path("run/events.jsonl"), &holed).unwrap();
    m.fails(resume, 2, &["events.jsonl was changed or damaged", "byte 60 is zero"]);
    assert_eq!(m.bytes("run/summary.json"), summary);
    fs::write(m.path("run/events.jsonl"), &events).unwrap();
    fs::rename(m.path("run/checkpoints"), m.path("run/elsewhere")).unwrap();
    m.fails(resume, 2, &["checkpoints/ has none"]);
    fs::rename(m.path("run/elsewhere"), m.path("run/checkpoints")).unwrap();
    assert_eq!(m.bytes("run/events.jsonl"), events, "nothing was overwritten");
    let mut other = m.command();
    other.args(resume.split_whitespace()).env("MERISTEM_ISA", "portable");
    let said = crate::common::said(output(&mut other));
    if said.code != Some(0) {
        assert!(said.stderr.contains("MERISTEM_ISA"), "{}", said.stderr);
        assert_eq!(m.bytes("run/events.jsonl"), events, "nothing was overwritten");
    }
}

/// Swapped labels are other data, although nothing but their checksum differs.
#[test]
fn other_labels_are_not_gone_on_with() {
    let m = with_images();
    let mut child = background(&m, "--run-dir run");
    wait_for("a checkpoint", || newest(&m).is_some());
    child.kill().unwrap();
    child.wait().unwrap();
    let path = m.path("images.safetensors");
    let (arrays, metadata) = safetensors::load(&path).unwrap();
    let mut swapped = arrays.clone();
    let meristem::nn::HostData::I64(labels) = &arrays.get("train_labels").unwrap().data else {
        panic!("other labels");
    };
    let swap = |&label: &i64| if label < 2 { 1 - label } else { label };
    let data = meristem::nn::HostData::I64(labels.iter().map(swap).collect());
    let shape = vec![labels.len()];
    swapped.insert("train_labels", meristem::nn::HostTensor { shape, data });
    safetensors::save(&path, &swapped, &metadata).unwrap();
    let words = ["checksum of training images and labels", "put the data back", "--config"];
    m.fails("train --resume run", 2, &words);
    safetensors::save(&path, &arrays, &metadata).unwrap();
    m.ok("train --resume run --quiet");
}

/// Settings of a run on images beside it, with a checkpoint after every step.
const SMALL: &str = "train --dataset arrays --data-root images.safetensors --preset quick \
                     --host minimal --slots r0 --envs 1 --batch 16 --control-split 0.2 \
                     --checkpoint-every 1 --quiet";

/// Names of settings, flags that give them a file, and another file for its place.
const NAMED_FILES: [(&str, &str, &str, &str); 3] = [
    ("init", "--controller none --init w.safetensors", "w.safetensors", "other.safetensors"),
    (
        "start-topology",
        "--controller none --start-topology w.safetensors",
        "w.safetensors",
        "other.safetensors",
    ),
    ("controller", "--controller fixed:s.jsonl", "s.jsonl", "other.jsonl"),
];

/// Images, two weights files and two scripts.
fn with_named_files() -> Meristem {
    let m = with_images();
    for (seed, file) in [(1, "w.safetensors"), (2, "other.safetensors")] {
        let flags = format!("--controller none --steps 1 --seed {seed} --export {file}");
        m.ok(&format!("{SMALL} {flags} --run-dir made-{seed}"));
    }
    for (step, file) in [(20, "s.jsonl"), (25, "other.jsonl")] {
        let slot = r#""op": "GERMINATE", "slot": "r0c1", "blueprint": "conv_light""#;
        fs::write(m.path(file), format!("{{\"step\": {step}, {slot}}}\n")).unwrap();
    }
    m
}

/// A run goes on with the files that it began with, from any working directory, and with no others.
#[test]
fn files_that_settings_name_are_those_that_the_run_began_with() {
    let m = with_named_files();
    fs::create_dir(m.path("elsewhere")).unwrap();
    for (setting, flags, file, other) in NAMED_FILES {
        // A resumed run has absolute paths, also in its summary.
        let script = format!("fixed:{}", m.path("s.jsonl").display());
        let flags = flags.replace("fixed:s.jsonl", &script);
        let start = format!("{SMALL} {flags} --rounds 2 --steps 30");
        m.ok(&format!("{start} --run-dir {setting}-whole"));
        assert!(killed_at(&m, &format!("{start} --run-dir {setting}"), setting, Moment::Events(9)));
        let [began, other] = [file, other].map(|name| m.bytes(name));
        let events = m.bytes(&format!("{setting}/events.jsonl"));
        fs::write(m.path(file), other).unwrap();
        let names = format!("--{setting} names");
        let words = [file, &names, "put the file back", "--config"];
        m.fails(&format!("train --resume {setting}"), 2, &words);
        fs::remove_file(m.path(file)).unwrap();
        m.fails(&format!("train --resume {setting}"), 2, &[&format!("`{setting}`"), file]);
        assert_eq!(m.bytes(&format!("{setting}/events.jsonl")), events, "nothing is overwritten");
        fs::write(m.path(file), began).unwrap();
        let mut resumed = m.command();
        resumed.args(["train", "--quiet", "--resume"]).arg(format!("../{setting}"));
        let said = crate::common::said(output(resumed.current_dir(m.path("elsewhere"))));
        assert_eq!(said.code, Some(0), "{}", said.stderr);
        let [got, whole] =
            [setting.into(), format!("{setting}-whole")].map(|run| outcome(&m, &run));
        assert_same(&got, &whole, setting);
    }
}

/// In its last round a run makes no host from a file any more: it goes on without it. Once it is
/// extended it needs the file again.
#[test]
fn a_file_is_needed_only_where_a_host_is_made_from_it() {
    let m = with_named_files();
    let other = m.bytes("other.safetensors");
    for (setting, flags, file, _) in &NAMED_FILES[..2] {
        let start = format!("{SMALL} {flags} --rounds 1 --steps 30");
        m.ok(&format!("{start} --run-dir {setting}-whole"));
        let began = m.bytes(file);
        for contents in [None, Some(&other)] {
            let run = format!("{setting}-{}", contents.is_some());
            assert!(killed_at(&m, &format!("{start} --run-dir {run}"), &run, Moment::Events(9)));
            fs::remove_file(m.path(file)).unwrap();
            contents.map_or(Ok(()), |bytes| fs::write(m.path(file), bytes)).unwrap();
            m.fails(&format!("train --resume {run} --rounds 2"), 2, &[setting, file]);
            m.ok(&format!("train --resume {run} --quiet"));
            let [got, whole] = [&run, &format!("{setting}-whole")].map(|run| outcome(&m, run));
            assert_same(&got, &whole, &run);
            m.fails(&format!("train --resume {run} --rounds 2"), 2, &[setting, file]);
            fs::write(m.path(file), &began).unwrap();
        }
    }
}

/// The run was started next to its data, with a relative path.
#[test]
fn a_run_is_resumed_from_any_working_directory() {
    let m = with_images();
    let mut child = background(&m, "--run-dir run");
    wait_for("a checkpoint", || {
        fs::read_dir(m.path("run/checkpoints")).is_ok_and(|files| files.count() >= 1)
    });
    child.kill().unwrap();
    child.wait().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let mut command = m.command();
    command.current_dir(elsewhere.path()).args(["train", "--quiet", "--resume"]);
    let said = crate::common::said(output(command.arg(m.path("run"))));
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    assert_eq!(m.json("run/summary.json")["status"], "completed");
}

#[test]
fn two_processes_do_not_write_one_run() {
    let m = with_images();
    let mut first = background(&m, "--run-dir run --steps 100000");
    wait_for("a run", || m.path("run/events.jsonl").is_file());
    m.fails("train --resume run", 2, &["another process"]);
    first.kill().unwrap();
    first.wait().unwrap();
}

/// Stops a run and returns its summary.
fn stopped_summary(m: &Meristem) -> Vec<u8> {
    let mut child = background(m, "--run-dir other --steps 100000");
    wait_for("a step", || {
        fs::read_to_string(m.path("other/events.jsonl")).is_ok_and(|t| t.contains("step_completed"))
    });
    std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(3), "stopped");
    m.bytes("other/summary.json")
}

/// A run in the background, killed when the handle is dropped.
fn background(m: &Meristem, flags: &str) -> Process {
    let mut command = m.command();
    command.args(RUN.split_whitespace()).args(flags.split_whitespace());
    Process::start(command.stdout(Stdio::null()).stderr(Stdio::null()))
}

/// The last checkpoint of `run`.
fn newest(m: &Meristem) -> Option<PathBuf> {
    let entries = fs::read_dir(m.path("run/checkpoints")).ok()?;
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| !file_name(path).starts_with('.')).max()
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

/// A pipe in the place of a file of the run, which would wait for another process, is an error.
#[test]
fn pipes_in_a_run_folder_are_refused() {
    let m = with_images();
    m.ok(&format!("{RUN} --run-dir run --rounds 1 --steps 3"));
    fs::remove_file(m.path("run/summary.json")).unwrap();
    for (file, words) in [
        ("config.toml", "expected a plain file, got a pipe"),
        (".lock", "expected a plain file, got a pipe"),
        ("events.jsonl", "expected a plain file, got a pipe"),
        ("checkpoints/round-000009-step-000009.safetensors", "expected a plain file, got a pipe"),
    ] {
        let (path, away) = (m.path("run").join(file), m.path("away"));
        let moved = fs::rename(&path, &away).is_ok();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let said = output(m.command().args(["train", "--resume", "run", "--quiet"]));
        let text = String::from_utf8(said.stderr).unwrap();
        let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(!said.status.success() && flat.contains(words), "{file}: {flat}");
        fs::remove_file(&path).unwrap();
        if moved {
            fs::rename(away, path).unwrap();
        }
    }
    m.ok("train --resume run --quiet");
}

/// A file of a run that is a link names any file of whoever resumes it.
#[test]
fn links_in_a_run_folder_are_not_followed() {
    let m = with_images();
    m.ok(&format!("{RUN} --run-dir run --rounds 1 --steps 3 --tensorboard"));
    m.ok(&format!("{RUN} --run-dir other --rounds 1 --steps 3"));
    fs::remove_file(m.path("run/summary.json")).unwrap();
    let precious = "precious\n".repeat(10_000);
    fs::write(m.path("precious"), &precious).unwrap();
    let other = m.bytes("other/weights/env-0.safetensors");
    let newest = file_name(&newest(&m).unwrap());
    for (name, target) in [
        (".lock", "../precious"),
        ("config.toml", "../other/config.toml"),
        ("events.jsonl", "../precious"),
        ("weights", "../other/weights"),
        ("checkpoints", "../other/checkpoints"),
        (&*format!("checkpoints/{newest}"), "../../precious"),
        ("tensorboard", "../other"),
        // A link to a file of the same folder would be emptied or cut as well.
        (".lock", "events.jsonl"),
    ] {
        let (path, away) = (m.path("run").join(name), m.path("away"));
        fs::rename(&path, &away).unwrap();
        std::os::unix::fs::symlink(target, &path).unwrap();
        let command = "train --resume run --quiet --tensorboard";
        let is_of_writer = name.starts_with("checkpoints/") || name == "tensorboard";
        m.fails(command, if is_of_writer { 1 } else { 2 }, &["got a link"]);
        assert_eq!(m.bytes("precious"), precious.as_bytes(), "{name}");
        fs::remove_file(&path).unwrap();
        fs::rename(away, path).unwrap();
    }
    // A link in place of a file that is written anew is replaced.
    for name in ["summary.json", "weights/env-0.safetensors"] {
        let _ = fs::remove_file(m.path("run").join(name));
        std::os::unix::fs::symlink(m.path("precious"), m.path("run").join(name)).unwrap();
    }
    fs::remove_file(m.path("run/summary.json")).unwrap();
    m.ok("train --resume run --quiet");
    assert_eq!(m.bytes("precious"), precious.as_bytes());
    assert_eq!(m.bytes("other/weights/env-0.safetensors"), other);
    assert_eq!(m.ok("runs verify run").code, Some(0));
}

/// A line before the checkpoint, a result, a weight: each is noticed by whoever reads it.
#[test]
fn a_changed_digit_is_noticed() {
    let m = with_images();
    m.ok(&format!("{RUN} --run-dir run --rounds 1 --steps 3"));
    let said = m.ok("runs verify run");
    assert!(said.stdout.contains("events.jsonl"), "{}", said.stdout);
    let listed: Value = serde_json::from_str(&m.ok("runs verify run --json").stdout).unwrap();
    let states: Vec<&str> =
        listed["files"].as_array().unwrap().iter().map(|f| f["state"].as_str().unwrap()).collect();
    assert!(states.len() >= 6 && states.iter().all(|state| *state == "whole"), "{listed}");
    let changed = |name: &str, from: &str, to: &str| {
        let bytes = m.bytes(name);
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        let mut other = bytes.clone();
        other[at..at + from.len()].copy_from_slice(to.as_bytes());
        fs::write(m.path(name), other).unwrap();
        m.fails("runs verify run", 1, &[name.strip_prefix("run/").unwrap()]);
        bytes
    };
    // In a number of the first event.
    let events = changed("run/events.jsonl", "\"train_samples\":4", "\"train_samples\":5");
    fs::write(m.path("run/events.jsonl"), &events).unwrap();
    // In the name of a checksum.
    changed("run/events.jsonl", "\"crc32\"", "\"crc30\"");
    let words = ["events.jsonl was changed or damaged", "line 1", "differs from its checksum"];
    let summary = m.bytes("run/summary.json");
    fs::remove_file(m.path("run/summary.json")).unwrap();
    m.fails("train --resume run --quiet", 2, &words);
    fs::write(m.path("run/events.jsonl"), &events).unwrap();
    fs::write(m.path("run/summary.json"), &summary).unwrap();
    changed("run/summary.json", "\"crc32\"", "\"crc3\u{7f}\"");
    m.fails("train --resume run --quiet", 2, &["summary.json", "differs from its checksum"]);
    fs::write(m.path("run/summary.json"), &summary).unwrap();
    let summary =
        changed("run/summary.json", "\"control_accuracy\": 0.", "\"control_accuracy\": 1.");
    let row = m.ok("runs run").stdout;
    assert!(row.contains("differs from its checksum"), "{row}");
    m.fails("train --resume run --quiet", 2, &["summary.json", "differs from its checksum"]);
    fs::write(m.path("run/summary.json"), &summary).unwrap();
    let weights = m.bytes("run/weights/env-0.safetensors");
    let mut other = weights.clone();
    *other.last_mut().unwrap() ^= 1;
    fs::write(m.path("run/weights/env-0.safetensors"), &other).unwrap();
    let said = m.fails("runs verify run", 1, &["1 of 8 files", "weights/env-0.safetensors"]);
    assert!(said.stdout.contains("FAIL  run/weights/env-0.safetensors: its contents have the"));
    let evaluate = "eval --weights run/weights/env-0.safetensors --dataset arrays --data-root \
                    images.safetensors";
    let said = m.run(evaluate);
    assert!(said.code != Some(0) && said.stderr.contains("checksum"), "{}", said.stderr);
    fs::remove_file(m.path("run/weights/env-0.safetensors")).unwrap();
    let said = m.fails("runs verify run", 1, &["weights/env-0.safetensors"]);
    assert!(said.stdout.contains("it is missing, but summary.json names it"), "{}", said.stdout);
    fs::write(m.path("run/weights/env-0.safetensors"), &weights).unwrap();
    m.ok("runs verify run");
    m.fails("runs verify none", 1, &["none"]);
}

/// A kill while the settings are written leaves a folder without them.
#[test]
fn a_run_that_was_killed_before_it_had_settings_starts_again() {
    let m = with_images();
    let unfilled = |run: &str| {
        fs::create_dir_all(m.path(run).join("weights")).unwrap();
        fs::write(m.path(run).join(".lock"), "").unwrap();
        fs::write(m.path(run).join(".config.toml.77.part"), "seed = ").unwrap();
    };
    unfilled("run");
    let listed: Value = serde_json::from_str(&m.ok("runs run --json").stdout).unwrap();
    let problem = listed["runs"][0]["problem"].as_str().unwrap();
    assert!(problem.contains("killed before it had settings"), "{problem}");
    m.fails("train --resume run --quiet", 2, &["killed before it had settings", "once more"]);
    m.ok(&format!("{RUN} --run-dir run --rounds 1 --steps 1"));
    let parts = |run: &str| {
        let names = fs::read_dir(m.path(run)).unwrap();
        names
            .filter(|name| name.as_ref().unwrap().file_name().to_string_lossy().contains("part"))
            .count()
    };
    assert_eq!(parts("run"), 0);
    // Files of an earlier build and of a killed process go when a run is resumed.
    fs::remove_file(m.path("run/summary.json")).unwrap();
    fs::write(m.path("run/.notes.tmp-1"), "the user's").unwrap();
    for part in [".summary.json.7.part", "weights/.env-0.safetensors.tmp-9"] {
        fs::write(m.path("run").join(part), "torn").unwrap();
    }
    m.ok("train --resume run --quiet");
    assert!(m.path("run/.notes.tmp-1").exists());
    // The weights of three envs, and nothing else.
    assert_eq!((parts("run"), fs::read_dir(m.path("run/weights")).unwrap().count()), (0, 3));
    // An empty folder is used as it is, with its permissions.
    use std::os::unix::fs::PermissionsExt;
    fs::create_dir(m.path("prepared")).unwrap();
    fs::set_permissions(m.path("prepared"), fs::Permissions::from_mode(0o750)).unwrap();
    m.ok(&format!("{RUN} --run-dir prepared --rounds 1 --steps 1"));
    assert_eq!(fs::metadata(m.path("prepared")).unwrap().permissions().mode() & 0o777, 0o750);
    // Something of the user's is never discarded, and nothing is added to it.
    unfilled("mine");
    fs::write(m.path("mine/notes"), "x").unwrap();
    fs::create_dir(m.path("theirs")).unwrap();
    fs::write(m.path("theirs/notes"), "x").unwrap();
    for (folder, files) in [("mine", 4), ("theirs", 1)] {
        m.fails(&format!("{RUN} --run-dir {folder}"), 2, &[folder, "exists"]);
        assert_eq!(fs::read_dir(m.path(folder)).unwrap().count(), files);
    }
}

/// A run whose folder is gone has nowhere to write its results.
#[test]
fn a_run_whose_folder_is_removed_ends_at_the_next_step() {
    let m = with_images();
    let mut child = background(&m, "--run-dir run --rounds 1 --steps 10000");
    wait_for("a checkpoint", || newest(&m).is_some());
    fs::rename(m.path("run"), m.path("moved")).unwrap();
    // The folder is open, so moving it loses nothing.
    wait_for("a later checkpoint", || {
        fs::read_dir(m.path("moved/checkpoints")).unwrap().count() == 3
    });
    fs::remove_dir_all(m.path("moved")).or_else(|_| fs::remove_dir_all(m.path("moved"))).unwrap();
    let code = child.wait().unwrap().code();
    assert_eq!(code, Some(1));
    assert!(!m.path("run").exists() && !m.path("moved").exists(), "nothing was made anew");
}

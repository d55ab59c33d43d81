//! Run folders written by earlier versions (`tests/older_runs`): the current program resumes,
//! lists, reports, exports and evaluates all of them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::common::process::output;
use crate::common::{CommandOutput, Meristem, command_output};

/// Single runs in the folder of each version, their states, and their steps of all rounds until
/// they were stopped or killed. The first three versions have no `init`.
const RUNS: [(&str, &str, u32); 6] = [
    ("none", "stopped", 3),
    ("heuristic", "killed", 12),
    ("ppo", "killed", 7),
    ("ranks", "killed", 4),
    ("complete", "complete", 8),
    ("init", "killed", 4),
];

fn collection() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/older_runs")
}

/// Names of the versions, oldest first.
fn versions() -> Vec<String> {
    let entries = fs::read_dir(collection()).unwrap().map(|entry| entry.unwrap().path());
    let folders = entries.filter(|path| path.is_dir());
    let mut names: Vec<String> =
        folders.map(|path| path.file_name().unwrap().to_str().unwrap().into()).collect();
    names.sort_unstable();
    assert!(names.len() >= 6, "{names:?}");
    names
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
    if from.join("config.toml").is_file() {
        // Git keeps no empty folders, such as the one of a run that was killed in its first round.
        fs::create_dir_all(to.join("weights")).unwrap();
    }
}

/// The runs in the working directory.
fn runs(m: &Meristem) -> Vec<(&'static str, &'static str, u32)> {
    let found: Vec<_> = RUNS.into_iter().filter(|(run, ..)| m.path(run).is_dir()).collect();
    assert!(found.len() >= RUNS.len() - 1, "{found:?}");
    found
}

/// Creates a working directory with copies of the runs of a version.
fn with_runs_of(version: &str) -> Meristem {
    let m = Meristem::new();
    copy(&collection().join(version), m.folder.path());
    m
}

/// Runs a command with portable kernels, as the stored runs, so that it works on every machine.
fn portable(m: &Meristem, arguments: &str, version: &str) -> CommandOutput {
    ends_with(0, m.command().env("MERISTEM_ISA", "portable"), arguments, version)
}

/// Runs a command with the fastest kernels, which it may choose where it continues no stored run.
fn fast(m: &Meristem, arguments: &str, version: &str) -> CommandOutput {
    ends_with(0, &mut m.command(), arguments, version)
}

fn ends_with(code: i32, command: &mut Command, arguments: &str, version: &str) -> CommandOutput {
    command.args(arguments.split_whitespace());
    let said = command_output(output(command));
    let context = format!("{version}: {arguments}\n{}{}", said.stdout, said.stderr);
    assert_eq!(said.code, Some(code), "{context}");
    said
}

fn value(m: &Meristem, file: &str) -> Value {
    serde_json::from_slice(&m.bytes(file)).unwrap()
}

/// Asserts that a run has an event for each step of its summary, without a gap in its events.
fn assert_ended(m: &Meristem, run: &str, status: &str, context: &str) {
    let summary = value(m, &format!("{run}/summary.json"));
    assert_eq!(summary["status"], status, "{context}");
    let text = fs::read_to_string(m.path(run).join("events.jsonl")).unwrap();
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["seq"], number, "{context}");
    }
    let last = events.last().unwrap();
    assert_eq!((&last["event"], &last["status"]), (&"run_ended".into(), &status.into()));
    let steps = events.iter().filter(|event| event["event"] == "step_completed").count();
    assert_eq!(summary["steps"], steps, "{context}: an event for each step");
}

/// The oldest and the newest version resume to the end. Of each other version, whose steps are
/// those of the newest once they are read, every second run makes a step, the policy a whole round
/// with its update; the next version has the other runs.
#[test]
fn runs_of_every_version_resume() {
    let versions = versions();
    for (number, version) in versions.iter().enumerate() {
        let whole = number == 0 || number + 1 == versions.len();
        let m = with_runs_of(version);
        let resume = |run: &str, flags: &str, steps: u32| {
            let (code, status, stop) = if whole {
                (0, "completed", String::new())
            } else {
                (3, "interrupted", format!("--stop-after {steps}"))
            };
            let arguments = format!("train --resume {run} {flags} {stop} --quiet");
            ends_with(code, m.command().env("MERISTEM_ISA", "portable"), &arguments, version);
            assert_ended(&m, run, status, &format!("{version}, {run} {flags}"));
        };
        let resumed = runs(&m).into_iter().enumerate();
        let resumed = resumed.filter(|(kind, _)| whole || (kind + number) % 2 == 0);
        for (_, (run, state, steps)) in resumed {
            let made = if run == "ppo" { 3 } else { 1 };
            if state == "complete" {
                portable(&m, &format!("train --resume {run} --quiet"), version);
                assert_ended(&m, run, "completed", version);
                resume(run, "--rounds 3", steps + made);
                assert_eq!(value(&m, "complete/summary.json")["rounds"], 3, "{version}");
            } else {
                resume(run, "", steps + made);
            }
        }
    }
}

/// A comparison continues with the settings of one of its runs.
#[test]
fn comparisons_of_every_version_continue() {
    for version in versions() {
        let m = with_runs_of(&version);
        let before = value(&m, "study/study.json");
        let settings = "--config study/seed-1000/1-none/config.toml --threads 1";
        let command = "control eval --run-dir study --controllers none,heuristic --seeds 3 --json";
        portable(&m, &format!("{command} {settings}"), &version);
        let now = value(&m, "study/study.json");
        for (contender, name) in ["none", "heuristic"].into_iter().enumerate() {
            let runs = |study: &Value| study["contenders"][contender]["runs"].clone();
            let accuracy = |study: &Value, run: usize| runs(study)[run]["test_accuracy"].clone();
            assert_eq!(runs(&now).as_array().unwrap().len(), 3, "{version}, {name}");
            for run in 0..2 {
                assert!(accuracy(&before, run).is_number());
                assert_eq!(accuracy(&now, run), accuracy(&before, run), "{version}, {name}");
            }
        }
    }
}

#[test]
fn runs_of_every_version_are_listed_and_reported() {
    for version in versions() {
        let m = with_runs_of(&version);
        let listed = fast(&m, "runs . --json", &version).stdout;
        let listed: Value = serde_json::from_str(&listed).unwrap();
        let rows = listed["runs"].as_array().unwrap();
        let all = runs(&m);
        for (run, state, _) in &all {
            let row = rows.iter().find(|row| row["run"] == format!("./{run}"));
            let row = row.unwrap_or_else(|| panic!("{version}, {run}: {listed}"));
            assert_eq!(
                (&row["state"], &row["problem"]),
                (&(*state).into(), &Value::Null),
                "{version}"
            );
            fast(&m, &format!("export csv {run} --out {run}.csv"), &version);
            let rows = fs::read_to_string(m.path(&format!("{run}.csv"))).unwrap();
            let header = rows.lines().next().unwrap();
            assert!(header.contains("control_accuracy") && rows.lines().count() > 2, "{rows}");
        }
        let names: Vec<&str> = all.iter().map(|(run, ..)| *run).collect();
        let named = names.join(" ");
        let compared = fast(&m, &format!("runs compare {named} --json"), &version).stdout;
        let compared: Value = serde_json::from_str(&compared).unwrap();
        assert_eq!(compared["runs"].as_array().unwrap().len(), all.len(), "{compared}");
        fast(&m, &format!("runs report {named} --out report.html"), &version);
        let report = fs::read_to_string(m.path("report.html")).unwrap();
        assert!(names.iter().all(|run| report.contains(run)), "{version}");
    }
}

#[test]
fn weights_and_policies_of_every_version_are_used() {
    const TINY: &str = "train --host cnn:channels=1 --slots r0 --envs 1 --steps 1 --batch 512 \
                        --max-batches 1 --threads 1 --quiet";
    for version in versions() {
        let m = with_runs_of(&version);
        let weights = "complete/weights/env-0.safetensors";
        let said = fast(&m, &format!("eval --weights {weights} --json"), &version).stdout;
        let evaluated: Value = serde_json::from_str(&said).unwrap();
        let summary = value(&m, "complete/summary.json");
        // Current kernels round differently, so a few of the 10,000 images may be classified
        // differently.
        let [then, now] = [&summary["envs"][0]["test_accuracy"], &evaluated["accuracy"]];
        let [then, now] = [then, now].map(|share| share.as_f64().unwrap());
        assert!((then - now).abs() < 0.002, "{version}: {then}, now {now}");
        fast(&m, &format!("export onnx {weights} --out model.onnx"), &version);
        for (run, flags) in [
            ("begun", format!("--controller none --init {weights}")),
            ("topology", "--controller none --start-topology complete".to_string()),
            ("greedy", "--controller greedy:complete/policy.safetensors".into()),
            ("learns", "--controller ppo --policy complete/policy.safetensors --rounds 1".into()),
        ] {
            fast(&m, &format!("{TINY} --run-dir {run} {flags}"), &version);
        }
    }
}

/// The newest stored version has all current settings and formats; otherwise a new folder must be
/// added.
#[test]
fn the_newest_version_has_the_current_settings_and_formats() {
    let keys = |text: &str| {
        let pairs = text.lines().filter_map(|line| line.split_once(" = "));
        pairs.map(|(key, _)| key.to_string()).collect::<BTreeSet<String>>()
    };
    let m = Meristem::new();
    m.ok(
        "train --controller none --quiet --steps 2 --max-batches 1 --envs 1 --checkpoint-every 1 \
          --run-dir now",
    );
    let today = keys(&fs::read_to_string(m.path("now/config.toml")).unwrap());
    let newest = collection().join(versions().last().unwrap());
    let missing = "add a folder to tests/older_runs, as its README says";
    let settings = fs::read_to_string(newest.join("none/config.toml")).unwrap();
    assert_eq!(today, keys(&settings), "{missing}");
    let version = |bytes: Vec<u8>| {
        let first = serde_json::Deserializer::from_slice(&bytes).into_iter::<Value>().next();
        first.unwrap().unwrap()["v"].clone()
    };
    for name in ["events.jsonl", "summary.json"] {
        let today = version(m.bytes(&format!("now/{name}")));
        assert_eq!(today, version(fs::read(newest.join("none").join(name)).unwrap()), "{missing}");
    }
    for (file, key) in [("weights", "meristem_format"), ("checkpoints", "version")] {
        let today = metadata(&m.path("now").join(file), key);
        assert_eq!(today, metadata(&newest.join("none").join(file), key), "{missing}");
    }
}

/// An entry of the metadata of the only safetensors file in a folder.
fn metadata(folder: &Path, key: &str) -> String {
    let files: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    let bytes = fs::read(file).unwrap();
    let (length, rest) = bytes.split_first_chunk().unwrap();
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap();
    let header: Value = serde_json::from_slice(&rest[..length]).unwrap();
    header["__metadata__"][key].as_str().unwrap().into()
}

//! Runs that cannot be resumed because data, files or settings have changed (U4).

#![cfg(unix)]

use std::fs;

use meristem::nn::safetensors;

use crate::common::Meristem;
use crate::common::process::{output, wait_for};
use crate::common::runs::{assert_same, outcome, save, with_images};
use crate::resume::{Moment, background, file_name, killed_at, newest, remove_newer_settings};

#[test]
fn runs_that_cannot_be_resumed_are_reported_and_unchanged() {
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
    // A checkpoint of another version, for which removal is no remedy.
    let (tensors, mut metadata) = safetensors::load(&newest).unwrap();
    metadata.insert("version".into(), "1".into());
    save(&newest, &tensors, &metadata);
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
    // Missing settings get their defaults, which here differ from the settings of the run.
    remove_newer_settings(&m.path("run/config.toml"));
    m.fails(resume, 2, &[&name, "began with `governor_penalty = -9.0`", "restore"]);
    fs::write(m.path("run/config.toml"), &config).unwrap();
    // The error names the damaged configuration, not the checkpoints, and nothing starts.
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
    // A system crash may leave zero bytes at the end; this is also damage.
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
    let said = crate::common::command_output(output(&mut other));
    if said.code != Some(0) {
        assert!(said.stderr.contains("MERISTEM_ISA"), "{}", said.stderr);
        assert_eq!(m.bytes("run/events.jsonl"), events, "nothing was overwritten");
    }
}

/// Swapped labels are different data, although only the checksum differs.
#[test]
fn a_run_does_not_resume_with_other_labels() {
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
    save(&path, &swapped, &metadata);
    let words = ["checksum of training images and labels", "put the data back", "--config"];
    m.fails("train --resume run", 2, &words);
    save(&path, &arrays, &metadata);
    m.ok("train --resume run --quiet");
}

/// Settings of a run on images beside it, with a checkpoint after every step.
const SMALL: &str = "train --dataset arrays --data-root images.safetensors --preset quick \
                     --host minimal --slots r0 --envs 1 --batch 16 --control-split 0.2 \
                     --checkpoint-every 1 --quiet";

/// Names of settings, flags with a file, and another file to replace it.
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

/// A run resumes only with its original files, from any working directory.
#[test]
fn a_run_resumes_only_with_its_original_files() {
    let m = with_named_files();
    fs::create_dir(m.path("elsewhere")).unwrap();
    for (setting, flags, file, other) in NAMED_FILES {
        // A resumed run has absolute paths in its summary.
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
        let said = crate::common::command_output(output(resumed.current_dir(m.path("elsewhere"))));
        assert_eq!(said.code, Some(0), "{}", said.stderr);
        let [got, whole] =
            [setting.into(), format!("{setting}-whole")].map(|run| outcome(&m, &run));
        assert_same(&got, &whole, setting);
    }
}

/// In its last round a run creates no more hosts, so it does not need the file. An extended run
/// needs the file again.
#[test]
fn a_file_is_needed_only_to_create_a_host() {
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

/// The run was started in the folder of its data, with a relative path.
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
    let said = crate::common::command_output(output(command.arg(m.path("run"))));
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    assert_eq!(m.json("run/summary.json")["status"], "completed");
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

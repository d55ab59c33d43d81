//! Files of a run folder that are damaged, replaced, missing or in use (U4).

#![cfg(unix)]

use std::fs;

use serde_json::Value;

use crate::common::Meristem;
use crate::common::process::{output, wait_for};
use crate::common::runs::with_images;
use crate::resume::{RUN, background, file_name, newest};

#[test]
fn two_processes_cannot_write_one_run() {
    let m = with_images();
    let mut first = background(&m, "--run-dir run --steps 100000");
    wait_for("a run", || m.path("run/events.jsonl").is_file());
    m.fails("train --resume run", 2, &["another process"]);
    first.kill().unwrap();
    first.wait().unwrap();
}

/// A pipe in place of a file of the run, which would block, is an error.
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

/// A link in a run folder could name any file of the user who resumes the run.
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
        // A link to a file of the same folder would be truncated, too.
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
    // A link in place of a file that is rewritten is replaced.
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

/// Runs may lie beyond the entries that are searched, so that not all of them would be verified.
#[test]
fn a_folder_of_too_many_entries_is_not_verified() {
    let m = Meristem::new();
    fs::create_dir(m.path("many")).unwrap();
    for entry in 0..100_000 {
        fs::File::create(m.path("many").join(entry.to_string())).unwrap();
    }
    m.fails("runs verify many", 2, &["many is not the folder of a run"]);
    fs::File::create(m.path("many/one-more")).unwrap();
    m.fails("runs verify many", 1, &["many", "more entries than the 100,000", "a folder below it"]);
}

/// A change in an event, a result or a weight is detected by every reader of the file.
#[test]
fn a_changed_digit_is_detected() {
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

/// A kill during the write of the settings leaves a folder without settings.
#[test]
fn a_run_killed_before_its_settings_were_written_starts_again() {
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
    // Temporary files of an earlier build and of a killed process are removed when a run is
    // resumed.
    fs::remove_file(m.path("run/summary.json")).unwrap();
    fs::write(m.path("run/.notes.tmp-1"), "the user's").unwrap();
    for part in [".summary.json.7.part", "weights/.env-0.safetensors.tmp-9"] {
        fs::write(m.path("run").join(part), "torn").unwrap();
    }
    m.ok("train --resume run --quiet");
    assert!(m.path("run/.notes.tmp-1").exists());
    // The weights of three envs, and nothing else.
    assert_eq!((parts("run"), fs::read_dir(m.path("run/weights")).unwrap().count()), (0, 3));
    // An empty folder is used with its permissions.
    use std::os::unix::fs::PermissionsExt;
    fs::create_dir(m.path("prepared")).unwrap();
    fs::set_permissions(m.path("prepared"), fs::Permissions::from_mode(0o750)).unwrap();
    m.ok(&format!("{RUN} --run-dir prepared --rounds 1 --steps 1"));
    assert_eq!(fs::metadata(m.path("prepared")).unwrap().permissions().mode() & 0o777, 0o750);
    // A folder with other files is neither changed nor removed.
    unfilled("mine");
    fs::write(m.path("mine/notes"), "x").unwrap();
    fs::create_dir(m.path("theirs")).unwrap();
    fs::write(m.path("theirs/notes"), "x").unwrap();
    for (folder, files) in [("mine", 4), ("theirs", 1)] {
        m.fails(&format!("{RUN} --run-dir {folder}"), 2, &[folder, "exists"]);
        assert_eq!(fs::read_dir(m.path(folder)).unwrap().count(), files);
    }
}

/// A run whose folder was removed ends.
#[test]
fn a_run_whose_folder_is_removed_ends_at_the_next_step() {
    let m = with_images();
    let mut child = background(&m, "--run-dir run --rounds 1 --steps 10000");
    wait_for("a checkpoint", || newest(&m).is_some());
    fs::rename(m.path("run"), m.path("moved")).unwrap();
    // The run has its folder open, so the folder can be moved.
    wait_for("a later checkpoint", || {
        fs::read_dir(m.path("moved/checkpoints")).unwrap().count() == 3
    });
    fs::remove_dir_all(m.path("moved")).or_else(|_| fs::remove_dir_all(m.path("moved"))).unwrap();
    let code = child.wait().unwrap().code();
    assert_eq!(code, Some(1));
    assert!(!m.path("run").exists() && !m.path("moved").exists(), "nothing was made anew");
}

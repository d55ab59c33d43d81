//! Files of a run after signals, kills and a full disk.

#![cfg(unix)]

use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::common::process::{Process, output, wait_for};
use crate::common::{Meristem, command_output, events_in, of_kind, on_a_terminal};

/// A run that would take hours.
const LONG: &str = "train --controller heuristic --host minimal --envs 2 --steps 100000 \
                    --max-batches 2 --batch 32 --run-dir run --trace run.json";

/// Starts a long run and waits until it has completed a step.
fn long_run(m: &Meristem) -> Process {
    started_run(m, m.command().args(LONG.split_whitespace()))
}

fn started_run(m: &Meristem, command: &mut Command) -> Process {
    let child = Process::start(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    let events = m.path("run/events.jsonl");
    wait_for("a step", || {
        std::fs::read_to_string(&events).is_ok_and(|text| text.contains("step_completed"))
    });
    child
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

#[test]
fn ctrl_c_ends_at_a_step_boundary_with_weights_and_summary() {
    let m = Meristem::new();
    let child = long_run(&m);
    signal(&child, "-INT");
    let said = command_output(child.output());
    assert_eq!(said.code, Some(3), "{}", said.stderr);
    assert!(said.stderr.contains("stopping after this step"), "{}", said.stderr);
    assert!(said.stdout.contains("stopped at a step boundary"), "{}", said.stdout);
    assert!(said.stdout.contains("train --resume run "), "{}", said.stdout);
    let summary = m.json("run/summary.json");
    assert_eq!(summary["status"], "interrupted");
    let steps = summary["steps"].as_u64().unwrap();
    assert!((1..100_000).contains(&steps));
    let events = m.events("run");
    assert_eq!(of_kind(&events, "step_completed").len() as u64, 2 * steps);
    assert_eq!(events[events.len() - 1]["status"], "interrupted");
    m.ok("eval --weights run/weights/env-1.safetensors");
    // The trace is complete, too, including its outermost span.
    let trace = m.json("run.json");
    let total = &summary["trace"];
    assert_eq!((&trace["otherData"]["events"], &total["dropped"]), (&total["events"], &0.into()));
    let of = |ph: &str| {
        trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == ph).count()
    };
    assert!(of("B") > 10 && of("B") == of("E"));
}

/// Signals of batch systems and closing terminals stop a run like Ctrl-C.
#[test]
fn other_signals_also_stop_a_run_and_nohup_is_respected() {
    for name in ["-TERM", "-HUP"] {
        let m = Meristem::new();
        // If the test runner ignores SIGHUP, so does the run.
        let mut command = Command::new("env");
        command.args(["--default-signal=HUP", env!("CARGO_BIN_EXE_meristem")]);
        command.args(LONG.split_whitespace()).current_dir(m.folder.path());
        let child = started_run(&m, &mut command);
        signal(&child, name);
        let said = command_output(child.output());
        assert_eq!(said.code, Some(3), "{name}: {}", said.stderr);
        assert_eq!(m.json("run/summary.json")["status"], "interrupted", "{name}");
    }
    let m = Meristem::new();
    let mut shell = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_meristem");
    shell.args(["-c", &format!("trap '' HUP; exec {program} {LONG}")]);
    let child = started_run(&m, shell.current_dir(m.folder.path()));
    signal(&child, "-HUP");
    let steps = || std::fs::read_to_string(m.path("run/events.jsonl")).unwrap().lines().count();
    let before = steps();
    // Without nohup the run would have stopped after two lines.
    wait_for("more steps", || steps() > before + 10);
    signal(&child, "-TERM");
    let said = command_output(child.output());
    assert_eq!(said.code, Some(3), "{}", said.stderr);
}

/// Sends signals as `timeout` does: to the process, and a moment later to its group.
#[test]
fn two_signals_in_quick_succession_are_one_request() {
    let m = Meristem::new();
    let slow = "train --controller none --host large --envs 4 --steps 1000 --max-batches 4 \
                --batch 128 --run-dir run";
    let child = started_run(&m, m.command().args(slow.split_whitespace()));
    signal(&child, "-TERM");
    signal(&child, "-TERM");
    let said = command_output(child.output());
    assert_eq!(said.code, Some(3), "{}", said.stderr);
    assert_eq!(said.stderr.matches("stopping after this step").count(), 1, "{}", said.stderr);
    assert_eq!(m.json("run/summary.json")["status"], "interrupted");
}

/// A line written while bars are drawn would be overwritten at once.
#[test]
fn on_a_terminal_the_bar_shows_the_request_of_ctrl_c() {
    let m = Meristem::new();
    let child = on_a_terminal(&m, "rows 24 cols 80", LONG, Stdio::null());
    wait_for("steps", || {
        let events = std::fs::read_to_string(m.path("run/events.jsonl"));
        events.is_ok_and(|text| text.matches("step_completed").count() > 10)
    });
    // The process of the run, not of `script`.
    let own = Command::new("pgrep").args(["-P", &child.id().to_string()]).output().unwrap();
    let own = String::from_utf8(own.stdout).unwrap();
    assert!(Command::new("kill").args(["-INT", own.trim()]).status().unwrap().success());
    let said = command_output(child.output());
    assert_eq!(said.code, Some(3), "{}", said.stdout);
    assert_eq!(m.json("run/summary.json")["status"], "interrupted");
    let stopping = "stopping after this step; again to stop now";
    // The message is part of the bar, after its position, not a separate line.
    let bar = said.stdout.split(['\r', '\n']).find(|line| line.contains(stopping));
    let bar = bar.unwrap_or_else(|| panic!("{}", said.stdout));
    assert!(bar.contains("/100000  stopping"), "{bar:?}");
}

#[test]
fn a_killed_run_leaves_complete_lines() {
    let m = Meristem::new();
    let mut child = long_run(&m);
    child.kill().unwrap();
    child.wait().unwrap();
    let text = std::fs::read_to_string(m.path("run/events.jsonl")).unwrap();
    // Only the last line may be truncated, without a line break.
    let whole = &text[..=text.rfind('\n').unwrap()];
    for line in whole.lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap();
    }
    assert!(m.path("run/config.toml").is_file() && !m.path("run/summary.json").exists());
}

fn full_disk(m: &Meristem, script: &str, run: &Path) {
    let mut command = Command::new("sh");
    command.args(["-c", script]).current_dir(m.folder.path());
    let said = command_output(output(command.env("MERISTEM", env!("CARGO_BIN_EXE_meristem"))));
    assert_eq!(said.code, Some(1), "{}{}", said.stdout, said.stderr);
    assert!(said.stderr.starts_with("error: cannot write"), "{}", said.stderr);
    assert!(!said.stderr.contains("panicked"), "{}", said.stderr);
    let events = events_in(&run.join("events.jsonl"));
    assert_eq!(events[0]["event"], "run_started");
    assert!(!of_kind(&events, "batch_completed").is_empty());
    let left: Vec<_> = std::fs::read_dir(run).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().ends_with(".part")), "{left:?}");
}

const TALKATIVE: &str = "train --controller heuristic --host minimal --envs 2 --steps 100000 \
                         --max-batches 50 --batch 8 --log-batches --quiet";

/// With a limit of 64 kB per file, writes fail in the middle, as on a full disk.
#[test]
fn a_failed_write_ends_the_run_and_leaves_complete_lines() {
    let m = Meristem::new();
    let script = format!("ulimit -f 128; exec \"$MERISTEM\" {TALKATIVE} --run-dir run");
    full_disk(&m, &script, &m.path("run"));
    // The weights of its last checkpoint are written.
    let checkpoints = std::fs::read_dir(m.path("run/checkpoints")).unwrap();
    let newest = checkpoints.map(|entry| entry.unwrap().path()).max().unwrap();
    let (saved, _) = meristem::nn::safetensors::load(&newest).unwrap();
    for env in 0..2 {
        let weights = format!("run/weights/env-{env}.safetensors");
        m.ok(&format!("eval --weights {weights}"));
        let (state, _) = meristem::nn::safetensors::load(&m.path(&weights)).unwrap();
        for (name, tensor) in state.iter() {
            let of_env = |(key, saved): (&str, &_)| key.ends_with(name) && saved == tensor;
            assert!(saved.iter().any(of_env), "env {env}: {name}");
        }
    }
}

/// The same on a file system of 200 kB, if the test can mount one.
#[test]
fn a_full_disk_ends_the_run_and_leaves_complete_lines() {
    let m = Meristem::new();
    let mount = "mkdir disk && mount -t tmpfs -o size=200k tmpfs disk";
    let probe = ["-Urm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"];
    let probed = Command::new("unshare").args(probe).output();
    if !probed.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no mount namespaces here; the test above stands for it");
        return;
    }
    // The file system disappears with its namespace, so its files are copied first.
    let inner = format!(
        "{mount} && {{ \"$MERISTEM\" {TALKATIVE} --run-dir disk/run; code=$?; \
         cp -r disk/run copy; exit $code; }}"
    );
    full_disk(&m, &format!("exec unshare -Urm sh -c '{inner}'"), &m.path("copy"));
}

/// The name of the current check is shown, and replaced by its line.
#[test]
fn on_a_terminal_the_name_of_the_current_check_is_shown() {
    let m = Meristem::new();
    let program = env!("CARGO_BIN_EXE_meristem");
    // In this environment checks that open a device fail at once.
    let line = format!("MERISTEM_LAUNCH_BLOCKING=perhaps exec {program} check");
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", &line, "/dev/null"]).env("TERM", "xterm");
    let told = command_output(output(command.current_dir(m.folder.path())));
    let at =
        |words: &str| told.stdout.find(words).unwrap_or_else(|| panic!("{words}: {}", told.stdout));
    let each = [at("…     races"), at("FAIL  races"), at("…     dense sum")];
    assert!(each.is_sorted(), "a line comes before the next check begins: {}", told.stdout);
}

/// The bar of the run is visible even if the terminal has fewer rows than there are envs.
#[test]
fn a_small_terminal_shows_the_total_and_the_number_of_other_envs() {
    let m = Meristem::new();
    let line = "train --controller none --host minimal --envs 12 --rounds 2 --steps 2 \
                --max-batches 2 --batch 32 --run-dir run";
    let said = command_output(on_a_terminal(&m, "rows 8 cols 80", line, Stdio::null()).output());
    assert_eq!(said.code, Some(0), "{}", said.stdout);
    for words in ["env 4 ", "7 more training accuracy", "round 2/2 step 1/2 "] {
        assert!(said.stdout.contains(words), "{words}: {}", said.stdout);
    }
    assert!(!said.stdout.contains("env 5 "), "{}", said.stdout);
    // The table at the end fits, too.
    let table = said.stdout.lines().filter(|line| line.starts_with(['│', '┌', '╞', '└']));
    let widths: Vec<usize> = table.map(|line| line.trim_end().chars().count()).collect();
    assert!(widths.len() > 12 && widths.iter().all(|&width| width <= 80), "{widths:?}");
}

//! `train --watch`: the view does not change the run, and the terminal is always restored.

#![cfg(unix)]

use std::fs;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::common::process::{Process, wait_for};
use crate::common::runs::{assert_same, outcome};
use crate::common::{CommandOutput, Meristem, TINY, command_output, on_a_terminal};

const ENTERS: &str = "\u{1b}[?1049h";
const LEAVES: &str = "\u{1b}[?1049l";
const SIZE: &str = "rows 24 cols 80";

/// A run on a terminal, with its output read by a thread, because a full pipe would block it.
struct OnTerminal {
    process: Process,
    output: JoinHandle<Vec<u8>>,
}

impl OnTerminal {
    /// Waits for the end of the run.
    fn ended(mut self) -> CommandOutput {
        let code = self.process.wait().unwrap().code();
        let stdout = String::from_utf8_lossy(&self.output.join().unwrap()).into_owned();
        CommandOutput { code, stdout, stderr: String::new() }
    }

    fn press(&mut self, keys: &[u8]) {
        self.process.stdin.as_mut().unwrap().write_all(keys).unwrap();
    }

    /// Signals the run itself, not the terminal.
    fn signal(&self, name: &str) {
        let id = self.process.id().to_string();
        let own = Command::new("pgrep").args(["-P", &id]).output().unwrap();
        let own = String::from_utf8(own.stdout).unwrap();
        assert!(Command::new("kill").args([name, own.trim()]).status().unwrap().success());
    }
}

/// Starts a run of many steps with a view, and waits until it has completed some steps.
fn long_run(m: &Meristem, more: &str) -> OnTerminal {
    let line = format!(
        "train --watch --controller none --envs 2 --steps 100000 --batch 32 --run-dir run {more}"
    );
    let mut process = on_a_terminal(m, SIZE, &line, Stdio::piped());
    let mut stdout = process.stdout.take().unwrap();
    let output = thread::spawn(move || {
        let mut all = vec![];
        stdout.read_to_end(&mut all).unwrap();
        all
    });
    wait_for("a step", || {
        let events = fs::read_to_string(m.path("run/events.jsonl"));
        events.is_ok_and(|text| text.contains("step_completed"))
    });
    OnTerminal { process, output }
}

/// The output before and after the view, which was opened and closed once.
fn around_the_view(said: &CommandOutput) -> (&str, &str) {
    let (before, rest) = said.stdout.split_once(ENTERS).expect(&said.stdout);
    let (_, after) = rest.rsplit_once(LEAVES).expect(&said.stdout);
    assert!(!after.contains(ENTERS), "{}", said.stdout);
    (before, after)
}

fn status(m: &Meristem) -> serde_json::Value {
    m.json("run/summary.json")["status"].clone()
}

#[test]
fn a_view_does_not_change_the_run() {
    let m = Meristem::new();
    let line = |run: &str| format!("train {TINY} --control-split 0.1 --watch --run-dir {run}");
    let plain = m.ok(&line("plain"));
    assert!(plain.stderr.contains("note: --watch needs a terminal"), "{}", plain.stderr);
    assert!(plain.stdout.contains("step   3/3"), "{}", plain.stdout);
    let viewed = command_output(on_a_terminal(&m, SIZE, &line("viewed"), Stdio::piped()).output());
    assert_eq!(viewed.code, Some(0), "{}", viewed.stdout);
    let (_, after) = around_the_view(&viewed);
    for words in ["2 envs of `", "│ env ┆ control", "test"] {
        assert!(after.contains(words), "{words}: {after}");
    }
    assert_same(&outcome(&m, "viewed"), &outcome(&m, "plain"), "behind a view");
    for flags in ["--quiet", "--json", "--print-config"] {
        m.fails(&format!("train --watch {flags}"), 2, &["cannot be used with"]);
    }
}

#[test]
fn the_run_continues_when_its_view_is_closed() {
    let m = Meristem::new();
    let mut child = long_run(&m, "--host minimal --max-batches 2");
    child.press(b"sq");
    let steps = || fs::read_to_string(m.path("run/events.jsonl")).unwrap().lines().count();
    let before = steps();
    wait_for("more steps", || steps() > before + 20);
    child.signal("-INT");
    let said = child.ended();
    assert_eq!((said.code, status(&m)), (Some(3), "interrupted".into()), "{}", said.stdout);
    let (_, after) = around_the_view(&said);
    for words in [
        "controller none",
        "the run continues without its view; Ctrl-C stops it",
        "/100000",
        "stopped at a step boundary",
    ] {
        assert!(after.contains(words), "{words}: {after}");
    }
}

#[test]
fn signals_and_keys_stop_the_run_and_restore_the_terminal() {
    for signal in [None, Some("-TERM")] {
        let m = Meristem::new();
        let mut child = long_run(&m, "--host minimal --max-batches 2");
        match signal {
            None => child.press(b"\x03"),
            Some(name) => child.signal(name),
        }
        let said = child.ended();
        assert_eq!((said.code, status(&m)), (Some(3), "interrupted".into()), "{}", said.stdout);
        let (_, after) = around_the_view(&said);
        assert!(after.contains("stopped at a step boundary"), "{after}");
    }
    // A second request does not wait for the step, which takes longer than that.
    let m = Meristem::new();
    let mut child = long_run(&m, "--host large --max-batches 8");
    child.press(b"\x03");
    while child.process.try_wait().unwrap().is_none() {
        thread::sleep(Duration::from_millis(100));
        // The run may end between the check and the key.
        let _ = child.process.stdin.as_mut().unwrap().write_all(b"\x03");
    }
    let said = child.ended();
    // On a fast machine the step ends before the second request.
    assert!([Some(130), Some(3)].contains(&said.code), "{:?} {}", said.code, said.stdout);
    around_the_view(&said);
}

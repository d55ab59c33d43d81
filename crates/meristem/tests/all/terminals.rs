//! Terminals: a view restores its terminal at every end, and nothing is drawn on a terminal without
//! cursor movement.

#![cfg(target_os = "linux")]

use std::fs;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::common::process::{Process, wait_for};
use crate::common::{Meristem, TINY, command_output, on_a_terminal};

const ENTERS: &str = "\u{1b}[?1049h";
const LEAVES: &str = "\u{1b}[?1049l";

/// A command on a new terminal. Its shell waits for a line at the end, so the terminal outlives the
/// command.
struct OnTerminal {
    shell: Process,
    /// Process of the command.
    id: String,
    /// Device of the terminal.
    device: String,
    output: Arc<Mutex<Vec<u8>>>,
}

impl OnTerminal {
    /// Starts the command, and waits until its view is open.
    fn start(m: &Meristem, line: &str) -> Self {
        let program = env!("CARGO_BIN_EXE_meristem");
        let child = format!("echo $$ > id.part; mv id.part id; exec {program} {line}");
        let line =
            format!("stty rows 24 cols 80; tty > tty; sh -c '{child}'; echo code=$?; read x");
        let mut command = Command::new("script");
        command.args(["--quiet", "--command", &line, "/dev/null"]);
        command.current_dir(m.folder.path()).env("TERM", "xterm");
        let mut shell = Process::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
        let output = Arc::new(Mutex::new(vec![]));
        let (read, mut stdout) = (output.clone(), shell.stdout.take().unwrap());
        thread::spawn(move || {
            let mut part = [0; 4096];
            while let Ok(length @ 1..) = stdout.read(&mut part) {
                read.lock().unwrap().extend_from_slice(&part[..length]);
            }
        });
        wait_for("the command", || m.path("id").exists());
        let text = |name: &str| fs::read_to_string(m.path(name)).unwrap().trim().to_string();
        let terminal = Self { shell, id: text("id"), device: text("tty"), output };
        terminal.wait_until_view_opened(1);
        terminal
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.output.lock().unwrap()).into_owned()
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.id]).status().unwrap().success());
    }

    fn press(&mut self, keys: &[u8]) {
        self.shell.stdin.as_mut().unwrap().write_all(keys).unwrap();
    }

    /// Whether the terminal has the modes of a shell: lines, echo and signals.
    fn has_shell_modes(&self) -> bool {
        let said = Command::new("stty").args(["-a", "-F", &self.device]).output().unwrap();
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        let words: Vec<&str> = said.split([' ', '\n', ';']).collect();
        ["icanon", "echo", "isig"].iter().all(|mode| words.contains(mode))
    }

    /// Waits until a view has entered the alternate screen `times` times.
    fn wait_until_view_opened(&self, times: usize) {
        wait_for("a view", || {
            self.text().matches(ENTERS).count() == times && !self.has_shell_modes()
        });
    }

    /// Waits until the terminal is restored.
    fn wait_until_restored(&self) {
        wait_for("the terminal", || {
            let text = self.text();
            text.rfind(LEAVES) > text.rfind(ENTERS) && self.has_shell_modes()
        });
    }

    /// Whether the command is stopped.
    fn is_stopped(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.id)).unwrap_or_default();
        stat.rsplit(") ").next().unwrap_or_default().starts_with('T')
    }

    /// Waits for the end of the command, with this exit code.
    fn wait_for_end(&self, code: i32) {
        wait_for("the end", || self.text().contains("code="));
        self.wait_until_restored();
        let text = self.text();
        assert!(text.contains(&format!("code={code}\r")), "{text}");
    }
}

#[test]
fn a_signal_ends_a_view_and_the_terminal_is_restored() {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --run-dir run --quiet"));
    for (signal, code) in [("-TERM", 143), ("-HUP", 129), ("-INT", 130), ("-QUIT", 131)] {
        let _ = fs::remove_file(m.path("id"));
        let view = OnTerminal::start(&m, "watch run");
        view.signal(signal);
        view.wait_for_end(code);
    }
}

#[test]
fn a_suspended_view_restores_the_terminal_until_it_continues() {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --run-dir run --quiet"));
    let mut view = OnTerminal::start(&m, "watch run");
    view.signal("-TSTP");
    view.wait_until_restored();
    wait_for("the stop", || view.is_stopped());
    view.signal("-CONT");
    view.wait_until_view_opened(2);
    // Sent like Ctrl-Z; the shell continues a process that has changed the modes.
    view.press(b"\x1a");
    view.wait_until_restored();
    wait_for("the stop", || view.is_stopped());
    view.signal("-CONT");
    view.wait_until_view_opened(3);
    view.press(b"q");
    view.wait_for_end(0);
}

const LONG_RUN: &str = "train --watch --controller none --host minimal --max-batches 2 --envs 2 \
                        --steps 100000 --batch 32 --run-dir run";

/// SIGQUIT does not wait for a step boundary.
#[test]
fn a_run_ended_by_sigquit_restores_the_terminal() {
    let m = Meristem::new();
    let view = OnTerminal::start(&m, LONG_RUN);
    view.signal("-QUIT");
    view.wait_for_end(131);
    assert!(!m.path("run/summary.json").exists());
    // Without its view, the signal has its default effect.
    let m = Meristem::new();
    let mut view = OnTerminal::start(&m, LONG_RUN);
    view.press(b"q");
    view.wait_until_restored();
    view.signal("-QUIT");
    view.wait_for_end(131);
}

#[test]
fn a_suspended_run_with_a_view_restores_the_terminal() {
    let m = Meristem::new();
    let mut view = OnTerminal::start(&m, LONG_RUN);
    view.signal("-TSTP");
    view.wait_until_restored();
    wait_for("the stop", || view.is_stopped());
    view.signal("-CONT");
    view.wait_until_view_opened(2);
    // Without its view, the process is stopped.
    view.press(b"q");
    view.wait_until_restored();
    view.signal("-TSTP");
    wait_for("the stop", || view.is_stopped());
    view.signal("-CONT");
    view.signal("-TERM");
    view.wait_for_end(3);
}

#[test]
fn a_terminal_without_cursor_movement_shows_lines() {
    let m = Meristem::new();
    let dumb = |line: &str| {
        let line = format!("{line} 2>&1");
        let ended = on_a_terminal(&m, "rows 24 cols 80; export TERM=dumb", &line, Stdio::null());
        let said = command_output(ended.output());
        assert!(!said.stdout.contains('\u{1b}'), "{line}: {}", said.stdout);
        said
    };
    let said = dumb(&format!("train {TINY} --watch --run-dir run"));
    assert_eq!(said.code, Some(0), "{}", said.stdout);
    for words in ["note: --watch needs a terminal", "step   1/3", "step   3/3", "next:"] {
        assert!(said.stdout.contains(words), "{words}: {}", said.stdout);
    }
    let said = dumb("watch run");
    assert_eq!(said.code, Some(2), "{}", said.stdout);
    assert!(said.stdout.contains("TERM is unset or `dumb`"), "{}", said.stdout);
}

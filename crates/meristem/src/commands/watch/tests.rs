//! Tests of screens drawn on a backend in memory.

use std::fmt::Write as _;
use std::fs;

use meristem::train::reading::Follower;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::{Buffer, Cell};
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;
use serde_json::json;
use tempfile::TempDir;

use super::app::{App, Key};
use super::screen::Screen;
use super::{KeyEffect, answer, view};

/// A run of 12 envs with 5 steps, with a module in the last env, whose text has terminal escape
/// sequences.
fn run() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut text = String::new();
    let mut line = |event: serde_json::Value| {
        let mut event = event;
        event["v"] = 1.into();
        event["seq"] = 0.into();
        event["seconds"] = 12.5.into();
        writeln!(text, "{event}").unwrap();
    };
    line(json!({"event": "run_started", "program_version": "0", "dataset": "embedded",
        "train_samples": 1, "control_samples": 1, "test_samples": 1,
        "host": "cnn:channels=2,blocks=3,kernel=3,pools=2", "host_parameters": 10, "envs": 12,
        "rounds": 2, "steps": 30, "batches": 1, "controller": "ppo", "instruction_set": "avx2",
        "threads": 1, "ranks": 1, "exchange": "dense", "seed": 42}));
    for step in 0..5 {
        for env in 0..12 {
            line(json!({"event": "step_completed", "env": env, "round": 0, "step": step,
                "train_loss": 2.0 - 0.1 * f64::from(step), "train_accuracy": 0.5,
                "control_loss": 1.9, "control_accuracy": 0.3 + 0.01 * f64::from(env),
                "host_gradient_norm": null, "host_parameters": 496, "grown_parameters": 1184,
                "slots": [{"slot": "r0c1", "stage": "blending", "blueprint": "conv_\u{1b}[31m",
                    "alpha": 0.25, "contribution": 3.25, "gradient_health": null}],
                "action": "GERMINATE r0c1", "step_seconds": 1.0, "images_per_s": 12345.0,
                "reward": {"gain": 0.0, "rent": 0.0, "potential": 0.0, "fossilize": 0.0,
                    "prune": 0.0, "op": 0.0, "result": 0.0}}));
        }
    }
    line(json!({"event": "governor_rollback", "env": 3, "round": 0, "step": 4, "failure": "spike",
        "train_loss": null, "control_loss": null, "restored_step": null, "pruned": ["r0c1"],
        "penalty": 1.0, "cause_step": null}));
    line(json!({"event": "policy_updated", "round": 0, "transitions": 60, "mean_return": 1.5,
        "ops": [40, 12, 0, 3, 2, 3], "entropies": [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, null],
        "epochs": 4, "stopped_by_kl": false, "skipped": 0, "kl": 0.0123, "clip_fraction": 0.1,
        "policy_objective": 0.0, "value_loss": 0.5, "gradient_norm": 1.0,
        "explained_variance": 0.25, "return_scale": 1.0}));
    fs::create_dir(folder.path().join("weights")).unwrap();
    fs::write(folder.path().join("events.jsonl"), text).unwrap();
    folder
}

fn screen(app: &App, width: u16, height: u16) -> (String, Buffer) {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view::draw(frame, app)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let cells: Vec<&str> = buffer.content().iter().map(|cell| cell.symbol()).collect();
    let rows = cells.chunks(usize::from(width).max(1)).map(|row| row.concat());
    (rows.collect::<Vec<_>>().join("\n"), buffer)
}

fn app(folder: &TempDir, colours: bool) -> App {
    let mut app = App::new(Follower::open(folder.path()).unwrap(), colours);
    assert!(app.look(), "all is read at once");
    app
}

#[test]
fn a_usual_terminal_shows_the_run() {
    let folder = run();
    let (text, buffer) = screen(&app(&folder, true), 80, 24);
    for words in [
        "killed  round 1/2 step 5/30  ppo",
        "12,345 samples/s",
        "envs 1/12",
        "env▼",
        "30.0 %",
        "1,680",
        "▼ conv 3×3, 2 channels",
        "○ r0c0",
        "● r0c1 conv_\\u{1b}[31m",
        "env 0: control accuracy",
        "env 0: training loss",
        "return +1.50  KL 0.0123",
        "WAIT 40 GERMINATE 12",
        "incidents: 1 rollbacks",
        "env 3 step 5: rolled back",
        "q quit",
    ] {
        assert!(text.contains(words), "{words}:\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "a run steers the terminal");
    assert!(buffer.content().iter().any(|cell| cell.fg != Color::Reset));
    let wide = screen(&app(&folder, true), 160, 50).0;
    for words in ["● r0c1 conv_\\u{1b}[31m blending α0.25 +3.2", "op 0.90", "▼ mean, linear"] {
        assert!(wide.contains(words), "{words}:\n{wide}");
    }
}

#[test]
fn without_colours_nothing_is_coloured() {
    let (_, buffer) = screen(&app(&run(), false), 80, 24);
    let coloured = |cell: &&Cell| cell.fg != Color::Reset || cell.bg != Color::Reset;
    assert_eq!(buffer.content().iter().find(coloured), None);
}

#[test]
fn a_small_terminal_shows_the_required_size() {
    let folder = run();
    let words = screen(&app(&folder, true), 20, 5).0;
    let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.starts_with("20×5 is too small: watch needs 60×20"), "{words}");
    for (width, height) in [(1, 1), (0, 0), (60, 20), (59, 20), (60, 19), (300, 5), (20, 300)] {
        screen(&app(&folder, true), width, height);
    }
}

#[test]
fn envs_are_sorted_and_scrolled() {
    let folder = run();
    let mut app = app(&folder, true);
    app.press(Key::Down(usize::MAX));
    assert_eq!(app.chosen, Some(11));
    let text = screen(&app, 80, 24).0;
    assert!(text.contains("envs 12/12") && text.contains("41.0 %"), "{text}");
    app.press(Key::Sort);
    assert_eq!((app.order()[0], app.chosen), (11, Some(11)), "the best is first, the choice stays");
    assert!(screen(&app, 80, 24).0.contains("control▼"));
    app.press(Key::Reverse);
    assert_eq!(app.order()[0], 0);
    app.press(Key::Up(usize::MAX));
    assert_eq!(app.chosen, Some(0));
    for key in [Key::Up(1), Key::HostUp, Key::HostDown, Key::Sort, Key::Sort, Key::Sort] {
        app.press(key);
        screen(&app, 80, 24);
    }
}

#[test]
fn a_resumed_or_removed_run_is_followed() {
    let folder = run();
    let events = folder.path().join("events.jsonl");
    let mut app = app(&folder, true);
    let all = fs::read_to_string(&events).unwrap();
    let ended =
        r#"{"v":1,"seq":1,"seconds":20,"event":"run_ended","status":"failed","error":"no luck",
        "steps":5,"images":1,"wall_seconds":20}"#
            .replace('\n', "");
    fs::write(&events, format!("{all}{ended}\n")).unwrap();
    app.look();
    assert!(screen(&app, 80, 24).0.contains("no luck"));
    // A resumed run truncates its events.
    let begun: Vec<&str> = all.lines().take(3).collect();
    fs::write(&events, begun.join("\n") + "\n").unwrap();
    assert!(!app.look() && app.look());
    assert_eq!(app.history().envs.len(), 2);
    fs::remove_dir_all(folder.path()).unwrap();
    app.look();
    let text = screen(&app, 80, 24).0;
    assert!(text.contains("the folder of the run was removed"), "{text}");
}

#[test]
fn the_view_of_a_training_has_keys_for_the_run() {
    let folder = run();
    let mut app = app(&folder, true);
    app.trains_here = true;
    for width in [60, 80] {
        let text = screen(&app, width, 24).0;
        assert!(text.contains("q close view  Ctrl-C stop run"), "{text}");
    }
    let words = screen(&app, 30, 8).0.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("q closes the view, the run continues"), "{words}");
    app.is_stopping = true;
    let text = screen(&app, 60, 24).0;
    assert!(text.contains("stopping after this step; Ctrl-C again to stop now"), "{text}");
    let key = |code, modifiers| Event::Key(KeyEvent::new(code, modifiers));
    let ctrl_c = key(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(answer(&mut app, &ctrl_c), KeyEffect::StopRun);
    assert_eq!(answer(&mut app, &key(KeyCode::Esc, KeyModifiers::NONE)), KeyEffect::Leave);
    app.trains_here = false;
    assert_eq!(answer(&mut app, &ctrl_c), KeyEffect::Leave);
    assert_eq!(answer(&mut app, &key(KeyCode::Char('s'), KeyModifiers::NONE)), KeyEffect::Stay);
}

#[test]
fn the_view_waits_for_the_first_event() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("weights")).unwrap();
    fs::write(folder.path().join("config.toml"), "").unwrap();
    let app = app(&folder, true);
    assert!(screen(&app, 80, 24).0.contains("waiting for the first event"));
}

/// Started by the test below in a process on a terminal.
#[test]
#[ignore = "needs a terminal"]
fn a_view_that_panics() {
    let _screen = Screen::take(&[]).unwrap();
    panic!("in the middle of a view");
}

#[test]
#[cfg(target_os = "linux")]
fn a_panic_restores_the_terminal_before_its_message() {
    let program = std::env::current_exe().unwrap();
    let test = "commands::watch::tests::a_view_that_panics --exact --ignored --nocapture";
    let line = format!("'{}' {test}; stty -a", program.display());
    let mut command = std::process::Command::new("timeout");
    command.args(["300", "script", "--quiet", "--command", &line, "/dev/null"]);
    let said = command.env("TERM", "xterm").stdin(std::process::Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let place = |words: &str| text.find(words).unwrap_or_else(|| panic!("{words}: {text}"));
    assert!(place("\u{1b}[?1049h") < place("\u{1b}[?1049l"), "{text}");
    assert!(place("\u{1b}[?1049l") < place("in the middle of a view"), "{text}");
    let modes: Vec<&str> = text.split_whitespace().collect();
    assert!(["icanon", "echo", "isig"].iter().all(|mode| modes.contains(mode)), "{text}");
}

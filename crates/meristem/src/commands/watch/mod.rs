//! `meristem watch`: a live view of a run on the terminal. It only reads the run folder, also in
//! `train --watch`.

mod app;
mod charts;
mod host;
mod panels;
mod parts;
mod screen;
#[cfg(test)]
mod tests;
mod training_view;
mod view;

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use meristem::train::reading::{Follower, Overview, RunState, find};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::low_level::emulate_default_handler;

use self::app::{App, Key};
use self::screen::{Screen, suspend};
pub(super) use self::training_view::{TrainingView, restore_screen};
use super::{Outcome, locate};
use crate::environment;
use crate::failure::Failure;
use crate::progress;

/// Interval between two reads of the folder.
const EVERY: Duration = Duration::from_millis(250);

/// Shows a run until the user quits: `named`, or the newest run in `runs`.
pub(crate) fn run(named: Option<&Path>) -> Outcome {
    if console::is_dumb() && io::stdout().is_terminal() {
        return Err(Failure::usage(
            "watch needs a terminal with cursor movement, but TERM is unset or `dumb`",
            "set TERM, such as xterm-256color, or use `meristem runs`",
        ));
    }
    if !has_terminal() {
        return Err(Failure::usage(
            "watch needs a terminal",
            "use `meristem runs` in a script, or `meristem runs report` for a page",
        ));
    }
    let folder = match named {
        Some(folder) => locate(folder),
        None => newest()?,
    };
    let follower = Follower::open(&folder)?;
    let mut app = App::new(follower, environment::has_colours());
    let ending = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];
    let mut screen = Screen::take(&ending).map_err(broken)?;
    let shown = show(&mut screen, &mut app, &|| false);
    drop(screen);
    if let Ending::Signal(signal) = shown.map_err(broken)? {
        // The parent process sees that the signal ended this process.
        emulate_default_handler(signal).map_err(broken)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn broken(error: io::Error) -> Failure {
    Failure::failed(format!("cannot use the terminal: {error}"), "check TERM")
}

/// Whether stdin and stdout are a terminal.
pub(super) fn has_terminal() -> bool {
    io::stdin().is_terminal() && environment::is_drawable(&io::stdout())
}

/// The newest run in `runs`, preferring runs in progress.
fn newest() -> Result<PathBuf, Failure> {
    let rows = find(Path::new("runs"))?.runs.into_iter().map(|run| Overview::read(&run));
    let newest = rows.min_by(|a, b| {
        let key = |row: &Overview| (row.state != RunState::Running, row.age_seconds);
        key(a).partial_cmp(&key(b)).unwrap_or(std::cmp::Ordering::Equal)
    });
    newest.map(|row| row.run).ok_or_else(|| {
        let remedy = "name the folder of a run: `meristem watch RUN`";
        Failure::usage("there are no runs in runs/", remedy)
    })
}

/// Meaning of a key for the view.
#[derive(Clone, Copy, Debug, PartialEq)]
enum KeyEffect {
    /// Continue.
    Stay,
    /// Close the view.
    Leave,
    /// Suspend the process.
    Suspend,
    /// Stop the run that this process trains.
    StopRun,
}

/// Reason for the end of a view.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ending {
    /// The process that trains the run closed the view, because the run has ended or a thread has
    /// panicked.
    Closed,
    /// The user closed the view.
    Left,
    /// This signal ended the view.
    Signal(i32),
}

/// Draws until the user leaves, the view is closed, or a signal ends it.
fn show(screen: &mut Screen, app: &mut App, is_closed: &dyn Fn() -> bool) -> io::Result<Ending> {
    while !is_closed() {
        if let Some(signal) = screen.ending_signal() {
            return Ok(Ending::Signal(signal));
        }
        screen.follow_signals()?;
        let all_read = app.look();
        app.is_stopping = progress::is_stopping();
        screen.terminal.draw(|frame| view::draw(frame, app))?;
        // A long file is read in parts, with keys handled in between.
        let wait = if all_read { EVERY } else { Duration::ZERO };
        if event::poll(wait)? {
            match answer(app, &event::read()?) {
                KeyEffect::Stay => {}
                KeyEffect::Leave => return Ok(Ending::Left),
                KeyEffect::Suspend => suspend()?,
                KeyEffect::StopRun => training_view::stop_run()?,
            }
        }
    }
    Ok(Ending::Closed)
}

/// Handles a terminal event.
fn answer(app: &mut App, event: &Event) -> KeyEffect {
    let Event::Key(key) = event else { return KeyEffect::Stay };
    if key.kind == KeyEventKind::Release {
        return KeyEffect::Stay;
    }
    let ctrl = key.modifiers.contains(KeyModifiers::CONTROL);
    let wanted = match key.code {
        KeyCode::Char('c') if ctrl && app.trains_here => return KeyEffect::StopRun,
        KeyCode::Char('c') if ctrl => return KeyEffect::Leave,
        KeyCode::Char('z') if ctrl => return KeyEffect::Suspend,
        KeyCode::Char('q') | KeyCode::Esc => return KeyEffect::Leave,
        KeyCode::Up | KeyCode::Char('k') => Key::Up(1),
        KeyCode::Down | KeyCode::Char('j') => Key::Down(1),
        KeyCode::PageUp => Key::Up(10),
        KeyCode::PageDown => Key::Down(10),
        KeyCode::Home | KeyCode::Char('g') => Key::Up(usize::MAX),
        KeyCode::End | KeyCode::Char('G') => Key::Down(usize::MAX),
        KeyCode::Char('s') => Key::Sort,
        KeyCode::Char('r') => Key::Reverse,
        KeyCode::Char('[') => Key::HostUp,
        KeyCode::Char(']') => Key::HostDown,
        _ => return KeyEffect::Stay,
    };
    app.press(wanted);
    KeyEffect::Stay
}

//! `meristem watch`: a run on the terminal, while it happens. It reads the folder only.

mod app;
mod charts;
mod host;
mod panels;
mod parts;
#[cfg(test)]
mod tests;
mod view;

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use meristem::train::reading::{Overview, RunState, check_is_run, find};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use self::app::{App, Key};
use super::{Outcome, locate};
use crate::environment;
use crate::failure::Failure;

/// Time between two looks at the folder.
const EVERY: Duration = Duration::from_millis(250);

/// Shows a run until the user leaves: the named one, else the newest in `runs`.
pub(crate) fn run(named: Option<&Path>) -> Outcome {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err(Failure::usage(
            "watch needs a terminal",
            "use `meristem runs` in a script, or `meristem runs report` for a page",
        ));
    }
    let folder = match named {
        Some(folder) => locate(folder),
        None => newest()?,
    };
    check_is_run(&folder)?;
    let broken = |error: io::Error| {
        Failure::failed(format!("cannot use the terminal: {error}"), "check TERM")
    };
    let mut app = App::new(&folder, environment::has_colours());
    let mut terminal = ratatui::try_init().map_err(broken)?;
    let shown = show(&mut terminal, &mut app);
    ratatui::restore();
    shown.map_err(broken)?;
    Ok(ExitCode::SUCCESS)
}

/// The run in `runs` that was started last; one in progress comes first.
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

fn show(terminal: &mut DefaultTerminal, app: &mut App) -> io::Result<()> {
    loop {
        let all_read = app.look();
        terminal.draw(|frame| view::draw(frame, app))?;
        // A long file is read in parts, between which keys are answered.
        let wait = if all_read { EVERY } else { Duration::ZERO };
        if event::poll(wait)? && answer(app, &event::read()?) {
            return Ok(());
        }
    }
}

/// Carries out what a key asks for. True if it is to leave.
fn answer(app: &mut App, event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    if key.kind == KeyEventKind::Release {
        return false;
    }
    let ctrl = key.modifiers.contains(KeyModifiers::CONTROL);
    let wanted = match key.code {
        KeyCode::Char('c') if ctrl => return true,
        KeyCode::Char('q') | KeyCode::Esc => return true,
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
        _ => return false,
    };
    app.press(wanted);
    false
}

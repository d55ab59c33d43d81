//! Layout of the screen.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Wrap};

use super::app::App;
use super::parts::colour;
use super::{charts, host, panels};
use crate::plain::{printable, thousands};
use crate::score;

/// Minimum size of the screen.
const SMALLEST: [u16; 2] = [60, 20];

const KEYS: &str = "↑↓ env  s sort  r reverse  [ ] scroll host  q quit";
/// Keys of `train --watch`.
const KEYS_HERE: &str = "↑↓ s r envs  [ ] host  q close view  Ctrl-C stop run";
const STOPPING: &str = "stopping after this step; Ctrl-C again to stop now";

/// Draws the screen, or only a message on a terminal that is too small.
pub(super) fn draw(frame: &mut Frame<'_>, app: &App) {
    let area = frame.area();
    let [width, height] = SMALLEST;
    if area.width < width || area.height < height {
        let quits = if app.trains_here { "closes the view, the run continues" } else { "quits" };
        let words = format!(
            "{}×{} is too small: watch needs {width}×{height}. q {quits}",
            area.width, area.height
        );
        frame.render_widget(Paragraph::new(words).wrap(Wrap { trim: true }), area);
        return;
    }
    // Of the rows that are left, envs and host get three fifths, and the charts two.
    let rows = [
        Constraint::Length(2),
        Constraint::Fill(3),
        Constraint::Fill(2),
        Constraint::Length(6),
        Constraint::Length(1),
    ];
    let [title, envs, curves, panels, keys] = Layout::vertical(rows).areas(area);
    frame.render_widget(Paragraph::new(heading(app)), title);
    let halves = Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]);
    let [left, right] = halves.areas(envs);
    panels::envs(frame, app, left);
    host::draw(frame, app, right);
    let [left, right] = halves.areas(curves);
    charts::scores(frame, app, left);
    charts::loss(frame, app, right);
    let [left, right] = halves.areas(panels);
    panels::policy(frame, app, left);
    panels::incidents(frame, app, right);
    let (words, how) = match (app.trains_here, app.is_stopping) {
        (_, true) => (STOPPING, Modifier::BOLD),
        (true, false) => (KEYS_HERE, Modifier::DIM),
        (false, false) => (KEYS, Modifier::DIM),
    };
    frame.render_widget(Paragraph::new(words).style(Style::new().add_modifier(how)), keys);
}

fn heading(app: &App) -> Vec<Line<'static>> {
    let history = app.history();
    let name = app
        .follower
        .run
        .path
        .file_name()
        .unwrap_or(app.follower.run.path.as_os_str())
        .to_string_lossy();
    let state =
        if app.follower.is_reading { "reading" } else { app.follower.run.overview.state.name() };
    let mut first = vec![
        Span::styled(printable(&name), Style::new().add_modifier(Modifier::BOLD)),
        Span::raw(format!("  {state}  ")),
    ];
    let Some(started) = &history.started else {
        let words = app.follower.problem.clone().unwrap_or("waiting for the first event".into());
        return vec![Line::from(first), Line::from(printable(&words))];
    };
    let newest = history.envs.values().filter_map(|env| env.last.as_ref()).map(|step| step.step);
    let step = newest.max().map_or(0, |step| step.saturating_add(1));
    first.push(Span::raw(printable(&format!(
        "round {}/{} step {step}/{}  {}",
        history.round.saturating_add(1),
        started.rounds,
        started.steps,
        started.controller
    ))));
    if let Some(problem) = &app.follower.problem {
        let style = colour(app, Color::Red).add_modifier(Modifier::BOLD);
        return vec![Line::from(first), Line::styled(printable(problem), style)];
    }
    let (kind, speed) = (history.score_kind(), history.images_per_s.last());
    let mut second = vec![
        format!("control {}", score::named(kind, history.score.last())),
        format!("bare {}", score::named(kind, history.twin_score.last())),
        speed.map_or("– samples/s".into(), |n| format!("{} samples/s", thousands(n as u64))),
        format!("{} s", thousands(history.seconds.max(0.0) as u64)),
    ];
    if let Some((_, Some(error))) = &history.ended {
        second = vec![error.clone()];
    }
    vec![Line::from(first), Line::from(printable(&second.join("  ")))]
}

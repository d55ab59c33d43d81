//! The table of envs, and the panels of policy, incidents and memory.

use meristem::control::{ActionOp, HEADS};
use meristem::train::reading::RunHistory;
use meristem::train::settings::ControllerKind;
use ratatui::Frame;
use ratatui::layout::{Constraint, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Row, Table, TableState, Wrap};

use super::app::{App, Column};
use super::parts::panel;
use crate::page::skipped;
use crate::plain::{megabytes, printable, thousands};
use crate::score;

/// Table of all envs, scrolled to the chosen one.
pub(super) fn envs(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let order = app.order();
    let at = order.iter().position(|number| Some(*number) == app.chosen);
    let place = at.map_or(String::new(), |at| format!(" {}/{}", at + 1, order.len()));
    let inner = panel(frame, area, format!("envs{place}"));
    let mark = |column: Column, name: &str| match (column == app.sort, app.reversed) {
        (false, _) => name.to_string(),
        (true, false) => format!("{name}▼"),
        (true, true) => format!("{name}▲"),
    };
    let header = Row::new([
        mark(Column::Env, "env"),
        mark(Column::Control, "control"),
        mark(Column::Loss, "loss"),
        mark(Column::Parameters, "params"),
        "action".into(),
    ]);
    let rows = order.iter().map(|number| row(*number, app.history()));
    let widths = [
        Constraint::Length(4),
        Constraint::Length(8),
        Constraint::Length(6),
        Constraint::Length(8),
        Constraint::Fill(1),
    ];
    let table = Table::new(rows, widths)
        .header(header.style(Style::new().add_modifier(Modifier::BOLD)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::new().with_selected(at);
    frame.render_stateful_widget(table, inner, &mut state);
}

fn row(number: usize, history: &RunHistory) -> Row<'static> {
    let (env, kind) = (&history.envs[&number], history.score_kind());
    let Some(last) = &env.last else { return Row::new([number.to_string()]) };
    let ended = history.members.of_env(number).and_then(|member| member.ended.as_ref());
    let action = match ended {
        Some((_, reason)) => format!("ended: {reason}"),
        None => last.action.clone(),
    };
    Row::new([
        number.to_string(),
        score::named(kind, last.control_score),
        format!("{:.3}", last.train_loss),
        env.parameters.last().map_or("–".into(), |count| thousands(count as u64)),
        printable(&action),
    ])
}

/// Actions of the policy in its newest round, and figures of its update.
pub(super) fn policy(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let inner = panel(frame, area, "policy".into());
    let Some(last) = &app.history().policy.last else {
        let started = app.history().started.as_ref();
        let learns = started.is_some_and(|started| started.controller == ControllerKind::Ppo);
        let words = if learns { "learns at the end of a round" } else { "no policy learns" };
        return frame.render_widget(Paragraph::new(words), inner);
    };
    let ops = ActionOp::ALL.iter().zip(last.ops).filter(|(_, count)| *count > 0);
    let ops: Vec<String> = ops.map(|(op, count)| format!("{op} {count}")).collect();
    let heads = HEADS.iter().zip(last.entropies);
    let heads: Vec<String> = heads.map(|(head, h)| format!("{} {h:.2}", head.name)).collect();
    let lines = vec![
        Line::from(format!(
            "return {:+.2}  KL {:.4}  explained {:.2}",
            last.mean_return, last.kl, last.explained_variance
        )),
        Line::from(ops.join(" ")),
        Line::from(format!("entropies: {}", heads.join(" "))),
    ];
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: true }), inner);
}

/// Rollbacks and anomalies, newest first; for an ended run, its memory by owner.
pub(super) fn incidents(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let history = app.history();
    let inner = panel(frame, area, format!("incidents: {} rollbacks", history.rollbacks));
    let mut lines = vec![];
    lines.extend(skipped(app.follower.run.skipped));
    lines.extend(history.incidents.iter().rev().take(4).map(|incident| {
        format!("env {} step {}: {}", incident.env, incident.step.saturating_add(1), incident.what)
    }));
    match &app.follower.run.summary {
        Some(summary) => {
            let owners = summary.memory.owners.iter().filter(|(_, memory)| memory.peak > 0);
            let owners: Vec<String> =
                owners.map(|(name, memory)| format!("{name} {}", megabytes(memory.peak))).collect();
            lines.push(format!("peak memory: {}", owners.join(", ")));
        }
        None => lines.push("memory by owner: available after the run".into()),
    }
    let lines: Vec<Line<'_>> = lines.iter().map(|line| Line::from(printable(line))).collect();
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: true }), inner);
}

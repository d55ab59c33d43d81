//! Panel of the chosen env's host: blocks from the image to the classes, and slots.

use meristem::export::drawing::{HostPart, PartKind, host_parts, stage_hue};
use meristem::grow::HostSpec;
use meristem::train::events::SlotState;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use super::app::App;
use super::parts::{colour, panel};
use crate::colours::terminal;
use crate::plain::printable;

pub(super) fn draw(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let Some((number, env)) = app.env() else {
        panel(frame, area, "host".into());
        return;
    };
    let slots = env.last.as_ref().map_or(&[][..], |step| &step.slots);
    let host = app.history().started.as_ref().and_then(|started| started.host.known());
    let lines = match host {
        Some(host) => of_host(app, &host, slots),
        // The description of the host is unknown to this version: draw only its slots.
        _ => slots.iter().map(|state| slot(app, &state.slot, Some(state))).collect(),
    };
    let rows = usize::from(area.height.saturating_sub(2));
    let from = app.host_from.min(lines.len().saturating_sub(rows));
    let more = if lines.len() > rows { "  ([ ] scroll)" } else { "" };
    let inner = panel(frame, area, format!("env {number}: host{more}"));
    let shown: Vec<Line<'_>> = lines.into_iter().skip(from).take(rows).collect();
    frame.render_widget(Paragraph::new(shown), inner);
}

fn of_host(app: &App, host: &HostSpec, slots: &[SlotState]) -> Vec<Line<'static>> {
    let line = |part: HostPart<'_>| {
        let mut line = match part.kind {
            PartKind::Layers(lines) => Line::from(format!("▼ {}", lines.join(", "))),
            PartKind::Slot(name) => {
                let state = slots.iter().find(|state| state.slot == name.as_str());
                slot(app, name.as_str(), state)
            }
        };
        line.spans.insert(0, "│ ".repeat(part.depth).into());
        line
    };
    host_parts(host).into_iter().map(line).collect()
}

/// A slot and its module.
fn slot(app: &App, name: &str, state: Option<&SlotState>) -> Line<'static> {
    let Some(state) = state else { return Line::from(format!(" ○ {name}")) };
    let module = state.blueprint.as_deref().unwrap_or("");
    let mark = if state.blueprint.is_some() { '●' } else { '○' };
    let contribution = state.contribution.map_or(String::new(), |pp| format!(" {pp:+.1}"));
    let alpha = state.blueprint.as_ref().map_or(String::new(), |_| format!(" α{:.2}", state.alpha));
    let text = format!(" {mark} {name} {module} {}{alpha}{contribution}", state.stage);
    let hue = state.stage.known().and_then(stage_hue);
    let style = hue.map_or(Style::new(), |hue| colour(app, terminal(hue)));
    Line::styled(printable(&text), style)
}

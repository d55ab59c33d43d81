//! The host of the chosen env: its blocks from the image to the classes, and their slots.

use meristem::grow::{HostSpec, SlotName};
use meristem::train::events::SlotState;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::Color;
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use super::app::App;
use super::parts::{colour, panel};
use crate::plain::printable;

pub(super) fn draw(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let Some((number, env)) = app.env() else {
        panel(frame, area, "host".into());
        return;
    };
    let slots = env.last.as_ref().map_or(&[][..], |step| &step.slots);
    let host = app.history().started.as_ref().map(|started| started.host.parse::<HostSpec>());
    let lines = match host {
        Some(Ok(host)) => of_host(app, &host, slots),
        // A host that this version does not know: its slots, as they are listed.
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
    let mut lines = vec![];
    let line = |name: SlotName| {
        let name = name.to_string();
        slot(app, &name, slots.iter().find(|state| state.slot == name))
    };
    for block in 0..host.blocks {
        let (kernel, channels) = (host.kernel, host.block_channels(block));
        lines.push(Line::from(format!("▼ conv {kernel}×{kernel}, {channels} channels")));
        lines.push(line(SlotName::before_pool(block)));
        if block < host.pools {
            lines.push(Line::from("▼ pool 2×2"));
        }
        lines.push(line(SlotName::after_pool(block)));
    }
    lines.push(Line::from("▼ mean, linear"));
    lines
}

/// A slot with its module: filled where there is one.
fn slot(app: &App, name: &str, state: Option<&SlotState>) -> Line<'static> {
    let Some(state) = state else { return Line::from(format!(" ○ {name}")) };
    let module = state.blueprint.as_deref().unwrap_or("");
    let mark = if state.blueprint.is_some() { '●' } else { '○' };
    let worth = state.contribution.map_or(String::new(), |pp| format!(" {pp:+.1}"));
    let alpha = state.blueprint.as_ref().map_or(String::new(), |_| format!(" α{:.2}", state.alpha));
    let text = format!(" {mark} {name} {module} {}{alpha}{worth}", state.stage);
    let shade = match state.stage.as_str() {
        "germinated" | "blending" => Color::Yellow,
        "training" => Color::Cyan,
        "holding" => Color::Magenta,
        "fossilized" => Color::Green,
        _ => Color::Red,
    };
    Line::styled(printable(&text), colour(app, shade))
}

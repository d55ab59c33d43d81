//! Frames and colours of all panels.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use ratatui::widgets::Block;

use super::app::App;
use crate::plain::printable;

/// Draws a framed panel. Returns the area inside.
pub(super) fn panel(frame: &mut Frame<'_>, area: Rect, title: String) -> Rect {
    let block = Block::bordered().title(printable(&title));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    inner
}

/// A style with `colour`, unless colours are off.
pub(super) fn colour(app: &App, colour: Color) -> Style {
    if app.colours { Style::new().fg(colour) } else { Style::new() }
}

//! Curves of the chosen env.

use meristem::train::reading::Curve;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::Color;
use ratatui::symbols::Marker;
use ratatui::text::Line;
use ratatui::widgets::{Axis, Chart, Dataset, GraphType};

use super::app::App;
use super::parts::{colour, panel};
use crate::score;

/// Control score of the env and of its bare twin; accuracies in percent.
pub(super) fn scores(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let Some((number, env)) = app.env() else {
        panel(frame, area, "score".into());
        return;
    };
    let kind = app.history().score_kind();
    let title = format!("env {number}: {}  (· bare)", score::axes(Some(kind))[0]);
    let curves = [(&env.control_score, Color::Green), (&env.twin_score, Color::Blue)];
    draw(frame, app, area, Curves { title, curves, factor: score::factor(kind) });
}

/// Training and control loss of the env.
pub(super) fn loss(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let Some((number, env)) = app.env() else {
        panel(frame, area, "loss".into());
        return;
    };
    let title = format!("env {number}: training loss  (· control)");
    let curves = [(&env.train_loss, Color::Yellow), (&env.control_loss, Color::Magenta)];
    draw(frame, app, area, Curves { title, curves, factor: 1.0 });
}

/// Two curves: the first as a line, the second as dots, so that they differ without colours.
struct Curves<'a> {
    title: String,
    curves: [(&'a Curve, Color); 2],
    factor: f64,
}

fn draw(frame: &mut Frame<'_>, app: &App, area: Rect, what: Curves<'_>) {
    let Curves { title, curves, factor } = what;
    let inner = panel(frame, area, title);
    let scaled = curves.map(|(curve, _)| -> Vec<(f64, f64)> {
        curve.points().into_iter().map(|[x, y]| (x + 1.0, factor * y)).collect()
    });
    let points = || scaled.iter().flatten();
    let Some(first) = points().next() else { return };
    let start = (first.1, first.1, first.0);
    let (least, most, last) = points()
        .fold(start, |(least, most, last), (x, y)| (least.min(*y), most.max(*y), last.max(*x)));
    let margin = (0.05 * (most - least)).max(1e-3);
    let bounds = [least - margin, most + margin];
    let marks = [Marker::Braille, Marker::Dot];
    let types = [GraphType::Line, GraphType::Scatter];
    let data = scaled.iter().zip(curves).zip(marks).zip(types);
    let data = data.map(|(((points, (_, shade)), mark), kind)| {
        Dataset::default().marker(mark).graph_type(kind).style(colour(app, shade)).data(points)
    });
    let labels = |[a, b]: [f64; 2], decimals: usize| {
        [a, b].map(|value| Line::from(format!("{value:.decimals$}")))
    };
    let x = [1.0, last.max(2.0)];
    let chart = Chart::new(data.collect())
        .x_axis(Axis::default().bounds(x).labels(labels(x, 0)))
        .y_axis(Axis::default().bounds(bounds).labels(labels([least, most], 2)));
    frame.render_widget(chart, inner);
}

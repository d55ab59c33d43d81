//! Plot of a study: score against parameters on the left and against compute on the right, with
//! a small dot for each seed and a large dot with error bars for each contender.

use meristem::train::statistics::Spread;
use meristem::train::study::{ContenderReport, Study, StudyRun};
use meristem::train::summary::Status;

use super::axis::{Axis, Field, axes};
use super::{Anchor, Colour, Picture, Shape, series_colour, short, text};
use crate::score;

/// Size of the plot, in pixels.
const SIZE: [f64; 2] = [1200.0, 520.0];

/// The panels, from left to right; the legend is on the right.
const PANELS: [Panel; 2] = [
    Panel {
        field: [70.0, 68.0, 470.0, 455.0],
        label: "parameters of host and modules",
        of_run: |run| run.parameters,
        of_all: |report| report.parameters,
    },
    Panel {
        field: [540.0, 68.0, 940.0, 455.0],
        label: "compute of an env, GFLOP",
        of_run: |run| run.flops / 1e9,
        of_all: |report| {
            report.flops.map(|Spread { count, mean, std, ci95 }| {
                let giga = |half: Option<f64>| half.map(|half| half / 1e9);
                Spread { count, mean: mean / 1e9, std: giga(std), ci95: giga(ci95) }
            })
        },
    },
];

/// Part of the plot with a separate horizontal axis.
struct Panel {
    /// Left, top, right and bottom.
    field: Field,
    /// Label of the horizontal axis.
    label: &'static str,
    /// Horizontal value of a run.
    of_run: fn(&StudyRun) -> f64,
    /// Horizontal value of a contender.
    of_all: fn(&ContenderReport) -> Option<Spread>,
}

/// Maximum length of a name in the legend, in characters.
const NAME: usize = 24;

/// The plot of a study with at least one complete run.
pub(crate) fn study(study: &Study) -> Picture {
    let [left, top, _, bottom] = PANELS[0].field;
    let right = PANELS[PANELS.len() - 1].field[2];
    let seeds = || study.contenders.iter().flat_map(|report| &report.runs);
    let ends = |value: fn(&ContenderReport) -> Option<Spread>| {
        let spreads = study.contenders.iter().filter_map(value);
        spreads.flat_map(|s| [-1.0, 1.0].map(|side| s.mean + side * s.ci95.unwrap_or(0.0)))
    };
    let kind = study.task.score();
    let factor = score::factor(kind);
    let y = seeds().map(|run| run.test_score).chain(ends(|report| report.test_score));
    let y = Axis::around(y.map(|score| factor * score), [bottom, top]);
    let mut shapes = vec![text([left, 22.0], Anchor::Start, title(study))];
    for panel in &PANELS {
        let sides = [panel.field[0], panel.field[2]];
        let x = Axis::around(seeds().map(panel.of_run).chain(ends(panel.of_all)), sides);
        shapes.extend(axes([&x, &y], panel.field, [panel.label, score::axes(Some(kind))[1]]));
        for (place, report) in study.contenders.iter().enumerate() {
            contender(
                report,
                panel,
                (series_colour(place), Scales { x: &x, y: &y, factor }),
                &mut shapes,
            );
        }
    }
    for (place, report) in study.contenders.iter().enumerate() {
        let (colour, height) = (series_colour(place), top + 12.0 + 22.0 * place as f64);
        shapes.push(Shape::Disc { centre: [right + 22.0, height], radius: 6.0, colour });
        shapes.push(text([right + 36.0, height], Anchor::Start, name(report)));
    }
    Picture { size: SIZE, shapes }
}

/// Axes of a panel.
#[derive(Clone, Copy)]
struct Scales<'a> {
    x: &'a Axis,
    y: &'a Axis,
    /// Factor of scores on the vertical axis.
    factor: f64,
}

fn contender(
    report: &ContenderReport,
    panel: &Panel,
    (colour, Scales { x, y, factor }): (Colour, Scales<'_>),
    to: &mut Vec<Shape>,
) {
    // The dots of single seeds are pale.
    let pale = colour.pale();
    to.extend(report.runs.iter().map(|run| Shape::Disc {
        centre: [x.at((panel.of_run)(run)), y.at(factor * run.test_score)],
        radius: 3.0,
        colour: pale,
    }));
    let Some((across, score)) = (panel.of_all)(report).zip(report.test_score) else { return };
    let centre = [x.at(across.mean), y.at(factor * score.mean)];
    if let Some((wide, high)) = across.ci95.zip(score.ci95) {
        let [left, right] = [-wide, wide].map(|d| [x.at(across.mean + d), centre[1]]);
        let [below, above] = [-high, high].map(|d| [centre[0], y.at(factor * (score.mean + d))]);
        to.push(Shape::Line { from: left, to: right, colour });
        to.push(Shape::Line { from: below, to: above, colour });
    }
    to.push(Shape::Disc { centre, radius: 6.0, colour });
}

/// A name for the legend, without the default file name of a policy.
fn name(report: &ContenderReport) -> String {
    let name = report.contender.to_string();
    short(name.trim_end_matches(".safetensors").trim_end_matches("/policy"), NAME)
}

/// Title of the plot.
fn title(study: &Study) -> String {
    let dataset = study.dataset.as_ref().map_or("", |dataset| &dataset.name);
    let stopped = if study.status == Status::Interrupted { ", stopped early" } else { "" };
    format!(
        "{} on {dataset}, {} steps; mean ± 95 % interval over seeds{stopped}",
        study.host, study.steps
    )
}

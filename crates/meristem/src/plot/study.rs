//! Plot of a study: accuracy against parameters, with a small dot for each seed and a large dot
//! with error bars for each contender.

use meristem::train::statistics::Spread;
use meristem::train::study::{ContenderReport, Study};
use meristem::train::summary::Status;

use super::axis::{Axis, Field, axes};
use super::{Anchor, Colour, Picture, SIZE, Shape, series_colour, short, text};

/// Left, top, right and bottom of the plot area; the legend is to its right.
const FIELD: Field = [70.0, 68.0, 650.0, 455.0];

/// Maximum length of a name in the legend, in characters.
const NAME: usize = 24;

/// The plot of a study with at least one complete run.
pub(crate) fn study(study: &Study) -> Picture {
    let [left, top, right, bottom] = FIELD;
    let seeds = || study.contenders.iter().flat_map(|report| &report.runs);
    let ends = |of: fn(&ContenderReport) -> Option<Spread>| {
        let spreads = study.contenders.iter().filter_map(of);
        spreads.flat_map(|s| [-1.0, 1.0].map(|side| s.mean + side * s.std.unwrap_or(0.0)))
    };
    let x = seeds().map(|run| run.parameters).chain(ends(|report| report.parameters));
    let y = seeds().map(|run| run.test_accuracy).chain(ends(|report| report.test_accuracy));
    let x = Axis::around(x, [left, right]);
    let y = Axis::around(y.map(|share| 100.0 * share), [bottom, top]);
    let labels = ["parameters of host and modules", "test accuracy, %"];
    let mut shapes = axes([&x, &y], FIELD, labels);
    shapes.push(text([left, 22.0], Anchor::Start, title(study)));
    for (place, report) in study.contenders.iter().enumerate() {
        let colour = series_colour(place);
        let height = top + 12.0 + 22.0 * place as f64;
        shapes.push(Shape::Disc { centre: [right + 22.0, height], radius: 6.0, colour });
        shapes.push(text([right + 36.0, height], Anchor::Start, name(report)));
        contender(report, colour, [&x, &y], &mut shapes);
    }
    Picture { size: SIZE, shapes }
}

fn contender(report: &ContenderReport, colour: Colour, [x, y]: [&Axis; 2], to: &mut Vec<Shape>) {
    // The dots of single seeds are paler.
    let pale = colour.pale();
    to.extend(report.runs.iter().map(|run| Shape::Disc {
        centre: [x.at(run.parameters), y.at(100.0 * run.test_accuracy)],
        radius: 3.0,
        colour: pale,
    }));
    let Some((parameters, accuracy)) = report.parameters.zip(report.test_accuracy) else { return };
    let centre = [x.at(parameters.mean), y.at(100.0 * accuracy.mean)];
    if let Some((wide, high)) = parameters.std.zip(accuracy.std) {
        let [left, right] = [-wide, wide].map(|d| [x.at(parameters.mean + d), centre[1]]);
        let [below, above] = [-high, high].map(|d| [centre[0], y.at(100.0 * (accuracy.mean + d))]);
        to.push(Shape::Line { from: left, to: right, colour });
        to.push(Shape::Line { from: below, to: above, colour });
    }
    to.push(Shape::Disc { centre, radius: 6.0, colour });
}

/// A name that fits the legend, without the usual file name of a policy.
fn name(report: &ContenderReport) -> String {
    let name = report.contender.to_string();
    short(name.trim_end_matches(".safetensors").trim_end_matches("/policy"), NAME)
}

/// Title of the plot.
fn title(study: &Study) -> String {
    let dataset = study.dataset.as_ref().map_or("", |dataset| &dataset.name);
    let stopped = if study.status == Status::Interrupted { ", stopped early" } else { "" };
    format!(
        "{} on {dataset}, {} steps; mean ± deviation over seeds{stopped}",
        study.host, study.steps
    )
}

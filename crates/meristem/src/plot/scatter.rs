//! Plots of comparisons: score against cost, with a panel for each kind of cost, a small dot for
//! each seed, and a large dot with error bars for each contender.

use meristem::nn::ScoreKind;
use meristem::train::growth_bench::TaskReport;
use meristem::train::statistics::Spread;
use meristem::train::study::Study;
use meristem::train::summary::Status;

use super::axis::{Axis, Field, axes};
use super::{Anchor, Colour, Picture, Shape, series_colour, short, text};
use crate::score;

/// Height of a plot, and vertical limits of its panels, in pixels.
const HEIGHT: f64 = 520.0;
const TOP: f64 = 68.0;
const BOTTOM: f64 = 455.0;

/// Left end of the first panel, width of a panel, distance between two panels, and width of the
/// legend, in pixels.
const LEFT: f64 = 70.0;
const WIDTH: f64 = 400.0;
const GAP: f64 = 70.0;
const LEGEND: f64 = 260.0;

/// Maximum length of a name in the legend, in characters.
const NAME: usize = 24;

/// Scores and costs of some contenders.
struct Scatter {
    title: String,
    score: ScoreKind,
    /// Labels of the horizontal axes, one for each panel.
    costs: Vec<&'static str>,
    contenders: Vec<Dots>,
}

/// Scores and costs of one contender.
struct Dots {
    name: String,
    /// Score and cost in each panel, for each seed.
    seeds: Vec<(f64, Vec<f64>)>,
}

impl Dots {
    /// The spread of the score, and of each cost; `None` without a seed.
    fn spreads(&self) -> Option<(Spread, Vec<Spread>)> {
        let scores: Vec<f64> = self.seeds.iter().map(|(score, _)| *score).collect();
        let panels = self.seeds.first().map_or(0, |(_, costs)| costs.len());
        let cost = |panel: usize| {
            let costs: Vec<f64> = self.seeds.iter().map(|(_, costs)| costs[panel]).collect();
            Spread::from_values(&costs)
        };
        Some((Spread::from_values(&scores)?, (0..panels).map(cost).collect::<Option<_>>()?))
    }
}

/// The plot of a study with at least one complete run.
pub(crate) fn study(study: &Study) -> Picture {
    let contenders = study.contenders.iter().map(|report| {
        let seeds = report.runs.iter();
        let seeds = seeds.map(|run| (run.test_score, vec![run.parameters, run.flops / 1e9]));
        let name = report.contender.to_string();
        // Without the default file name of a policy.
        let name = name.trim_end_matches(".safetensors").trim_end_matches("/policy");
        Dots { name: name.into(), seeds: seeds.collect() }
    });
    let dataset = study.dataset.as_ref().map_or("", |dataset| &dataset.name);
    let stopped = if study.status == Status::Interrupted { ", stopped early" } else { "" };
    scatter(&Scatter {
        title: format!(
            "{} on {dataset}, {} steps; mean ± 95 % interval over seeds{stopped}",
            study.host, study.steps
        ),
        score: study.task.score(),
        costs: vec!["parameters of host and modules", "compute of an env, GFLOP"],
        contenders: contenders.collect(),
    })
}

/// The plot of a task of the growth bench with at least one complete run of its table.
pub(crate) fn growth(task: &TaskReport) -> Picture {
    let contenders = task.methods.iter().map(|method| {
        let costs = |run: &meristem::train::growth_bench::SeedReport| {
            vec![run.parameters, run.macs / 1e9, run.seconds]
        };
        let seeds = method.runs.iter().map(|run| (run.test_score, costs(run)));
        Dots { name: method.method.clone(), seeds: seeds.collect() }
    });
    scatter(&Scatter {
        title: format!(
            "{}: {}, {} steps; mean ± 95 % interval over seeds",
            task.task, task.host, task.steps
        ),
        score: task.score,
        costs: vec!["parameters", "training compute, GMAC", "seconds"],
        contenders: contenders.collect(),
    })
}

fn scatter(of: &Scatter) -> Picture {
    let factor = score::factor(of.score);
    let spreads: Vec<_> = of.contenders.iter().map(Dots::spreads).collect();
    let ends = |s: &Spread| [-1.0, 1.0].map(|side| s.mean + side * s.ci95.unwrap_or(0.0));
    let seeds = || of.contenders.iter().flat_map(|dots| &dots.seeds);
    let means = || spreads.iter().flatten();
    let y = seeds().map(|(score, _)| *score).chain(means().flat_map(|(score, _)| ends(score)));
    let y = Axis::around(y.map(|score| factor * score), [BOTTOM, TOP]);
    let mut shapes = vec![text([LEFT, 22.0], Anchor::Start, of.title.clone())];
    for (panel, label) in of.costs.iter().enumerate() {
        let left = LEFT + panel as f64 * (WIDTH + GAP);
        let field: Field = [left, TOP, left + WIDTH, BOTTOM];
        let x = seeds().map(|(_, costs)| costs[panel]);
        let x = x.chain(means().flat_map(|(_, costs)| ends(&costs[panel])));
        let x = Axis::around(x, [field[0], field[2]]);
        shapes.extend(axes([&x, &y], field, [label, score::axes(Some(of.score))[1]]));
        let scales = Scales { x: &x, y: &y, factor };
        for (place, (dots, means)) in of.contenders.iter().zip(&spreads).enumerate() {
            let colour = series_colour(place);
            // The dots of single seeds are pale.
            shapes.extend(dots.seeds.iter().map(|(score, costs)| Shape::Disc {
                centre: [x.at(costs[panel]), y.at(factor * score)],
                radius: 3.0,
                colour: colour.pale(),
            }));
            if let Some((score, costs)) = means {
                mean(score, &costs[panel], (colour, scales), &mut shapes);
            }
        }
    }
    let right = LEFT + of.costs.len() as f64 * (WIDTH + GAP) - GAP;
    for (place, dots) in of.contenders.iter().enumerate() {
        let (colour, height) = (series_colour(place), TOP + 12.0 + 22.0 * place as f64);
        shapes.push(Shape::Disc { centre: [right + 22.0, height], radius: 6.0, colour });
        shapes.push(text([right + 36.0, height], Anchor::Start, short(&dots.name, NAME)));
    }
    Picture { size: [right + LEGEND, HEIGHT], shapes }
}

/// Axes of a panel.
#[derive(Clone, Copy)]
struct Scales<'a> {
    x: &'a Axis,
    y: &'a Axis,
    /// Factor of scores on the vertical axis.
    factor: f64,
}

/// A large dot with error bars.
fn mean(
    score: &Spread,
    across: &Spread,
    (colour, Scales { x, y, factor }): (Colour, Scales<'_>),
    to: &mut Vec<Shape>,
) {
    let centre = [x.at(across.mean), y.at(factor * score.mean)];
    if let Some((wide, high)) = across.ci95.zip(score.ci95) {
        let [left, right] = [-wide, wide].map(|d| [x.at(across.mean + d), centre[1]]);
        let [below, above] = [-high, high].map(|d| [centre[0], y.at(factor * (score.mean + d))]);
        to.push(Shape::Line { from: left, to: right, colour });
        to.push(Shape::Line { from: below, to: above, colour });
    }
    to.push(Shape::Disc { centre, radius: 6.0, colour });
}

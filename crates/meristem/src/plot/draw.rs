//! Layout of a plot: axes, a small dot for each seed, a large dot with error bars for each
//! contender.

use meristem::train::statistics::Spread;
use meristem::train::study::{ContenderReport, Study};

use super::{Anchor, Colour, SIZE, Shape, title};
use crate::plain;

const INK: Colour = [60, 60, 60];
const GRID: Colour = [225, 225, 225];

/// Colours that everyone can distinguish (Okabe and Ito, 2008), reused for more contenders.
const COLOURS: [Colour; 7] = [
    [0, 114, 178],
    [230, 159, 0],
    [0, 158, 115],
    [204, 121, 167],
    [213, 94, 0],
    [86, 180, 233],
    [110, 110, 110],
];

/// Left, top, right and bottom of the plot area; the legend is to its right.
const FIELD: [f64; 4] = [70.0, 68.0, 650.0, 455.0];

/// Maximum length of a name in the legend, in characters.
const NAME: usize = 24;

/// Mapping from a range of values to pixels.
#[derive(Clone, Copy, Debug)]
struct Axis {
    values: [f64; 2],
    pixels: [f64; 2],
}

impl Axis {
    /// An axis for all values, with a margin on both sides, which is larger if all are equal.
    fn around(values: impl Iterator<Item = f64>, pixels: [f64; 2]) -> Self {
        let ends = (f64::INFINITY, f64::NEG_INFINITY);
        let (least, most) = values.fold(ends, |(least, most), x| (least.min(x), most.max(x)));
        let room = (0.08 * (most - least)).max(0.002 * most.abs()).max(0.01);
        Self { values: [least - room, most + room], pixels }
    }

    fn at(&self, value: f64) -> f64 {
        let ([a, b], [from, to]) = (self.values, self.pixels);
        from + (value - a) / (b - a) * (to - from)
    }

    /// About five round ticks: multiples of 1, 2 or 5 times a power of ten.
    fn ticks(&self) -> Vec<f64> {
        let [least, most] = self.values;
        let rough = (most - least) / 5.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|s| *s >= rough);
        let step = step.unwrap_or(rough);
        let first = (least / step).ceil() as i64;
        (first..).map(|n| n as f64 * step).take_while(|tick| *tick <= most).collect()
    }

    /// Number of decimals that distinguishes the ticks.
    fn decimals(&self) -> usize {
        let [least, most] = self.values;
        (-((most - least) / 5.0).log10().floor()).clamp(0.0, 6.0) as usize
    }
}

/// The shapes of a study with at least one complete run.
pub(super) fn shapes(study: &Study) -> Vec<Shape> {
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
    let mut shapes = axes(&x, &y);
    shapes.push(text([left, 22.0], Anchor::Start, title(study)));
    for (place, report) in study.contenders.iter().enumerate() {
        let colour = COLOURS[place % COLOURS.len()];
        let height = top + 12.0 + 22.0 * place as f64;
        shapes.push(Shape::Disc { centre: [right + 22.0, height], radius: 6.0, colour });
        shapes.push(text([right + 36.0, height], Anchor::Start, name(report)));
        contender(report, colour, [&x, &y], &mut shapes);
    }
    shapes
}

fn contender(report: &ContenderReport, colour: Colour, [x, y]: [&Axis; 2], to: &mut Vec<Shape>) {
    // The dots of single seeds are paler.
    let pale = colour.map(|part| 255 - (255 - part) / 2);
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

fn axes(x: &Axis, y: &Axis) -> Vec<Shape> {
    let [left, top, right, bottom] = FIELD;
    let mut shapes = vec![];
    for tick in x.ticks() {
        let at = x.at(tick);
        shapes.push(Shape::Line { from: [at, top], to: [at, bottom], colour: GRID });
        shapes.push(text([at, bottom + 16.0], Anchor::Middle, number(tick, x.decimals())));
    }
    for tick in y.ticks() {
        let at = y.at(tick);
        shapes.push(Shape::Line { from: [left, at], to: [right, at], colour: GRID });
        shapes.push(text([left - 8.0, at], Anchor::End, number(tick, y.decimals())));
    }
    shapes.push(Shape::Line { from: [left, bottom], to: [right, bottom], colour: INK });
    shapes.push(Shape::Line { from: [left, top], to: [left, bottom], colour: INK });
    let middle = (left + right) / 2.0;
    shapes.push(text(
        [middle, SIZE[1] - 22.0],
        Anchor::Middle,
        "parameters of host and modules".into(),
    ));
    // Above the plot area, where there are no grid lines.
    shapes.push(text([left - 40.0, top - 16.0], Anchor::Start, "test accuracy, %".into()));
    shapes
}

/// Formats the number at a tick, such as `6,274` or `86.5`.
fn number(value: f64, decimals: usize) -> String {
    let sign = if value < 0.0 { "-" } else { "" };
    let digits = format!("{:.decimals$}", value.abs());
    let (whole, rest) = digits.split_once('.').map_or((&*digits, None), |(w, r)| (w, Some(r)));
    let whole = whole.parse().map_or(whole.into(), plain::thousands);
    let rest = rest.map_or(String::new(), |rest| format!(".{rest}"));
    format!("{sign}{whole}{rest}")
}

fn text(at: [f64; 2], anchor: Anchor, text: String) -> Shape {
    Shape::Text { at, anchor, text }
}

/// A name that fits the legend: of a long path the beginning and the end, without the usual file
/// name of a policy.
fn name(report: &ContenderReport) -> String {
    let name = report.contender.to_string();
    let short = name.trim_end_matches(".safetensors").trim_end_matches("/policy");
    let letters: Vec<char> = short.chars().collect();
    match letters.len() {
        0..=NAME => short.into(),
        long => {
            let part = |range: &[char]| range.iter().collect::<String>();
            format!(
                "{}...{}",
                part(&letters[..NAME / 3]),
                part(&letters[long + 3 - 2 * NAME / 3..])
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_lie_within() {
        for (values, expected) in [
            ([0.0, 10.0], vec![0.0, 2.0, 4.0, 6.0, 8.0, 10.0]),
            ([6100.0, 6900.0], vec![6200.0, 6400.0, 6600.0, 6800.0]),
            ([-0.7, 0.4], vec![-0.5, 0.0]),
        ] {
            let axis = Axis { values, pixels: [0.0, 1.0] };
            assert_eq!(axis.ticks(), expected);
        }
    }

    #[test]
    fn numbers_at_the_axes_read_well() {
        let all = [(6274.0, 0), (0.5, 1), (-1200.25, 2), (94_762.0, 0), (1e15, 0)];
        let told = all.map(|(value, decimals)| number(value, decimals));
        assert_eq!(told, ["6,274", "0.5", "-1,200.25", "94,762", "1,000,000,000,000,000"]);
    }

    #[test]
    fn nothing_is_written_over_a_line_of_the_grid() {
        let [left, top, right, bottom] = FIELD;
        // A grid with a line at the very top.
        let x = Axis { values: [6000.0, 7000.0], pixels: [left, right] };
        let y = Axis { values: [80.0, 90.0], pixels: [bottom, top] };
        let shapes = axes(&x, &y);
        // Labels left of the axis have no grid line next to them; half a line of text is 7 pixels
        // high.
        let within = |anchor: &Anchor| *anchor != Anchor::End;
        for shape in &shapes {
            let Shape::Text { at, anchor, .. } = shape else { continue };
            let over = |line: &&Shape| {
                matches!(line, Shape::Line { from, to, .. }
                if from[1] == to[1] && (from[1] - at[1]).abs() < 7.0 && within(anchor))
            };
            assert_eq!(shapes.iter().find(over), None, "{shape:?}");
        }
    }

    #[test]
    fn values_are_within_the_axis_even_when_they_are_one() {
        for values in [vec![6274.0; 3], vec![0.0], vec![86.0, 87.5, 20.0]] {
            let axis = Axis::around(values.iter().copied(), [70.0, 650.0]);
            assert!(values.iter().all(|x| (80.0..640.0).contains(&axis.at(*x))), "{axis:?}");
            assert!((2..=12).contains(&axis.ticks().len()), "{axis:?}");
        }
    }
}

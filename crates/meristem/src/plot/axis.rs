//! Axes of a plot: round ticks, grid lines and labels.

use super::{Anchor, Colour, Shape, text};
use crate::plain;

/// Mapping from a range of values to pixels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    values: [f64; 2],
    pixels: [f64; 2],
}

impl Axis {
    /// An axis over all values, with a margin on both sides. If all values are equal, the margin is
    /// larger.
    pub(super) fn around(values: impl Iterator<Item = f64>, pixels: [f64; 2]) -> Self {
        let [least, most] = ends(values);
        let margin = (0.08 * (most - least)).max(0.002 * most.abs()).max(0.01);
        Self { values: [least - margin, most + margin], pixels }
    }

    /// An axis from the least value to the greatest, with a length of at least 1.
    pub(super) fn of(values: impl Iterator<Item = f64>, pixels: [f64; 2]) -> Self {
        let [least, most] = ends(values);
        Self { values: [least, most.max(least + 1.0)], pixels }
    }

    pub(super) fn at(&self, value: f64) -> f64 {
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
        let first = (least / step).ceil();
        // More than a dozen ticks occur only for values beyond the precision of a float.
        let ticks = (0..20).map(|n| (first + f64::from(n)) * step);
        ticks.take_while(|tick| *tick <= most).collect()
    }

    /// Number of decimals needed to distinguish the ticks.
    fn decimals(&self) -> usize {
        let [least, most] = self.values;
        (-((most - least) / 5.0).log10().floor()).clamp(0.0, 6.0) as usize
    }
}

/// Least and greatest of the values; 0 and 1 without values.
fn ends(values: impl Iterator<Item = f64>) -> [f64; 2] {
    let start = (f64::INFINITY, f64::NEG_INFINITY);
    let (least, most) = values.fold(start, |(least, most), x| (least.min(x), most.max(x)));
    if least <= most { [least, most] } else { [0.0, 1.0] }
}

/// Left, top, right and bottom of the plot area.
pub(super) type Field = [f64; 4];

/// Grid lines, ticks and labels of both axes.
pub(super) fn axes([x, y]: [&Axis; 2], field: Field, labels: [&str; 2]) -> Vec<Shape> {
    let [left, top, right, bottom] = field;
    let mut shapes = x_ticks(x, field);
    for tick in y.ticks() {
        let at = y.at(tick);
        shapes.push(Shape::Line { from: [left, at], to: [right, at], colour: Colour::Grid });
        shapes.push(text([left - 8.0, at], Anchor::End, number(tick, y.decimals())));
    }
    shapes.push(Shape::Line { from: [left, bottom], to: [right, bottom], colour: Colour::Ink });
    shapes.push(Shape::Line { from: [left, top], to: [left, bottom], colour: Colour::Ink });
    let middle = (left + right) / 2.0;
    shapes.push(text([middle, bottom + 43.0], Anchor::Middle, labels[0].into()));
    // Above the plot area, outside the grid lines.
    shapes.push(text([left - 40.0, top - 16.0], Anchor::Start, labels[1].into()));
    shapes
}

/// Grid lines and ticks of the horizontal axis.
pub(super) fn x_ticks(x: &Axis, [_, top, _, bottom]: Field) -> Vec<Shape> {
    let mut shapes = vec![];
    for tick in x.ticks() {
        let at = x.at(tick);
        shapes.push(Shape::Line { from: [at, top], to: [at, bottom], colour: Colour::Grid });
        shapes.push(text([at, bottom + 16.0], Anchor::Middle, number(tick, x.decimals())));
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    const FIELD: Field = [70.0, 68.0, 650.0, 455.0];

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
    fn numbers_at_the_axes_are_formatted() {
        let all = [(6274.0, 0), (0.5, 1), (-1200.25, 2), (94_762.0, 0), (1e15, 0)];
        let told = all.map(|(value, decimals)| number(value, decimals));
        assert_eq!(told, ["6,274", "0.5", "-1,200.25", "94,762", "1,000,000,000,000,000"]);
    }

    #[test]
    fn labels_do_not_overlap_grid_lines() {
        let [left, top, right, bottom] = FIELD;
        // A grid with a line at the top.
        let x = Axis { values: [6000.0, 7000.0], pixels: [left, right] };
        let y = Axis { values: [80.0, 90.0], pixels: [bottom, top] };
        let shapes = axes([&x, &y], FIELD, ["parameters", "accuracy, %"]);
        // Labels left of the axis do not overlap the grid. Half the height of a line of text is 7
        // pixels.
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
    fn an_axis_contains_its_values_even_if_all_are_equal() {
        for values in [vec![6274.0; 3], vec![0.0], vec![86.0, 87.5, 20.0], vec![]] {
            let axis = Axis::around(values.iter().copied(), [70.0, 650.0]);
            assert!(values.iter().all(|x| (80.0..640.0).contains(&axis.at(*x))), "{axis:?}");
            assert!((2..=12).contains(&axis.ticks().len()), "{axis:?}");
        }
    }

    /// Values from untrusted files may have any magnitude.
    #[test]
    fn extreme_values_have_an_axis() {
        for values in [[-1e300, 1e300], [1e18, 1e18 + 1.0], [0.0, f64::MAX]] {
            let axis = Axis::of(values.into_iter(), [0.0, 100.0]);
            assert!(axis.ticks().len() <= 20, "{axis:?}");
        }
    }
}

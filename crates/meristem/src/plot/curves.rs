//! Line charts: one curve for each env, run or head.

use meristem::export::drawing::ramp;

use super::axis::{Axis, Field, axes};
use super::{Anchor, Colour, Picture, Shape, series_colour, short, text};

/// Curves with a legend.
#[derive(Clone, Debug)]
pub(crate) struct Chart {
    /// Title, above the curves.
    pub(crate) title: String,
    /// Labels of the horizontal and the vertical axis.
    pub(crate) labels: [&'static str; 2],
    /// Curves, each with its name in the legend.
    pub(crate) series: Vec<Series>,
}

/// A curve with its name.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    /// Name in the legend; empty for a curve that the legend omits.
    pub(crate) name: String,
    pub(crate) points: Vec<[f64; 2]>,
    /// Place in the ramp of colours, 0..=1; `None` for a colour of its own.
    pub(crate) shade: Option<f64>,
}

/// Width of the legend.
const LEGEND: f64 = 190.0;

/// Maximum number of names in a legend; further curves have none.
const NAMES_MAX: usize = 16;

/// Approximate maximum number of points in a chart; more would not be visible. It is reached only
/// with many curves.
const POINTS_MAX: usize = 1 << 16;

/// Maximum length of a name in the legend, in characters.
const NAME: usize = 18;

impl Chart {
    /// Draws the curves; `None` if there are no points.
    pub(crate) fn draw(&self, size: [f64; 2]) -> Option<Picture> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        points().next()?;
        let [left, top, right, bottom]: Field = [70.0, 68.0, size[0] - LEGEND, size[1] - 65.0];
        let x = Axis::of(points().map(|point| point[0]), [left, right]);
        let y = Axis::around(points().map(|point| point[1]), [bottom, top]);
        let points_each = POINTS_MAX / self.series.len().max(1);
        let mut shapes = axes([&x, &y], [left, top, right, bottom], self.labels);
        shapes.push(text([left - 40.0, 22.0], Anchor::Start, self.title.clone()));
        let mut names = 0;
        for (place, series) in self.series.iter().enumerate() {
            let ramp = series.shade.map(|shade| Colour::Rgb(ramp(shade)));
            let colour = ramp.unwrap_or(series_colour(place));
            let at: Vec<[f64; 2]> =
                thinned(&series.points, points_each).map(|p| [x.at(p[0]), y.at(p[1])]).collect();
            match at[..] {
                [] => continue,
                [centre] => shapes.push(Shape::Disc { centre, radius: 3.0, colour }),
                _ => shapes.push(Shape::Path { points: at, colour }),
            }
            let height = top + 12.0 + 22.0 * names as f64;
            if !series.name.is_empty() && names < NAMES_MAX && height < bottom {
                names += 1;
                let from = [right + 16.0, height];
                let to = [right + 34.0, height];
                shapes.push(Shape::Path { points: vec![from, to], colour });
                let name = short(&series.name, NAME);
                shapes.push(text([right + 40.0, height], Anchor::Start, name));
            }
        }
        Some(Picture { size, shapes })
    }
}

/// Reduces a curve to at most `most` points. Each is the mean of a group of neighbours, at the x of
/// the last neighbour.
fn thinned(points: &[[f64; 2]], most: usize) -> impl Iterator<Item = [f64; 2]> {
    let neighbours = points.len().div_ceil(most.max(1)).max(1);
    points.chunks(neighbours).filter_map(|part| {
        let mean = part.iter().map(|point| point[1]).sum::<f64>() / part.len() as f64;
        Some([part.last()?[0], mean])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(series: Vec<Vec<[f64; 2]>>) -> Chart {
        let series =
            series.into_iter().map(|points| Series { name: "env 0".into(), points, shade: None });
        Chart { title: "accuracy".into(), labels: ["step", "%"], series: series.collect() }
    }

    #[test]
    fn curves_are_within_the_plot_area() {
        let points = vec![[0.0, 10.0], [5.0, -3.0], [9.0, 80.0]];
        let picture = chart(vec![points, vec![[2.0, 4.0]], vec![]]).draw([720.0, 320.0]).unwrap();
        let mut curves = 0;
        for shape in &picture.shapes {
            let Shape::Path { points, .. } = shape else { continue };
            curves += usize::from(points.len() == 3);
            assert!(
                points.iter().all(|[x, y]| (0.0..720.0).contains(x) && (0.0..320.0).contains(y))
            );
        }
        assert_eq!(curves, 1);
        let dots = picture.shapes.iter().filter(|shape| matches!(shape, Shape::Disc { .. }));
        assert_eq!(dots.count(), 1, "a curve of one point is a dot");
    }

    #[test]
    fn very_many_curves_are_thinned() {
        let long: Vec<[f64; 2]> = (0..1025).map(|x| [f64::from(x), 1.0]).collect();
        for (curves, points) in [(2, 1025), (2048, 32)] {
            let picture = chart(vec![long.clone(); curves]).draw([720.0, 320.0]).unwrap();
            let lengths = picture.shapes.iter().filter_map(|shape| match shape {
                Shape::Path { points, .. } if points.len() > 2 => Some(points.len()),
                _ => None,
            });
            let lengths: Vec<usize> = lengths.collect();
            assert_eq!((lengths.len(), lengths[0]), (curves, points));
        }
        let ends: Vec<[f64; 2]> = thinned(&long, 100).collect();
        assert_eq!((ends.len(), ends[93]), (94, [1024.0, 1.0]));
    }

    #[test]
    fn without_points_there_is_no_picture() {
        assert!(chart(vec![vec![]]).draw([720.0, 320.0]).is_none());
    }
}

//! Parallel coordinates: a line for each member across an axis for each setting, and one for the
//! score.

use meristem::export::drawing::ramp;

use super::{Anchor, Colour, Picture, Shape, short, text};

/// Maximum number of axes of settings; further settings are left out.
const AXES_MAX: usize = 10;
/// Maximum number of lines. Of more members only every second, third, … in the order of scores is
/// drawn.
const LINES_MAX: usize = 1000;
/// Maximum number of names at an axis. Of more names only the first and the last are written.
const NAMES_MAX: usize = 12;
/// Maximum length of the name of a value, in characters. Names of settings may be longer by 6.
const NAME: usize = 14;
/// Distance of two axes, in pixels.
const STEP: f64 = 140.0;

/// Values of a member, in the order of the settings, and its score.
pub(crate) type DrawnMember = (Vec<Option<String>>, Option<f64>);

/// Members with their settings and scores.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parallel {
    /// Names of the settings.
    pub(crate) settings: Vec<String>,
    /// Name of the score.
    pub(crate) score: String,
    /// Values and score of each member.
    pub(crate) members: Vec<DrawnMember>,
}

/// Positions of values on an axis, as shares of its height.
enum Scale {
    /// Least and largest number with their texts, and whether the axis is logarithmic.
    Numbers { ends: [(f64, String); 2], log: bool },
    /// Texts, from the bottom to the top.
    Names(Vec<String>),
}

impl Scale {
    fn new(values: &[&str]) -> Self {
        let number = |text: &&str| {
            let number: Option<f64> = text.parse().ok();
            number.filter(|x| x.is_finite()).map(|x| (x, text.to_string()))
        };
        let numbers: Option<Vec<(f64, String)>> = values.iter().map(number).collect();
        if let Some(mut all) = numbers {
            all.sort_by(|a, b| a.0.total_cmp(&b.0));
            if let (Some(least), Some(most)) = (all.first(), all.last()) {
                let ends = [least.clone(), most.clone()];
                let median = &all[all.len() / 2].1;
                let [linear, log] =
                    [false, true].map(|log| Self::Numbers { ends: ends.clone(), log });
                // Numbers that were sampled on a logarithmic scale have their median in its middle.
                let distance = |scale: &Self| (scale.at(median) - 0.5).abs();
                let is_log = least.0 > 0.0 && distance(&log) < distance(&linear);
                return if is_log { log } else { linear };
            }
        }
        let mut names: Vec<String> = values.iter().map(ToString::to_string).collect();
        names.sort_unstable();
        names.dedup();
        Self::Names(names)
    }

    /// The position of a value, 0..=1.
    fn at(&self, value: &str) -> f64 {
        let share = match self {
            Self::Numbers { ends: [(least, _), (most, _)], log } => {
                let scaled = |x: f64| if *log { x.ln() } else { x };
                let number = value.parse().unwrap_or(*least);
                // Halves are subtracted, because the difference of the numbers themselves may
                // overflow.
                (scaled(number) / 2.0 - scaled(*least) / 2.0)
                    / (scaled(*most) / 2.0 - scaled(*least) / 2.0)
            }
            Self::Names(names) => {
                let place = names.binary_search_by(|name| name.as_str().cmp(value));
                place.unwrap_or_default() as f64 / (names.len() - 1).max(1) as f64
            }
        };
        if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.5 }
    }

    /// Names at the axis with their positions.
    fn names(&self) -> Vec<(f64, String)> {
        match self {
            Self::Numbers { ends: [least, most], .. } if least.0 == most.0 => {
                vec![(0.5, least.1.clone())]
            }
            Self::Numbers { ends: [least, most], .. } => {
                vec![(0.0, least.1.clone()), (1.0, most.1.clone())]
            }
            Self::Names(names) => {
                let all = names.len() <= NAMES_MAX;
                let wanted = |place: &usize| all || *place == 0 || *place + 1 == names.len();
                let places = (0..names.len()).filter(wanted);
                places.map(|place| (self.at(&names[place]), names[place].clone())).collect()
            }
        }
    }
}

impl Parallel {
    /// Draws the members, the best on top, in colours by the rank of their scores; members without
    /// a score are grey. `None` without settings, or with fewer than two members.
    pub(crate) fn draw(&self) -> Option<Picture> {
        let axes = self.settings.len().min(AXES_MAX);
        if axes == 0 || self.members.len() < 2 {
            return None;
        }
        let [left, top, bottom] = [50.0, 50.0, 290.0];
        let size = [left + STEP * (axes + 1) as f64, bottom + 50.0];
        let x = |axis: usize| left + STEP * axis as f64;
        let y = |share: f64| bottom - share * (bottom - top);
        let scales: Vec<Scale> = (0..axes)
            .map(|axis| {
                let values = self.members.iter().filter_map(|(own, _)| own.get(axis)?.as_deref());
                Scale::new(&values.collect::<Vec<_>>())
            })
            .collect();
        let scores: Vec<String> = self
            .members
            .iter()
            .filter_map(|(_, score)| Some(score.as_ref()?.to_string()))
            .collect();
        let of_score = Scale::new(&scores.iter().map(String::as_str).collect::<Vec<_>>());

        // Values that a member does not have are below the axis.
        let below = bottom + 22.0;
        let mut shapes = vec![];
        for (member, colour) in self.coloured() {
            let (values, score) = member;
            let mut points: Vec<[f64; 2]> = scales
                .iter()
                .enumerate()
                .map(|(axis, scale)| {
                    let value = values.get(axis).and_then(Option::as_deref);
                    [x(axis), value.map_or(below, |value| y(scale.at(value)))]
                })
                .collect();
            points.push([x(axes), score.map_or(below, |own| y(of_score.at(&own.to_string())))]);
            shapes.push(Shape::Path { points, colour });
        }
        let named = self.settings.iter().take(axes).map(String::as_str).chain([&*self.score]);
        for (axis, (name, scale)) in named.zip(scales.iter().chain([&of_score])).enumerate() {
            let (from, to) = ([x(axis), top], [x(axis), bottom]);
            shapes.push(Shape::Line { from, to, colour: Colour::Ink });
            shapes.push(text([x(axis), top - 26.0], Anchor::Middle, short(name, NAME + 6)));
            for (share, name) in scale.names() {
                shapes.push(text([x(axis) + 5.0, y(share)], Anchor::Start, short(&name, NAME)));
            }
            let missing = match axis {
                axis if axis == axes => scores.len() < self.members.len(),
                _ => self.members.iter().any(|(own, _)| own.get(axis).is_none_or(Option::is_none)),
            };
            if missing {
                shapes.push(text([x(axis) + 5.0, below], Anchor::Start, "–".into()));
            }
        }
        Some(Picture { size, shapes })
    }

    /// The members that are drawn, the best last, with their colours.
    fn coloured(&self) -> Vec<(&DrawnMember, Colour)> {
        let mut ranked: Vec<_> = self.members.iter().collect();
        let key = |score: Option<f64>| score.unwrap_or(f64::NEG_INFINITY);
        ranked.sort_by(|(_, a), (_, b)| key(*b).total_cmp(&key(*a)));
        let last = (ranked.len() - 1).max(1) as f64;
        let every = ranked.len().div_ceil(LINES_MAX);
        let drawn = ranked.into_iter().enumerate().step_by(every);
        let mut drawn: Vec<_> = drawn
            .map(|(rank, member)| {
                let hue = Colour::Rgb(ramp(1.0 - rank as f64 / last));
                (member, if member.1.is_some() { hue } else { Colour::Grid })
            })
            .collect();
        drawn.reverse();
        drawn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(values: [&str; 2], score: f64) -> DrawnMember {
        let value = |text: &str| (!text.is_empty()).then(|| text.to_string());
        (values.map(value).to_vec(), Some(score).filter(|score| score.is_finite()))
    }

    fn plot(members: Vec<DrawnMember>) -> Parallel {
        let settings = ["lr", "host"].map(String::from).to_vec();
        Parallel { settings, score: "control accuracy, %".into(), members }
    }

    fn lines(picture: &Picture) -> Vec<(Vec<[f64; 2]>, Colour)> {
        let line = |shape: &Shape| match shape {
            Shape::Path { points, colour } => Some((points.clone(), *colour)),
            _ => None,
        };
        picture.shapes.iter().filter_map(line).collect()
    }

    fn texts(picture: &Picture) -> Vec<&str> {
        let mut texts = vec![];
        for shape in &picture.shapes {
            if let Shape::Text { text, .. } = shape {
                texts.push(text.as_str());
            }
        }
        texts
    }

    /// By hand: 0.001, 0.1 and 10 are at the bottom, in the middle and at the top of a logarithmic
    /// axis.
    #[test]
    fn a_line_crosses_each_axis_at_its_value() {
        let picture = plot(vec![
            member(["0.001", "mlp"], 10.0),
            member(["10", "conv"], 30.0),
            member(["0.1", ""], 20.0),
            member(["0.1", "mlp"], f64::NAN),
        ]);
        let picture = picture.draw().unwrap();
        let lines = lines(&picture);
        let heights: Vec<Vec<f64>> =
            lines.iter().map(|(points, _)| points.iter().map(|point| point[1]).collect()).collect();
        // The worst is first; 312 is below the axis.
        let expected = [
            [170.0, 50.0, 312.0],
            [290.0, 50.0, 290.0],
            [170.0, 312.0, 170.0],
            [50.0, 290.0, 50.0],
        ];
        assert_eq!(heights, expected);
        let colours: Vec<Colour> = lines.iter().map(|(_, colour)| *colour).collect();
        assert_eq!(colours[0], Colour::Grid);
        assert_eq!(colours[3], Colour::Rgb(ramp(1.0)));
        let texts = texts(&picture);
        for wanted in ["lr", "host", "control accuracy, %", "0.001", "10", "mlp", "conv", "–"] {
            assert!(texts.contains(&wanted), "{wanted}: {texts:?}");
        }
    }

    #[test]
    fn many_members_axes_and_names_are_bounded() {
        let many = (0..10_000).map(|n| {
            let values = (0..40).map(|axis| Some(format!("value {n} of {axis}"))).collect();
            (values, Some(f64::from(n)))
        });
        let settings = (0..40).map(|axis| format!("setting {axis}")).collect();
        let plot = Parallel { settings, score: "R²".into(), members: many.collect() };
        let picture = plot.draw().unwrap();
        let lines = lines(&picture);
        assert_eq!((lines.len(), lines[0].0.len()), (LINES_MAX, AXES_MAX + 1));
        // The best is drawn.
        assert_eq!(lines[LINES_MAX - 1].0[AXES_MAX][1], 50.0);
        assert!(picture.shapes.len() < LINES_MAX + 100, "{}", picture.shapes.len());
    }

    /// Values of a run may be any text and any number.
    #[test]
    fn extreme_values_are_drawn_within_the_picture() {
        let picture = plot(vec![
            member(["-1.7e308", "<script>"], -1e300),
            member(["1.7e308", "\u{202e}"], 1e300),
            member(["0", ""], 0.0),
        ]);
        let picture = picture.draw().unwrap();
        let points = lines(&picture).into_iter().flat_map(|(points, _)| points);
        assert!(points.flatten().all(|x| (0.0..1000.0).contains(&x)));
        let svg = super::super::svg(&picture);
        assert!(svg.contains("&lt;script&gt;") && !svg.contains("<script"), "{svg}");
        let same = plot(vec![member(["1", "a"], 5.0), member(["1", "a"], 5.0)]).draw().unwrap();
        assert!(lines(&same).iter().all(|(points, _)| points[0][1] == 170.0), "{same:?}");
        assert!(plot(vec![member(["1", "a"], 5.0)]).draw().is_none());
        assert!(
            Parallel { settings: vec![], ..plot(vec![member(["1", "a"], 5.0); 2]) }
                .draw()
                .is_none()
        );
    }
}

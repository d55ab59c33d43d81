//! Plots: `scatter`, `curves`, `lifecycle`, `parallel` and `lineage` lay data out as shapes, `svg`
//! and `png` encode them.
//!
//! Files, reports and pages of `serve` use the same charts, so pages need no scripts to draw them.

mod axis;
mod curves;
mod lifecycle;
mod lineage;
mod parallel;
mod png;
mod policy;
mod scatter;
mod svg;

use std::path::PathBuf;
use std::str::FromStr;

use meristem::train::check_output;
use meristem::train::run_folder::write_whole;
use meristem::train::settings::BadValue;

pub(crate) use self::curves::{Chart, Series};
pub(crate) use self::lifecycle::{DrawnSlot, lifecycle, topology};
pub(crate) use self::lineage::lineage;
pub(crate) use self::parallel::Parallel;
pub(crate) use self::policy::policy_training;
pub(crate) use self::scatter::{growth, study};
pub(crate) use self::svg::{escaped, inline};
use crate::colours::SERIES;
use crate::failure::Failure;

/// Width and height of a plot in a file, in pixels.
pub(crate) const SIZE: [f64; 2] = [900.0, 520.0];

/// Shapes on a page of `size`, in pixels.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Picture {
    size: [f64; 2],
    shapes: Vec<Shape>,
}

/// Shape to draw, with coordinates in pixels from the top left.
#[derive(Clone, Debug, PartialEq)]
enum Shape {
    Line {
        from: [f64; 2],
        to: [f64; 2],
        colour: Colour,
    },
    /// Connected lines.
    Path {
        points: Vec<[f64; 2]>,
        colour: Colour,
    },
    /// Filled rectangle.
    Area {
        from: [f64; 2],
        to: [f64; 2],
        colour: Colour,
    },
    Disc {
        centre: [f64; 2],
        radius: f64,
        colour: Colour,
    },
    /// Text, centred vertically at `at`.
    Text {
        at: [f64; 2],
        anchor: Anchor,
        text: String,
    },
}

/// Colour of a shape. A page defines the colours of ink and grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Colour {
    /// Colour of text and axes.
    Ink,
    /// Colour of grid lines.
    Grid,
    /// Red, green and blue.
    Rgb([u8; 3]),
}

impl Colour {
    /// The colour half-way to white.
    fn pale(self) -> Self {
        match self {
            Self::Rgb(rgb) => Self::Rgb(rgb.map(|part| 255 - (255 - part) / 2)),
            other => other,
        }
    }
}

/// Colour of the series with this number.
fn series_colour(number: usize) -> Colour {
    Colour::Rgb(SERIES[number % SERIES.len()].rgb)
}

fn text(at: [f64; 2], anchor: Anchor, text: String) -> Shape {
    Shape::Text { at, anchor, text }
}

/// Shortens a name to at most `max` characters, by removing its middle.
fn short(name: &str, max: usize) -> String {
    let letters: Vec<char> = name.chars().take(10_000).collect();
    if letters.len() <= max {
        return name.into();
    }
    let part = |range: &[char]| range.iter().collect::<String>();
    let end = letters.len() + 3 - 2 * max / 3;
    format!("{}...{}", part(&letters[..max / 3]), part(&letters[end..]))
}

/// Horizontal alignment of a text at its point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Anchor {
    Start,
    Middle,
    End,
}

/// File and format of a plot.
#[derive(Clone, Debug)]
pub(crate) struct PlotFile {
    path: PathBuf,
    format: Format,
}

#[derive(Clone, Copy, Debug)]
enum Format {
    Svg,
    Png,
}

impl FromStr for PlotFile {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        let path = PathBuf::from(text);
        let format = match path.extension().and_then(|extension| extension.to_str()) {
            Some("svg") => Format::Svg,
            Some("png") => Format::Png,
            _ => return Err(BadValue::new(text, "a file name that ends in .svg or .png")),
        };
        Ok(Self { path, format })
    }
}

impl PlotFile {
    /// An SVG file, whatever the name.
    pub(crate) fn svg(path: PathBuf) -> Self {
        Self { path, format: Format::Svg }
    }

    /// Checks, before the work, that the file can be written.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        Ok(check_output("plot", &self.path)?)
    }

    /// Writes a picture.
    pub(crate) fn write(&self, picture: &Picture) -> Result<(), Failure> {
        let bytes = match self.format {
            Format::Svg => svg::encode(picture).into_bytes(),
            Format::Png => png::encode(picture).map_err(|error| {
                Failure::failed(
                    format!("cannot encode the plot as PNG: {error}"),
                    "plot to a .svg file",
                )
            })?,
        };
        Ok(write_whole(&self.path, &bytes)?)
    }
}

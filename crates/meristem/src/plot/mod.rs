//! Plots: `scatter`, `curves`, `lifecycle`, `parallel` and `lineage` lay data out as shapes, which
//! `export::drawing` encodes as SVG and `png` as PNG.
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

use std::path::PathBuf;
use std::str::FromStr;

use meristem::export::drawing::{Anchor, Colour, Picture, SERIES, Shape, short, svg, text};
use meristem::train::check_output;
use meristem::train::run_folder::write_whole;
use meristem::train::settings::BadValue;

pub(crate) use self::curves::{Chart, Series};
pub(crate) use self::lifecycle::lifecycle;
pub(crate) use self::lineage::lineage;
pub(crate) use self::parallel::Parallel;
pub(crate) use self::policy::policy_training;
pub(crate) use self::scatter::{growth, study};
use crate::failure::Failure;

/// Width and height of a plot in a file, in pixels.
pub(crate) const SIZE: [f64; 2] = [900.0, 520.0];

/// Colour of the series with this number.
fn series_colour(number: usize) -> Colour {
    Colour::Rgb(SERIES[number % SERIES.len()].rgb())
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
            Format::Svg => svg(picture).into_bytes(),
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

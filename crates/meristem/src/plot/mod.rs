//! Plots of studies: `draw` lays a study out as shapes, `svg` and `png` encode them.

mod draw;
mod png;
mod svg;

use std::path::PathBuf;
use std::str::FromStr;

use meristem::train::check_output;
use meristem::train::run_folder::write_whole;
use meristem::train::settings::BadValue;
use meristem::train::study::Study;
use meristem::train::summary::Status;

use crate::failure::Failure;
use crate::plain;

/// Width and height of a plot, in pixels.
const SIZE: [f64; 2] = [900.0, 520.0];

/// Shape to draw, with coordinates in pixels from the top left.
#[derive(Clone, Debug, PartialEq)]
enum Shape {
    Line {
        from: [f64; 2],
        to: [f64; 2],
        colour: Colour,
    },
    Disc {
        centre: [f64; 2],
        radius: f64,
        colour: Colour,
    },
    /// Text that is centred vertically at `at`.
    Text {
        at: [f64; 2],
        anchor: Anchor,
        text: String,
    },
}

/// Red, green and blue.
type Colour = [u8; 3];

/// Part of a text that is placed at the given point.
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
    /// Checks before the work that the file can be written.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        Ok(check_output("plot", &self.path)?)
    }

    /// Draws the study, if it has a complete run.
    pub(crate) fn write(&self, study: &Study) -> Result<(), Failure> {
        if study.complete() == 0 {
            plain::err("no plot was written, because no run is complete");
            return Ok(());
        }
        let shapes = draw::shapes(study);
        let bytes = match self.format {
            Format::Svg => svg::encode(&shapes).into_bytes(),
            Format::Png => png::encode(&shapes).map_err(|error| {
                Failure::failed(
                    format!("cannot encode the plot as PNG: {error}"),
                    "plot to a .svg file",
                )
            })?,
        };
        Ok(write_whole(&self.path, &bytes)?)
    }
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

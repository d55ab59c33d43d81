//! A study as a picture: `draw` lays it out as shapes, `svg` and `png` write them down.

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

/// Something to be drawn; places are in pixels from the top left.
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
    /// Text whose middle is at the height of `at`.
    Text {
        at: [f64; 2],
        anchor: Anchor,
        text: String,
    },
}

/// Red, green, blue.
type Colour = [u8; 3];

/// Which part of a text is where it is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Anchor {
    Start,
    Middle,
    End,
}

/// Where a plot goes, and as what.
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
            _ => return Err(BadValue::new(text, "a file that ends in .svg or .png")),
        };
        Ok(Self { path, format })
    }
}

impl PlotFile {
    /// Finds out before the work whether the file could be written.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        Ok(check_output("plot", &self.path)?)
    }

    /// Draws the study, if there is anything in it.
    pub(crate) fn write(&self, study: &Study) -> Result<(), Failure> {
        if study.complete() == 0 {
            plain::err("no run is complete: there is no plot");
            return Ok(());
        }
        let shapes = draw::shapes(study);
        let bytes = match self.format {
            Format::Svg => svg::encode(&shapes).into_bytes(),
            Format::Png => png::encode(&shapes).map_err(|error| {
                Failure::failed(format!("the plot is no PNG: {error}"), "draw it as .svg")
            })?,
        };
        Ok(write_whole(&self.path, &bytes)?)
    }
}

/// What the plot says of itself.
fn title(study: &Study) -> String {
    let dataset = study.dataset.as_ref().map_or("", |dataset| &dataset.name);
    let stopped = if study.status == Status::Interrupted { ", stopped early" } else { "" };
    format!(
        "{} on {dataset}, {} steps; mean ± deviation over seeds{stopped}",
        study.host, study.steps
    )
}

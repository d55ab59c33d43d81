//! Arguments of `meristem host`.

use clap::{Args, Subcommand};
use meristem::data::{InputKind, SampleShape};

use crate::plot::PlotFile;

#[derive(Debug, Subcommand)]
pub(crate) enum HostCommand {
    /// Show a host without modules: its layers and slots, their output shapes, parameters and
    /// multiplications.
    Show(HostShowArguments),
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct HostShowArguments {
    /// Preset or description, such as deep, or cnn:channels=12,blocks=4,kernel=5,pools=3
    pub(crate) host: String,
    /// Shape of a sample: channels, rows and columns of an image, such as 3x32x32; channels and
    /// points of a signal, such as 1x40; or the features of a vector
    #[arg(long, value_name = "SHAPE", default_value = "1x28x28", value_parser = sample_shape)]
    pub(crate) input: (InputKind, SampleShape),
    /// Classes of the dataset
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(crate) classes: usize,
    /// File for a drawing of the layers, branches and slots, .svg or .png; must not exist
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PlotFile>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Parses one to three whole numbers with `x` between them.
fn sample_shape(text: &str) -> Result<(InputKind, SampleShape), String> {
    let sizes: Option<Vec<usize>> = text.split('x').map(|size| size.parse().ok()).collect();
    let shape = sizes.and_then(|sizes| InputKind::of_dims(&sizes));
    shape.ok_or_else(|| {
        "expected channels, rows and columns, such as 3x32x32; channels and points, such as 1x40; \
         or features, such as 30"
            .to_owned()
    })
}

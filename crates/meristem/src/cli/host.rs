//! Arguments of `meristem host`.

use clap::{Args, Subcommand};

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
    /// Channels, rows and columns of an image
    #[arg(long, value_name = "CxHxW", default_value = "1x28x28", value_parser = image_shape)]
    pub(crate) input: [usize; 3],
    /// Classes of the dataset
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(crate) classes: usize,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Parses three whole numbers with `x` between them.
fn image_shape(text: &str) -> Result<[usize; 3], String> {
    let sizes: Option<Vec<usize>> = text.split('x').map(|size| size.parse().ok()).collect();
    let shape = sizes.and_then(|sizes| sizes.try_into().ok());
    shape.ok_or_else(|| "expected channels, rows and columns, such as 3x32x32".to_owned())
}

//! Arguments of `meristem export`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use meristem::train::settings::{BadValue, Normalize};

#[derive(Debug, Subcommand)]
pub(crate) enum ExportCommand {
    /// Write the events of a run as CSV, to stdout or a file.
    ///
    /// Columns are named after the keys of the events. A number that was not measured or is not
    /// finite is an empty cell.
    Csv(CsvArguments),
    /// Write the events of a run as a Parquet file, with the feature `parquet`.
    ///
    /// The file has the columns of `export csv`, with types; an empty cell is null.
    Parquet(ParquetArguments),
    /// Write the network of a weights file, host and modules, as an ONNX model.
    ///
    /// The input `images` is f32 [N, channels, rows, columns], normalised, for any N; for signals
    /// and vectors it is `inputs`. The output `logits` is f32 [N, classes]; for numbers it is
    /// `outputs`, in the units of the targets. The metadata has the keys classes, normalization,
    /// host, input and weights, and outputs and table if there are any.
    Onnx(OnnxArguments),
    /// Write the events of a run as an event file of TensorBoard: curves, histograms of actions,
    /// settings.
    ///
    /// `train --tensorboard` writes the same file during a run.
    Tensorboard(TensorboardArguments),
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct OnnxArguments {
    /// Weights file (safetensors)
    #[arg(value_name = "WEIGHTS")]
    pub(crate) weights: PathBuf,
    /// File to write; must not exist
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Make the input the stored values, which the model normalises: u8 [N, rows, columns,
    /// channels] for images; u8 or f32, as they are stored, for arrays
    #[arg(long)]
    pub(crate) with_preprocessing: bool,
    /// Host of the weights; required only if the file has no topology [default: the file's]
    #[arg(long)]
    pub(crate) host: Option<String>,
    /// Rows and columns of the images, such as 32x32; required only if the file has no topology
    #[arg(long, value_name = "ROWSxCOLUMNS", value_parser = image_size)]
    pub(crate) image_size: Option<[usize; 2]>,
    /// Normalisation constants for a weights file without them: cifar10, imagenet or
    /// 'mean=A,B,C;std=D,E,F'
    #[arg(long, value_name = "CONSTANTS")]
    pub(crate) normalize: Option<Normalize>,
}

/// Reads `ROWSxCOLUMNS`.
fn image_size(text: &str) -> Result<[usize; 2], BadValue> {
    let sizes = text.split_once('x').map(|(rows, columns)| [rows.parse(), columns.parse()]);
    match sizes {
        Some([Ok(rows), Ok(columns)]) if rows > 0 && columns > 0 => Ok([rows, columns]),
        _ => Err(BadValue::new(text, "rows and columns, such as 32x32")),
    }
}

#[derive(Debug, Args)]
pub(crate) struct TensorboardArguments {
    /// Folder of the run, or its name in runs/
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,
    /// Folder for the event file; must not contain event files
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct CsvArguments {
    /// Folder of the run, or its name in runs/
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,
    /// Table to write
    #[arg(long, value_enum, default_value_t = Table::Steps)]
    pub(crate) table: Table,
    /// File to write; must not exist [default: stdout]
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ParquetArguments {
    /// Folder of the run, or its name in runs/
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,
    /// Table to write
    #[arg(long, value_enum, default_value_t = Table::Steps)]
    pub(crate) table: Table,
    /// File to write; must not exist
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
}

/// Table of events, named after its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Table {
    /// A row for each env and step
    Steps,
    /// A row for each slot that is not dormant, for each env and step
    Slots,
    /// A row for each round in which a policy learned
    Policy,
    /// A row for each batch, of runs with --log-batches
    Batches,
    /// A row for each member, and for each copy that one became, with its settings
    Members,
}

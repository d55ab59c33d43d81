//! Arguments of `meristem export`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

#[derive(Debug, Subcommand)]
pub(crate) enum ExportCommand {
    /// Write the events of a run as CSV, to stdout or a file.
    ///
    /// Columns are named after the keys of the events. A number that was not measured or is not
    /// finite is an empty cell.
    Csv(CsvArguments),
}

#[derive(Debug, Args)]
pub(crate) struct CsvArguments {
    /// Folder of the run, or its name in runs/
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,
    /// Rows of the table
    #[arg(long, value_enum, default_value_t = CsvTable::Steps)]
    pub(crate) table: CsvTable,
    /// File to write; must not exist [default: stdout]
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

/// Rows of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CsvTable {
    /// A row for each env and step
    Steps,
    /// A row for each slot that is not dormant, for each env and step
    Slots,
    /// A row for each round in which a policy learned
    Policy,
    /// A row for each batch, of runs with --log-batches
    Batches,
}

//! The file of a table, as rows of text.

use std::path::Path;

#[cfg(feature = "parquet")]
use super::columns::ColumnFile;
use super::format::TableFormat;
use crate::error::Result;
use crate::source::csv_file::{CsvFile, Row};

/// A file of rows, which begins with the names of the columns.
pub(super) enum TableFile {
    Csv(CsvFile),
    #[cfg(feature = "parquet")]
    Columns(Box<ColumnFile>),
}

impl TableFile {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// [`Layout`](crate::Error::Layout) for a column whose values are neither numbers, text nor
    /// booleans, for a damaged file, and for a Parquet or Arrow file without the feature `parquet`;
    /// the errors of reading.
    pub(super) fn open(path: &Path) -> Result<Self> {
        match TableFormat::of_file(path)? {
            TableFormat::Csv => Ok(Self::Csv(CsvFile::open(path)?)),
            format => Self::open_columns(path, format),
        }
    }

    #[cfg(feature = "parquet")]
    fn open_columns(path: &Path, format: TableFormat) -> Result<Self> {
        Ok(Self::Columns(Box::new(ColumnFile::open(path, format)?)))
    }

    #[cfg(not(feature = "parquet"))]
    fn open_columns(path: &Path, format: TableFormat) -> Result<Self> {
        Err(crate::error::Mismatch::new("the table", "CSV", format!("a file of {format:?}"))
            .remedy("build with `--features parquet`, or write the table as CSV")
            .in_layout(path))
    }

    /// Where the names of the columns are, for messages.
    pub(super) fn header(&self) -> &'static str {
        match self {
            Self::Csv(_) => "line 1",
            #[cfg(feature = "parquet")]
            Self::Columns(_) => "the schema",
        }
    }

    /// The next row; the first one has the names of the columns.
    ///
    /// # Errors
    /// [`Layout`](crate::Error::Layout) for a damaged file, and for more rows than are read; the
    /// errors of reading.
    pub(super) fn next_row(&mut self) -> Result<Option<Row<'_>>> {
        match self {
            Self::Csv(file) => file.next_row(),
            #[cfg(feature = "parquet")]
            Self::Columns(file) => file.next_row(),
        }
    }
}

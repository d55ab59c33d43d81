//! Formats of tables, recognised by the first bytes of a file.

use std::io::Read;
use std::path::Path;

use crate::error::{Error, Result};
use crate::source::input;

/// First bytes of a Parquet file.
const PARQUET: &[u8] = b"PAR1";
/// First bytes of an Arrow IPC file, which pandas and polars call Feather.
const ARROW: &[u8] = b"ARROW1";

/// Format of the file of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableFormat {
    Csv,
    Parquet,
    Arrow,
}

impl TableFormat {
    /// The format of the file at `path`; CSV unless it begins as another one.
    ///
    /// # Errors
    /// The errors of reading.
    pub(super) fn of_file(path: &Path) -> Result<Self> {
        let mut start = vec![];
        let mut first = input::open_file(path)?.take(ARROW.len() as u64);
        first.read_to_end(&mut start).map_err(Error::io("read", path))?;
        Ok(match start {
            start if start.starts_with(PARQUET) => Self::Parquet,
            start if start == ARROW => Self::Arrow,
            _ => Self::Csv,
        })
    }
}

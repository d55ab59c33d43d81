//! Formats of tables, recognised by the first bytes of a file.

use std::io::Read;
use std::path::Path;

use crate::error::{Error, Result};
use crate::source::input;

/// First bytes of a Parquet file. Binary data follow.
const PARQUET: &[u8] = b"PAR1";
/// First bytes of an Arrow IPC file, which pandas and polars call Feather. Zeros follow.
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
        let mut first = input::open_file(path)?.take(ARROW.len() as u64 + 1);
        first.read_to_end(&mut start).map_err(Error::io("read", path))?;
        // The names of a CSV file's columns may begin with the same letters, and text follows.
        let begins = |magic: &[u8]| {
            let rest = start.strip_prefix(magic);
            rest.is_some_and(|rest| rest.first().is_none_or(|byte| !is_text(*byte)))
        };
        let known = [(PARQUET, Self::Parquet), (ARROW, Self::Arrow)];
        let found = known.into_iter().find(|(magic, _)| begins(magic));
        Ok(found.map_or(Self::Csv, |(_, format)| format))
    }
}

/// Whether a byte may be part of the first line of a CSV file.
fn is_text(byte: u8) -> bool {
    !byte.is_ascii_control() || matches!(byte, b'\t' | b'\r' | b'\n')
}

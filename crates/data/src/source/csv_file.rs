//! CSV files (RFC 4180): limits, and rows with the lines at which they begin.

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use csv::ByteRecord;

use super::identity::WatchedFiles;
use super::{Source, input, missing};
use crate::error::{Error, Mismatch, Result};

/// Largest size of a file, in bytes: enough for some millions of rows.
pub(super) const BYTES_MAX: u64 = 1 << 30;
/// Longest cell that is kept as text, in bytes.
pub(super) const CELL_MAX: usize = 4096;
/// Longest record, in bytes, including columns that are not read.
const RECORD_MAX: usize = 1 << 20;
/// Most rows.
pub(super) const ROWS_MAX: usize = 1 << 24;
/// Longest text that is read as a whole number, in characters.
const DIGITS_MAX: usize = 18;
/// Characters of a cell or of a name that messages show.
const SHOWN: usize = 200;

/// Parses a text of decimal digits, with or without a sign, as a whole number.
pub(super) fn whole_number(text: &str) -> Option<i64> {
    if text.len() <= DIGITS_MAX { text.parse().ok() } else { None }
}

/// The beginning of a text, with control characters escaped, in backticks.
pub(super) fn quoted(text: &str) -> String {
    format!("`{}`", text.escape_debug().take(SHOWN).collect::<String>())
}

/// Whether a cell can be a name: some text that fits one line of a message.
pub(super) fn is_name(text: &str) -> bool {
    !text.is_empty() && text.len() <= CELL_MAX && !text.chars().any(char::is_control)
}

/// Checks that `path` is a file of at most [`BYTES_MAX`] bytes, and watches it for changes.
///
/// # Errors
/// [`Error::Missing`] for a folder or a pipe, [`Error::Layout`] for a larger file.
pub(super) fn check_file(source: Source, path: &Path, watch: &WatchedFiles) -> Result<()> {
    // Opening a pipe would wait for its writer.
    let metadata = path.metadata().map_err(Error::io("open", path))?;
    if !metadata.is_file() {
        return Err(missing(source, path));
    }
    let bytes = metadata.len();
    if bytes > BYTES_MAX {
        return Err(too_large(path, format!("at most {BYTES_MAX} bytes"), &bytes.to_string()));
    }
    watch.add(path)
}

/// The error for a file with more bytes or rows than are read.
pub(super) fn too_large(path: &Path, expected: String, got: &str) -> Error {
    let mismatch = Mismatch::new("the table", expected, got);
    mismatch.remedy("divide it into several datasets").in_layout(path)
}

/// The error for a record that begins at about `line`.
pub(super) fn unreadable(path: &Path, line: u64, error: &csv::Error) -> Error {
    let line = error.position().map_or(line, csv::Position::line);
    let (expected, got) = match error.kind() {
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            return unequal(path, line, *expected_len as usize, *len as usize);
        }
        csv::ErrorKind::Io(error) if error.kind() == io::ErrorKind::FileTooLarge => {
            (format!("at most {RECORD_MAX} bytes, its quoted line breaks included"), "more".into())
        }
        csv::ErrorKind::Utf8 { .. } => ("text in UTF-8".into(), "other bytes".into()),
        _ => ("a line of CSV".to_string(), error.to_string()),
    };
    in_line(path, line, expected, got)
}

/// The error for a row with another number of cells than the first line.
fn unequal(path: &Path, line: u64, expected: usize, got: usize) -> Error {
    in_line(path, line, format!("{expected} cells, as in the first line"), got.to_string())
}

fn in_line(path: &Path, line: u64, expected: String, got: String) -> Error {
    Mismatch::new(format!("line {line}"), expected, got)
        .remedy("correct the line, or quote cells that have commas")
        .in_layout(path)
}

/// Reader of a CSV file, with a limit of bytes that is set anew before each record. Adds the end of
/// the last line if the file lacks it.
pub(super) struct Limited {
    file: File,
    /// Bytes that may still be read.
    left: Rc<Cell<usize>>,
    /// Whether the bytes so far end with an end of a line.
    is_ended: bool,
}

impl Limited {
    /// Opens a file. The cell has the number of bytes that may still be read.
    pub(super) fn open(path: &Path) -> Result<(Self, Rc<Cell<usize>>)> {
        let left = Rc::new(Cell::new(RECORD_MAX));
        let file = input::open_file(path)?;
        Ok((Self { file, left: left.clone(), is_ended: true }, left))
    }

    /// Sets the limit anew.
    pub(super) fn begin_record(left: &Cell<usize>) {
        left.set(RECORD_MAX);
    }
}

impl Read for Limited {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        if let (0, false, [first, ..]) = (count, self.is_ended, &mut *buffer) {
            *first = b'\n';
            self.is_ended = true;
            return Ok(1);
        }
        self.is_ended = buffer[..count].last().map_or(self.is_ended, |last| *last == b'\n');
        let left = self.left.get().checked_sub(count);
        self.left.set(left.ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?);
        Ok(count)
    }
}

/// A CSV file that is read row by row.
pub(super) struct CsvFile {
    path: PathBuf,
    reader: csv::Reader<Limited>,
    left: Rc<Cell<usize>>,
    record: ByteRecord,
    /// Cells of the first line, once it was read.
    width: Option<usize>,
    /// Rows that were read, without the first line.
    rows: usize,
}

/// Where a row is in its file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// The line at which it begins, from 1.
    Line(u64),
    /// Its number in a file without lines, from 1.
    #[cfg(feature = "parquet")]
    Row(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            #[cfg(feature = "parquet")]
            Self::Row(row) => write!(f, "row {row}"),
        }
    }
}

/// A row of a table, as the text of its cells.
pub(super) struct Row<'a> {
    pub(super) path: &'a Path,
    pub(super) place: Place,
    pub(super) record: &'a ByteRecord,
}

impl CsvFile {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let (limited, left) = Limited::open(path)?;
        // The parser counts lines exactly if a line feed alone ends a line. A carriage return
        // before it becomes part of a cell, and is removed when cells are trimmed.
        let reader = csv::ReaderBuilder::new()
            .has_headers(false)
            .flexible(true)
            .terminator(csv::Terminator::Any(b'\n'))
            .from_reader(limited);
        let record = ByteRecord::new();
        Ok(Self { path: path.to_path_buf(), reader, left, record, width: None, rows: 0 })
    }

    /// The next row, from the first line on; empty lines are left out.
    ///
    /// # Errors
    /// [`Error::Layout`] with the line: another number of cells than in the first line, a row that
    /// is too long, too many rows; the errors of reading.
    pub(super) fn next_row(&mut self) -> Result<Option<Row<'_>>> {
        let line = loop {
            Limited::begin_record(&self.left);
            let line = self.reader.position().line();
            let read = self.reader.read_byte_record(&mut self.record);
            if !read.map_err(|error| unreadable(&self.path, line, &error))? {
                return Ok(None);
            }
            let is_empty = self.record.len() == 1
                && self.record.as_slice().iter().all(u8::is_ascii_whitespace);
            if !is_empty {
                let breaks = self.record.as_slice().iter().filter(|byte| **byte == b'\n').count();
                // The parser has read the end of the row's last line, unless a quote is never
                // closed. It skips empty lines before the row.
                break self.reader.position().line().saturating_sub(1 + breaks as u64).max(line);
            }
        };
        let got = self.record.len();
        match self.width {
            None => self.width = Some(got),
            Some(width) if width != got => return Err(unequal(&self.path, line, width, got)),
            Some(_) if self.rows == ROWS_MAX => {
                return Err(too_large(&self.path, format!("at most {ROWS_MAX} rows"), "more"));
            }
            Some(_) => self.rows += 1,
        }
        Ok(Some(Row { path: &self.path, place: Place::Line(line), record: &self.record }))
    }
}

impl<'a> Row<'a> {
    /// Number of cells.
    pub(super) fn len(&self) -> usize {
        self.record.len()
    }

    /// The text of a cell without the space around it. `column` is its name, for the error.
    ///
    /// # Errors
    /// [`Error::Layout`] for other bytes than UTF-8.
    pub(super) fn cell(&self, place: usize, column: &str) -> Result<&'a str> {
        let bytes = self.record.get(place).unwrap_or_default();
        str::from_utf8(bytes).map(str::trim).map_err(|_| {
            let got = String::from_utf8_lossy(bytes);
            self.wrong(column, "text in UTF-8", &got, "save the file as UTF-8")
        })
    }

    /// The error for a cell, which names its place and column.
    pub(super) fn wrong(&self, column: &str, expected: &str, got: &str, remedy: &str) -> Error {
        wrong_cell(self.path, self.place, column, [expected, &quoted(got), remedy])
    }
}

/// The error for a cell: the expected value, the actual one, and the remedy.
pub(super) fn wrong_cell(
    path: &Path,
    place: Place,
    column: &str,
    [expected, got, remedy]: [&str; 3],
) -> Error {
    let what = format!("{} in {place}", quoted(column));
    Mismatch::new(what, expected, got).remedy(remedy).in_layout(path)
}

//! A CSV file that lists images: columns `path` and `label`, and `split` for a test split.
//!
//! Paths are relative to the folder of the file. The order of a split is the order of its rows.
//! Classes are the labels, sorted as numbers if all of them are whole numbers, else by their bytes.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::rc::Rc;

use csv::StringRecord;

use super::identity::WatchedFiles;
use super::input;
use super::listing::{ImageFile, Listing};
use super::{Source, missing};
use crate::error::{Error, Mismatch, Result};

/// Largest size of a file, in bytes: enough for some millions of rows.
const BYTES_MAX: u64 = 1 << 30;
/// Longest path or label, in bytes.
const CELL_MAX: usize = 4096;
/// Longest record, in bytes, including columns that are not read.
const RECORD_MAX: usize = 1 << 20;
/// Most rows.
const ROWS_MAX: usize = 1 << 24;
/// Longest label that is sorted as a number, in characters.
const DIGITS_MAX: usize = 18;

/// Row of an image.
struct ImageRow {
    line: u64,
    path: String,
    label: String,
    is_test: bool,
}

/// Positions of the columns.
struct Columns {
    path: usize,
    label: usize,
    split: Option<usize>,
}

/// Lists the images of the file at `path`.
pub(super) fn list(path: &Path, watch: &WatchedFiles) -> Result<Listing> {
    // Opening a pipe would wait for its writer.
    let metadata = path.metadata().map_err(Error::io("open", path))?;
    if !metadata.is_file() {
        return Err(missing(Source::Csv, path));
    }
    let bytes = metadata.len();
    if bytes > BYTES_MAX {
        return Err(too_large(path, format!("at most {BYTES_MAX} bytes"), &bytes.to_string()));
    }
    watch.add(path)?;
    let file = input::open_file(path)?;
    let left = Rc::new(Cell::new(RECORD_MAX));
    let limited = Limited { file, left: left.clone() };
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(limited);
    let columns = columns(path, reader.headers().map_err(|error| unreadable(path, 1, &error))?)?;
    let (mut rows, mut record) = (vec![], StringRecord::new());
    loop {
        left.set(RECORD_MAX);
        let line = reader.position().line();
        match reader.read_record(&mut record) {
            Ok(true) if rows.len() < ROWS_MAX => rows.push(row(path, &columns, &record)?),
            Ok(true) => return Err(too_large(path, format!("at most {ROWS_MAX} rows"), "more")),
            Ok(false) => break,
            Err(error) => return Err(unreadable(path, line, &error)),
        }
    }
    Ok(listing(path.parent().unwrap_or(Path::new("")), rows, columns.split.is_some()))
}

/// A file with a limit of bytes, which is set anew before each record.
struct Limited {
    file: File,
    /// Bytes that may still be read.
    left: Rc<Cell<usize>>,
}

impl Read for Limited {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        let left = self.left.get().checked_sub(count);
        self.left.set(left.ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?);
        Ok(count)
    }
}

fn too_large(path: &Path, expected: String, got: &str) -> Error {
    let mismatch = Mismatch::new("the table", expected, got);
    mismatch.remedy("divide it into several datasets").in_layout(path)
}

fn columns(path: &Path, header: &StringRecord) -> Result<Columns> {
    for name in ["path", "label", "split"] {
        let count = header.iter().filter(|column| column.eq_ignore_ascii_case(name)).count();
        if count > 1 {
            let expected = format!("at most one column `{name}`");
            return Err(Mismatch::new("line 1", expected, count.to_string())
                .remedy("rename or remove the others, so that it is clear which one counts")
                .in_layout(path));
        }
    }
    let place = |name: &str| header.iter().position(|column| column.eq_ignore_ascii_case(name));
    let (Some(of_path), Some(of_label)) = (place("path"), place("label")) else {
        let got: Vec<&str> = header.iter().collect();
        let got = format!("`{}`", got.join(",").escape_debug().take(200).collect::<String>());
        return Err(Mismatch::new("line 1", "names of columns with `path` and `label`", got)
            .remedy("add a first line such as path,label or path,label,split")
            .in_layout(path));
    };
    Ok(Columns { path: of_path, label: of_label, split: place("split") })
}

fn row(path: &Path, columns: &Columns, record: &StringRecord) -> Result<ImageRow> {
    let cell = |place: usize| record.get(place).unwrap_or_default().to_string();
    let line = record.position().map_or(0, csv::Position::line);
    let wrong = |column: &str, expected: &str, got: &str| {
        let got = format!("`{}`", got.escape_debug().take(200).collect::<String>());
        Mismatch::new(format!("`{column}` in line {line}"), expected, got)
            .remedy("correct the line or remove it")
            .in_layout(path)
    };
    let row = ImageRow {
        line,
        path: cell(columns.path),
        label: cell(columns.label),
        is_test: match columns.split.map(cell).as_deref() {
            None | Some("train") => false,
            Some("test") => true,
            Some(other) => return Err(wrong("split", "train or test", other)),
        },
    };
    for (column, text) in [("path", &row.path), ("label", &row.label)] {
        if text.is_empty() || text.len() > CELL_MAX || text.chars().any(char::is_control) {
            let expected = format!("some text of at most {CELL_MAX} bytes, on one line");
            return Err(wrong(column, &expected, text));
        }
    }
    Ok(row)
}

/// Orders the classes, and divides the rows into splits. A label that only test images have is also
/// a class, because the file lists it.
fn listing(folder: &Path, rows: Vec<ImageRow>, has_splits: bool) -> Listing {
    let names: BTreeSet<&str> = rows.iter().map(|row| row.label.as_str()).collect();
    let mut classes: Vec<String> = names.into_iter().map(str::to_string).collect();
    let number =
        |text: &String| if text.len() <= DIGITS_MAX { text.parse::<i64>().ok() } else { None };
    if classes.iter().all(|class| number(class).is_some()) {
        classes.sort_by_key(number);
    }
    let labels: BTreeMap<&str, u32> = classes.iter().map(String::as_str).zip(0..).collect();
    let file = |row: &ImageRow| ImageFile {
        path: folder.join(&row.path),
        label: labels.get(row.label.as_str()).copied().unwrap_or_default(),
        line: Some(row.line),
    };
    let of = |is_test: bool| rows.iter().filter(|row| row.is_test == is_test).map(file).collect();
    let (train, test): (_, Vec<ImageFile>) = (of(false), of(true));
    let test = (has_splits && !test.is_empty()).then_some(test);
    Listing { train, test, classes, ..Listing::default() }
}

/// The error for a record that begins at about `line`.
fn unreadable(path: &Path, line: u64, error: &csv::Error) -> Error {
    let line = error.position().map_or(line, csv::Position::line);
    let (expected, got) = match error.kind() {
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            (format!("{expected_len} cells, as in the first line"), format!("{len}"))
        }
        csv::ErrorKind::Io(error) if error.kind() == io::ErrorKind::FileTooLarge => {
            (format!("at most {RECORD_MAX} bytes, its quoted line breaks included"), "more".into())
        }
        csv::ErrorKind::Utf8 { .. } => ("text in UTF-8".into(), "other bytes".into()),
        _ => ("a line of CSV".to_string(), error.to_string()),
    };
    Mismatch::new(format!("line {line}"), expected, got)
        .remedy("correct the line, or quote cells that have commas")
        .in_layout(path)
}

//! A CSV file that lists images: columns `path` and `label`, and `split` for a test split.
//!
//! Paths are relative to the folder of the file. The order of a split is that of the rows. Classes
//! are the labels, sorted as numbers if all of them are whole numbers, else by their bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;

use csv::StringRecord;

use super::identity::Watch;
use super::listing::{ImageFile, Listing};
use super::{Source, missing};
use crate::error::{Error, Mismatch, Result};

/// Largest size of a file, in bytes: that of some millions of rows.
const BYTES_MAX: u64 = 1 << 30;
/// Longest path or label, in bytes.
const CELL_MAX: usize = 4096;
/// Longest number that is a label, in digits.
const DIGITS_MAX: usize = 18;

/// Row of an image.
struct Row {
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
pub(super) fn list(path: &Path, watch: &Watch) -> Result<Listing> {
    // Opening a pipe would wait for its writer.
    let metadata = path.metadata().map_err(Error::io("open", path))?;
    if !metadata.is_file() {
        return Err(missing(Source::Csv, path));
    }
    let bytes = metadata.len();
    if bytes > BYTES_MAX {
        let expected = format!("at most {BYTES_MAX} bytes");
        return Err(Mismatch::new("the table", expected, format!("{bytes}"))
            .remedy("divide it into several datasets")
            .of(path));
    }
    watch.add(path)?;
    let file = File::open(path).map_err(Error::io("open", path))?;
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(file);
    let columns = columns(path, reader.headers().map_err(|error| unreadable(path, &error))?)?;
    let rows = reader.records().map(|record| {
        let record = record.map_err(|error| unreadable(path, &error))?;
        row(path, &columns, &record)
    });
    let rows: Vec<Row> = rows.collect::<Result<_>>()?;
    Ok(listing(path.parent().unwrap_or(Path::new("")), rows, columns.split.is_some()))
}

fn columns(path: &Path, header: &StringRecord) -> Result<Columns> {
    let place = |name: &str| header.iter().position(|column| column.eq_ignore_ascii_case(name));
    let (Some(of_path), Some(of_label)) = (place("path"), place("label")) else {
        let got: Vec<&str> = header.iter().collect();
        let got = format!("`{}`", got.join(",").escape_debug().take(200).collect::<String>());
        return Err(Mismatch::new("line 1", "names of columns with `path` and `label`", got)
            .remedy("add a first line such as path,label or path,label,split")
            .of(path));
    };
    Ok(Columns { path: of_path, label: of_label, split: place("split") })
}

fn row(path: &Path, columns: &Columns, record: &StringRecord) -> Result<Row> {
    let cell = |place: usize| record.get(place).unwrap_or_default().to_string();
    let line = record.position().map_or(0, csv::Position::line);
    let wrong = |column: &str, expected: &str, got: &str| {
        let got = format!("`{}`", got.escape_debug().take(200).collect::<String>());
        Mismatch::new(format!("`{column}` in line {line}"), expected, got)
            .remedy("correct the line or remove it")
            .of(path)
    };
    let row = Row {
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

/// Orders the classes, and sorts rows into splits. Test labels without training images are classes,
/// too: the file says that they are.
fn listing(folder: &Path, rows: Vec<Row>, has_splits: bool) -> Listing {
    let names: BTreeSet<&str> = rows.iter().map(|row| row.label.as_str()).collect();
    let mut classes: Vec<String> = names.into_iter().map(str::to_string).collect();
    let number = |text: &String| match text.len() <= DIGITS_MAX {
        true => text.parse::<i64>().ok(),
        false => None,
    };
    if classes.iter().all(|class| number(class).is_some()) {
        classes.sort_by_key(number);
    }
    let labels: BTreeMap<&str, u32> = classes.iter().map(String::as_str).zip(0..).collect();
    let file = |row: &Row| ImageFile {
        path: folder.join(&row.path),
        label: labels.get(row.label.as_str()).copied().unwrap_or_default(),
    };
    let of = |is_test: bool| rows.iter().filter(|row| row.is_test == is_test).map(file).collect();
    let (train, test): (_, Vec<ImageFile>) = (of(false), of(true));
    let test = (has_splits && !test.is_empty()).then_some(test);
    Listing { train, test, stray: vec![], classes }
}

fn unreadable(path: &Path, error: &csv::Error) -> Error {
    let line = error.position().map_or(1, csv::Position::line);
    let (expected, got) = match error.kind() {
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            (format!("{expected_len} cells, as in the first line"), format!("{len}"))
        }
        csv::ErrorKind::Utf8 { .. } => ("text in UTF-8".into(), "other bytes".into()),
        _ => ("a line of CSV".to_string(), error.to_string()),
    };
    Mismatch::new(format!("line {line}"), expected, got)
        .remedy("correct the line, or quote cells that have commas")
        .of(path)
}

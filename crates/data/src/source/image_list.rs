//! A CSV file that lists images: columns `path` and `label`, and `split` for a test split.
//!
//! Paths are relative to the folder of the file. The order of a split is the order of its rows.
//! Classes are the labels, sorted as numbers if all of them are whole numbers, else by their bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use csv::StringRecord;

use super::Source;
use super::csv_file::{self, CELL_MAX, Limited, Place, ROWS_MAX, quoted, too_large, unreadable};
use super::identity::WatchedFiles;
use super::listing::{ImageFile, Listing};
use crate::error::{Mismatch, Result};

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
    csv_file::check_file(Source::Csv, path, watch)?;
    let (limited, left) = Limited::open(path)?;
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(limited);
    let columns = columns(path, reader.headers().map_err(|error| unreadable(path, 1, &error))?)?;
    let (mut rows, mut record) = (vec![], StringRecord::new());
    loop {
        Limited::begin_record(&left);
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
        let expected = "names of columns with `path` and `label`";
        return Err(Mismatch::new("line 1", expected, quoted(&got.join(",")))
            .remedy("add a first line such as path,label or path,label,split")
            .in_layout(path));
    };
    Ok(Columns { path: of_path, label: of_label, split: place("split") })
}

fn row(path: &Path, columns: &Columns, record: &StringRecord) -> Result<ImageRow> {
    let cell = |place: usize| record.get(place).unwrap_or_default().to_string();
    let line = record.position().map_or(0, csv::Position::line);
    let wrong = |column: &str, expected: &str, got: &str| {
        let cell = [expected, &quoted(got), "correct the line or remove it"];
        csv_file::wrong_cell(path, Place::Line(line), column, cell)
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
        if !csv_file::is_name(text) {
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
    let number = |text: &String| csv_file::whole_number(text);
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

//! The names of the columns of a table, and its cells.

use std::collections::HashMap;
use std::path::Path;

use super::file::TableFile;
use crate::error::{Error, Mismatch, Result};
use crate::notes;
use crate::source::csv_file::{self, CELL_MAX, Row, quoted};
use crate::source::table_rules::fits;

/// Name of the column that divides the rows into splits, in any case.
const SPLIT: &str = "split";
/// Spellings of a missing value: the list of pandas 2, and `NAN` and `NONE`.
const MISSING: [&str; 21] = [
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN",
    "<NA>", "N/A", "NA", "NAN", "NONE", "NULL", "NaN", "None", "n/a", "nan", "null",
];
/// 2^53: f64 holds every whole number up to this one exactly.
const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;

/// A cell of a column of features or targets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Cell<'a> {
    Missing,
    /// A number that is finite as an f32.
    Number(f64),
    /// An infinite number, or one that is too large for an f32.
    TooLarge,
    Text(&'a str),
}

impl<'a> Cell<'a> {
    /// Reads a cell without the space around it.
    pub(super) fn of(text: &'a str) -> Self {
        if MISSING.contains(&text) {
            return Self::Missing;
        }
        match text.parse::<f64>() {
            Ok(number) if fits(number) => Self::Number(number),
            Ok(number) if !number.is_nan() => Self::TooLarge,
            _ => Self::Text(text),
        }
    }
}

/// Parses a cell with a whole number, such as `3`, `+3` or `3.0`.
pub(super) fn whole(text: &str) -> Option<i64> {
    csv_file::whole_number(text).or_else(|| {
        let number: f64 = text.parse().ok()?;
        (number.fract() == 0.0 && number.abs() <= WHOLE_MAX).then_some(number as i64)
    })
}

/// Names of the columns.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Header {
    pub(super) names: Vec<String>,
    /// Position of each name.
    places: HashMap<String, usize>,
    /// Position of the column of splits.
    pub(super) split: Option<usize>,
    /// Where the names are in the file, for messages.
    pub(super) header: &'static str,
}

impl Header {
    /// Opens the file at `path`, and reads the names of its columns.
    ///
    /// # Errors
    /// [`Error::Layout`]: no names, a column without a name, two columns of one name; the
    /// errors of reading.
    pub(super) fn open(path: &Path) -> Result<(Self, TableFile)> {
        let mut file = TableFile::open(path)?;
        let header = file.header();
        let wrong = |expected: &str, got: String, remedy: &str| {
            Err(Mismatch::new(header, expected, got).remedy(remedy).in_layout(path))
        };
        let Some(row) = file.next_row()? else {
            let remedy = "add a first line such as size,colour,price";
            return wrong("names of columns", "an empty file".into(), remedy);
        };
        let names = (0..row.len()).map(|place| {
            let column = format!("column {}", place + 1);
            row.cell(place, &column).map(str::to_string)
        });
        let names = names.collect::<Result<Vec<String>>>()?;
        if let Some(place) = names.iter().position(|name| !csv_file::is_name(name)) {
            let expected =
                format!("names of columns, each of at most {CELL_MAX} bytes on one line");
            let got = format!("{} for column {}", quoted(&names[place]), place + 1);
            return wrong(&expected, got, "name the column or remove it");
        }
        let places: HashMap<String, usize> = names.iter().cloned().zip(0..).collect();
        let mut named = names.iter().zip(0..);
        // The map has the last position of a name.
        if let Some((twice, _)) = named.find(|(name, place)| places.get(*name) != Some(place)) {
            let got = format!("{} twice", quoted(twice));
            return wrong("different names of columns", got, "rename or remove one of them");
        }
        let is_split = |name: &String| name.eq_ignore_ascii_case(SPLIT);
        let split = names.iter().position(is_split);
        if names.iter().filter(|name| is_split(name)).count() > 1 {
            let remedy = "rename or remove the others";
            return wrong("at most one column `split`, in any case", "more".into(), remedy);
        }
        Ok((Self { names, places, split, header }, file))
    }

    /// Opens the file again, and reads the names again.
    ///
    /// # Errors
    /// [`Error::Changed`] for other names; the errors of [`Self::open`].
    pub(super) fn reopen(&self, path: &Path) -> Result<TableFile> {
        let (again, file) = Self::open(path)?;
        if again == *self { Ok(file) } else { Err(Error::Changed { path: path.into() }) }
    }

    /// Position of the column of this name, which rules have.
    ///
    /// # Errors
    /// [`Error::Layout`] for a column that the file lacks.
    pub(super) fn require(&self, path: &Path, name: &str) -> Result<usize> {
        let place = self.position(name).filter(|place| self.split != Some(*place));
        place.ok_or_else(|| {
            let expected = format!("names of columns with {}, as in the rules", quoted(name));
            Mismatch::new(self.header, expected, self.listed())
                .remedy("give a table with the columns of the training table")
                .in_layout(path)
        })
    }

    /// Position of the column of this name.
    pub(super) fn position(&self, name: &str) -> Option<usize> {
        self.places.get(name).copied()
    }

    /// The names of the columns other than that of splits, for messages.
    pub(super) fn listed(&self) -> String {
        let mut names = self.names.clone();
        self.split.map(|split| names.remove(split));
        const SHOWN: usize = 30;
        let more = names.len().saturating_sub(SHOWN);
        let shown: Vec<String> = names.iter().take(SHOWN).map(|name| quoted(name)).collect();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{more}", shown.join(", "))
    }

    /// Whether a row is of the test split.
    ///
    /// # Errors
    /// [`Error::Layout`] for another split than train or test.
    pub(super) fn is_test(&self, row: &Row<'_>) -> Result<bool> {
        let Some(split) = self.split else { return Ok(false) };
        match row.cell(split, SPLIT)? {
            "train" => Ok(false),
            "test" => Ok(true),
            other => {
                let remedy = "correct it, or rename the column if it is a feature";
                Err(row.wrong(SPLIT, "train or test", other, remedy))
            }
        }
    }
}

/// Checks the text of a category or class.
///
/// # Errors
/// [`Error::Layout`] for text that is too long, or of several lines.
pub(super) fn check_name(row: &Row<'_>, column: &str, text: &str) -> Result<()> {
    if csv_file::is_name(text) {
        return Ok(());
    }
    let expected = format!("a number, or text of at most {CELL_MAX} bytes on one line");
    Err(row.wrong(column, &expected, text, "correct the line, or remove the column"))
}

/// The error for a missing target.
pub(super) fn missing_target(row: &Row<'_>, column: &str, text: &str) -> Error {
    row.wrong(column, "a target", text, "give it a value, or remove the line")
}

/// The error for a number that is infinite or too large.
pub(super) fn too_large(row: &Row<'_>, column: &str, text: &str) -> Error {
    row.wrong(column, "a finite number of at most 3.4e38", text, "correct it, or remove the line")
}

/// A few names, for messages.
pub(super) fn few(names: &[String]) -> String {
    notes::some_of(names.iter().map(|name| quoted(name)))
}

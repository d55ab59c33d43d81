//! Rows as vectors and targets, by the rules of a table.

use std::collections::HashMap;
use std::path::Path;

use super::cells::{self, Cell, Header};
use crate::error::{Error, Result};
use crate::source::csv_file::Row;
use crate::source::table_rules::{FeatureColumn, FeatureRule, TargetColumns};
use crate::targets::{Standardization, StoredTargets};

/// A column of features, found in the file.
struct EncodedColumn<'a> {
    place: usize,
    column: &'a FeatureColumn,
    /// Position of each category; empty for numbers.
    categories: HashMap<&'a str, usize>,
}

/// Features of rows.
pub(super) struct FeatureEncoder<'a> {
    columns: Vec<EncodedColumn<'a>>,
}

impl<'a> FeatureEncoder<'a> {
    /// Finds the columns in the file.
    ///
    /// # Errors
    /// [`Error::Layout`] for a column that the file lacks.
    pub(super) fn new(path: &Path, header: &Header, features: &'a [FeatureColumn]) -> Result<Self> {
        let encoded = |column: &'a FeatureColumn| {
            let place = header.require(path, &column.name)?;
            let categories = match &column.rule {
                FeatureRule::Numeric { .. } => HashMap::new(),
                FeatureRule::Categorical { categories } => {
                    categories.iter().map(String::as_str).zip(0..).collect()
                }
            };
            Ok(EncodedColumn { place, column, categories })
        };
        Ok(Self { columns: features.iter().map(encoded).collect::<Result<_>>()? })
    }

    /// Appends the features of a row, f32 \[F\].
    ///
    /// # Errors
    /// [`Error::Layout`] with line and column: text for a number, a number that is too large, a
    /// missing value without a rule, a category that the rules do not have.
    pub(super) fn encode(&self, row: &Row<'_>, features: &mut Vec<f32>) -> Result<()> {
        for encoded in &self.columns {
            let text = row.cell(encoded.place, &encoded.column.name)?;
            match &encoded.column.rule {
                FeatureRule::Numeric { fill } => {
                    features.push(number(row, encoded.column, text, *fill)? as f32);
                }
                FeatureRule::Categorical { categories } => {
                    let is_missing = Cell::of(text) == Cell::Missing;
                    let category = if is_missing { "" } else { text };
                    let Some(place) = encoded.categories.get(category) else {
                        if is_missing {
                            return Err(missing(row, encoded.column, text));
                        }
                        return Err(encoded.unknown(row, text, categories));
                    };
                    let start = features.len();
                    features.resize(start + categories.len(), 0.0);
                    features[start + place] = 1.0;
                }
            }
        }
        Ok(())
    }
}

impl EncodedColumn<'_> {
    /// The error for a category that no training row has.
    fn unknown(&self, row: &Row<'_>, text: &str, categories: &[String]) -> Error {
        let (len, few) = (categories.len(), cells::few(categories));
        let expected = format!("one of the {len} categories of the training rows ({few})");
        let remedy = "correct it, remove the line, or train with rows of this category";
        row.wrong(&self.column.name, &expected, text, remedy)
    }
}

/// The error for a missing value without a rule.
fn missing(row: &Row<'_>, column: &FeatureColumn, text: &str) -> Error {
    let remedy = "give it a value or remove the line, or train with `missing` fill \
                  (--missing fill)";
    row.wrong(&column.name, "a value", text, remedy)
}

/// The number of a cell.
fn number(row: &Row<'_>, column: &FeatureColumn, text: &str, fill: Option<f64>) -> Result<f64> {
    match (Cell::of(text), fill) {
        (Cell::Number(number), _) | (Cell::Missing, Some(number)) => Ok(number),
        (Cell::Missing, None) => Err(missing(row, column, text)),
        (Cell::TooLarge, _) => Err(cells::too_large(row, &column.name, text)),
        (Cell::Text(_), _) => {
            let expected = "a number, as in the training rows";
            Err(row.wrong(&column.name, expected, text, "correct it, or remove the line"))
        }
    }
}

/// Targets of rows.
pub(super) enum TargetEncoder<'a> {
    Classes {
        place: usize,
        column: &'a str,
        names: &'a [String],
        classes: HashMap<&'a str, u32>,
        /// Whether the classes are whole numbers, which may be written in several ways.
        are_whole: bool,
    },
    Numbers {
        columns: Vec<(usize, &'a str)>,
        standardization: Standardization,
    },
}

impl<'a> TargetEncoder<'a> {
    /// Finds the columns in the file.
    ///
    /// # Errors
    /// [`Error::Layout`] for a column that the file lacks.
    pub(super) fn new(path: &Path, header: &Header, targets: &'a TargetColumns) -> Result<Self> {
        Ok(match targets {
            TargetColumns::Classes { column, classes: names } => Self::Classes {
                place: header.require(path, column)?,
                column,
                names,
                classes: names.iter().map(String::as_str).zip(0..).collect(),
                are_whole: names.iter().all(|name| {
                    cells::whole(name).is_some_and(|number| number.to_string() == *name)
                }),
            },
            TargetColumns::Numbers { columns } => {
                let (mean, std) = columns.iter().map(|column| (column.mean, column.std)).unzip();
                let place = |name: &'a String| Ok((header.require(path, name)?, name.as_str()));
                let columns = columns.iter().map(|column| place(&column.name));
                let standardization = Standardization { mean, std };
                Self::Numbers { columns: columns.collect::<Result<_>>()?, standardization }
            }
        })
    }

    /// Appends the targets of a row; numbers are standardised.
    ///
    /// # Errors
    /// [`Error::Layout`] with line and column: a missing target, a class that the rules do not
    /// have, text for a number, a number that is too large.
    pub(super) fn encode(&self, row: &Row<'_>, targets: &mut StoredTargets) -> Result<()> {
        match (self, targets) {
            (Self::Classes { place, column, names, classes, are_whole }, targets) => {
                let text = row.cell(*place, column)?;
                if Cell::of(text) == Cell::Missing {
                    return Err(cells::missing_target(row, column, text));
                }
                let number = cells::whole(text).filter(|_| *are_whole).map(|n| n.to_string());
                let Some(class) = classes.get(number.as_deref().unwrap_or(text)) else {
                    let (len, few) = (names.len(), cells::few(names));
                    let expected = format!("one of the {len} classes of the training rows ({few})");
                    let remedy = if *are_whole {
                        "correct it, remove the line, or train with rows of this class; for \
                         numbers, give task regress (--task regress)"
                    } else {
                        "correct it, remove the line, or train with rows of this class"
                    };
                    return Err(row.wrong(column, &expected, text, remedy));
                };
                if let StoredTargets::Classes(targets) = targets {
                    targets.push(*class);
                }
            }
            (Self::Numbers { columns, standardization }, StoredTargets::Values { values, .. }) => {
                for (output, (place, column)) in columns.iter().enumerate() {
                    let text = row.cell(*place, column)?;
                    let number = match Cell::of(text) {
                        Cell::Number(number) => standardization.apply(output, number),
                        Cell::Missing => return Err(cells::missing_target(row, column, text)),
                        Cell::TooLarge => return Err(cells::too_large(row, column, text)),
                        Cell::Text(_) => {
                            let expected = "a number, as in the training rows";
                            let remedy = "correct it, or remove the line";
                            return Err(row.wrong(column, expected, text, remedy));
                        }
                    };
                    if !number.is_finite() {
                        let mean = standardization.mean[output];
                        let expected = format!("a number nearer to the training mean, {mean}");
                        let remedy = "correct it, or remove the line";
                        return Err(row.wrong(column, &expected, text, remedy));
                    }
                    values.push(number);
                }
            }
            // The targets have the form of the rules.
            (Self::Numbers { .. }, StoredTargets::Classes(_)) => {
                debug_assert!(false, "numbers");
            }
        }
        Ok(())
    }
}

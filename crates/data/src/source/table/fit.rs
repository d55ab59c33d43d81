//! Rules that follow from the training rows of a table.
//!
//! The file is read twice: for the kind of each column, then for categories, classes and the
//! moments of target numbers. A file of many numbers would not fit in memory as text.

use std::collections::BTreeSet;
use std::path::Path;

use super::cells::{self, Cell, Header};
use crate::error::{Error, Mismatch, Result};
use crate::notes;
use crate::source::csv_file::{Place, Row, quoted, wrong_cell};
use crate::source::table_rules::{
    CATEGORIES_MAX, FEATURES_MAX, FeatureColumn, FeatureRule, MissingValues, NumberColumn,
    TableOptions, TableRules, TargetColumns,
};
use crate::source::{Source, Split};
use crate::targets::{OUTPUTS_MAX, OutputMoments};

/// A cell that decided on the kind of its column.
struct Evidence {
    place: Place,
    text: String,
}

impl Evidence {
    fn of(row: &Row<'_>, text: &str) -> Self {
        Self { place: row.place, text: text.into() }
    }
}

/// Training values of a column so far.
struct Column<'a> {
    place: usize,
    name: &'a str,
    /// Number of numbers that were added.
    count: u64,
    /// Their mean.
    mean: f64,
    /// The first text.
    text: Option<Evidence>,
    /// The first number that is infinite or too large.
    too_large: Option<Evidence>,
    /// Whether a number is not whole.
    has_fraction: bool,
}

impl<'a> Column<'a> {
    fn new(place: usize, name: &'a str) -> Self {
        let (count, mean, text, too_large) = (0, 0.0, None, None);
        Self { place, name, count, mean, text, too_large, has_fraction: false }
    }

    /// Adds the row's value; returns whether it is missing.
    fn add(&mut self, row: &Row<'_>) -> Result<bool> {
        let text = row.cell(self.place, self.name)?;
        match Cell::of(text) {
            Cell::Missing => return Ok(true),
            Cell::Number(number) => {
                self.count += 1;
                self.mean += (number - self.mean) / self.count as f64;
                self.has_fraction |= cells::whole(text).is_none();
            }
            Cell::TooLarge => {
                self.too_large.get_or_insert_with(|| Evidence::of(row, text));
            }
            Cell::Text(_) => {
                self.text.get_or_insert_with(|| Evidence::of(row, text));
            }
        }
        Ok(false)
    }

    /// Checks that no number is infinite or too large.
    fn check_numbers(&self, path: &Path) -> Result<()> {
        let Some(Evidence { place, text }) = &self.too_large else { return Ok(()) };
        let cell = ["a finite number of at most 3.4e38", &quoted(text), "correct the value"];
        Err(wrong_cell(path, *place, self.name, cell))
    }
}

/// Derives the rules of the table at `path` from its training rows.
///
/// # Errors
/// [`Error::Argument`]: target columns that do not exist or are named twice; [`Error::Layout`]: a
/// value that does not fit its column, with line and column, too many categories or features, or no
/// value at all; [`Error::EmptySplit`]; the errors of reading.
pub(super) fn derive(path: &Path, header: &Header, options: &TableOptions) -> Result<TableRules> {
    let targets = target_places(header, &options.target)?;
    let is_feature = |place: &usize| Some(*place) != header.split && !targets.contains(place);
    let columns = |places: &mut dyn Iterator<Item = usize>| {
        places.map(|place| Column::new(place, &header.names[place])).collect::<Vec<_>>()
    };
    let mut features = columns(&mut (0..header.names.len()).filter(is_feature));
    let mut targets = columns(&mut targets.iter().copied());
    if features.is_empty() {
        return Err(Mismatch::new(
            header.header,
            "a column of features beside the targets",
            "none",
        )
        .remedy("add one")
        .in_layout(path));
    }
    let mut rows = 0_u64;
    each_training_row(path, header, &mut |row| {
        rows += 1;
        for column in &mut targets {
            if column.add(row)? {
                let text = row.cell(column.place, column.name)?;
                return Err(cells::missing_target(row, column.name, text));
            }
        }
        for column in &mut features {
            if column.add(row)? && options.missing == MissingValues::Refuse {
                let text = row.cell(column.place, column.name)?;
                return Err(missing_feature(row, column.name, text));
            }
        }
        Ok(())
    })?;
    if rows == 0 {
        let remedy = Source::Table.where_to_get().into();
        return Err(Error::EmptySplit { path: path.into(), split: Split::Train.name(), remedy });
    }
    let mut features = feature_sets(path, &features, options.missing)?;
    let mut targets = TargetSet::of(path, &targets, options.numbers)?;
    each_training_row(path, header, &mut |row| {
        features.iter_mut().try_for_each(|column| column.add(row))?;
        targets.add(row)
    })?;
    let targets = targets.columns(path)?;
    Ok(TableRules { features: feature_columns(path, features)?, targets })
}

/// The error for a missing feature.
fn missing_feature(row: &Row<'_>, column: &str, text: &str) -> Error {
    let remedy = "give it a value or remove the line, or fill missing values with `missing` fill \
                  (--missing fill)";
    row.wrong(column, "a value", text, remedy)
}

/// Calls `each` for the training rows, in their order.
fn each_training_row(
    path: &Path,
    header: &Header,
    each: &mut dyn FnMut(&Row<'_>) -> Result<()>,
) -> Result<()> {
    let mut file = header.reopen(path)?;
    while let Some(row) = file.next_row()? {
        if !header.is_test(&row)? {
            each(&row)?;
        }
    }
    Ok(())
}

/// Positions of the target columns.
fn target_places(header: &Header, names: &[String]) -> Result<Vec<usize>> {
    let wrong = |expected: String, got: String| Error::Argument {
        operation: "table",
        argument: "target",
        expected,
        got,
        remedy: "name columns of the file, such as --target price".into(),
    };
    if names.is_empty() {
        return Err(wrong(format!("one or some of {}", header.listed()), "none".into()));
    }
    let mut places = vec![];
    for name in names.iter().map(|name| name.trim()) {
        let place = header.position(name).filter(|place| header.split != Some(*place));
        let Some(place) = place else {
            return Err(wrong(format!("one or some of {}", header.listed()), quoted(name)));
        };
        if places.contains(&place) {
            return Err(wrong("different columns".into(), format!("{} twice", quoted(name))));
        }
        places.push(place);
    }
    if places.len() > OUTPUTS_MAX as usize {
        return Err(wrong(format!("at most {OUTPUTS_MAX} columns"), places.len().to_string()));
    }
    Ok(places)
}

/// A column of features of a known kind.
struct FeatureSet<'a> {
    column: &'a Column<'a>,
    /// Number that stands for a missing value.
    fill: Option<f64>,
    /// Categories so far; `None` for a column of numbers.
    categories: Option<BTreeSet<String>>,
}

fn feature_sets<'a>(
    path: &Path,
    columns: &'a [Column<'a>],
    missing: MissingValues,
) -> Result<Vec<FeatureSet<'a>>> {
    let of_column = |column: &'a Column<'a>| {
        if let Some(Evidence { place, text }) = &column.text {
            if column.count > 0 {
                notes::say(&format!(
                    "column {} has categories because of {} in {place}; {} of its values are \
                     numbers",
                    quoted(column.name),
                    quoted(text),
                    column.count
                ));
            }
            return Ok(FeatureSet { column, fill: None, categories: Some(BTreeSet::new()) });
        }
        column.check_numbers(path)?;
        if column.count == 0 {
            let what = format!("column {}", quoted(column.name));
            return Err(Mismatch::new(what, "at least one value in a training row", "none")
                .remedy("remove the column")
                .in_layout(path));
        }
        let fill = (missing == MissingValues::Fill).then_some(column.mean);
        Ok(FeatureSet { column, fill, categories: None })
    };
    let sets = columns.iter().map(of_column).collect::<Result<Vec<_>>>()?;
    check_features(path, &sets).map(|()| sets)
}

/// Checks the number of features so far.
fn check_features(path: &Path, sets: &[FeatureSet<'_>]) -> Result<()> {
    let mut features = 0;
    for FeatureSet { column, categories, .. } in sets {
        features += categories.as_ref().map_or(1, BTreeSet::len);
        if features > FEATURES_MAX {
            let expected = format!("at most {FEATURES_MAX} features, a category counting as one");
            let got = format!("more from column {} on", quoted(column.name));
            return Err(Mismatch::new("the table", expected, got)
                .remedy("leave out columns of many categories")
                .in_layout(path));
        }
    }
    Ok(())
}

impl FeatureSet<'_> {
    /// Adds the row's category.
    fn add(&mut self, row: &Row<'_>) -> Result<()> {
        let Some(categories) = &mut self.categories else { return Ok(()) };
        let text = row.cell(self.column.place, self.column.name)?;
        let category = if Cell::of(text) == Cell::Missing { "" } else { text };
        if categories.contains(category) {
            return Ok(());
        }
        if !category.is_empty() {
            cells::check_name(row, self.column.name, text)?;
        }
        if categories.len() == CATEGORIES_MAX {
            let first = match &self.column.text {
                Some(Evidence { place, text }) => {
                    format!("; it has categories because of {} in {place}", quoted(text))
                }
                None => String::new(),
            };
            let expected = format!("one of at most {CATEGORIES_MAX} categories{first}");
            let remedy = "correct that value, or leave the column out";
            return Err(row.wrong(self.column.name, &expected, text, remedy));
        }
        categories.insert(category.to_string());
        Ok(())
    }
}

fn feature_columns(path: &Path, sets: Vec<FeatureSet<'_>>) -> Result<Vec<FeatureColumn>> {
    check_features(path, &sets)?;
    let column = |FeatureSet { column, fill, categories }: FeatureSet<'_>| FeatureColumn {
        name: column.name.to_string(),
        rule: match categories {
            None => FeatureRule::Numeric { fill },
            Some(all) => FeatureRule::Categorical { categories: all.into_iter().collect() },
        },
    };
    Ok(sets.into_iter().map(column).collect())
}

/// Training targets so far.
enum TargetSet<'a> {
    /// Classes that are texts.
    Texts(&'a Column<'a>, BTreeSet<String>),
    /// Classes that are whole numbers.
    Wholes(&'a Column<'a>, BTreeSet<i64>),
    Numbers(&'a [Column<'a>], OutputMoments),
}

impl<'a> TargetSet<'a> {
    /// The kind of the targets.
    ///
    /// # Errors
    /// [`Error::Layout`] for text among numbers, and numbers that are too large.
    fn of(path: &Path, columns: &'a [Column<'a>], numbers: bool) -> Result<Self> {
        let is_class = |column: &Column<'_>| {
            column.text.is_some() || !column.has_fraction && column.too_large.is_none()
        };
        match columns {
            [Column { name, text: Some(Evidence { place, text }), has_fraction: true, .. }]
                if !numbers =>
            {
                let expected = "a number, as other targets, which are not whole";
                let remedy = "correct the value; classes are text, or whole numbers";
                return Err(wrong_cell(path, *place, name, [expected, &quoted(text), remedy]));
            }
            [column] if !numbers && is_class(column) => {
                return Ok(match column.text {
                    Some(_) => Self::Texts(column, BTreeSet::new()),
                    None => Self::Wholes(column, BTreeSet::new()),
                });
            }
            _ => {}
        }
        for column in columns {
            if let Some(Evidence { place, text }) = &column.text {
                let expected = match columns {
                    [_] => "a number, for task regress",
                    _ => "a number, as every one of several targets",
                };
                let remedy = "correct the value, or give one target column of classes";
                let cell = [expected, &quoted(text), remedy];
                return Err(wrong_cell(path, *place, column.name, cell));
            }
            column.check_numbers(path)?;
        }
        Ok(Self::Numbers(columns, OutputMoments::new(columns.len())))
    }

    /// Adds the row's targets.
    fn add(&mut self, row: &Row<'_>) -> Result<()> {
        match self {
            Self::Texts(column, classes) => {
                let text = row.cell(column.place, column.name)?;
                if !classes.contains(text) {
                    cells::check_name(row, column.name, text)?;
                    check_classes(row, column.name, classes.len())?;
                    classes.insert(text.to_string());
                }
            }
            Self::Wholes(column, classes) => {
                let text = row.cell(column.place, column.name)?;
                classes.extend(cells::whole(text));
                check_classes(row, column.name, classes.len().saturating_sub(1))?;
            }
            Self::Numbers(columns, moments) => {
                for column in *columns {
                    if let Cell::Number(number) = Cell::of(row.cell(column.place, column.name)?) {
                        moments.add(number);
                    }
                }
            }
        }
        Ok(())
    }

    fn columns(self, path: &Path) -> Result<TargetColumns> {
        Ok(match self {
            Self::Texts(column, classes) => TargetColumns::Classes {
                column: column.name.to_string(),
                classes: classes.into_iter().collect(),
            },
            Self::Wholes(column, classes) => TargetColumns::Classes {
                column: column.name.to_string(),
                classes: classes.iter().map(i64::to_string).collect(),
            },
            Self::Numbers(columns, moments) => {
                let constants = moments.standardization();
                let constants = constants.mean.into_iter().zip(constants.std);
                let column = |(column, (mean, std)): (&Column<'_>, (f64, f64))| {
                    let name = column.name.to_string();
                    if std.is_finite() {
                        return Ok(NumberColumn { name, mean, std });
                    }
                    let what = format!("the deviation of column {}", quoted(column.name));
                    Err(Mismatch::new(what, "finite", std.to_string())
                        .remedy("scale its numbers down")
                        .in_layout(path))
                };
                let columns = columns.iter().zip(constants).map(column);
                TargetColumns::Numbers { columns: columns.collect::<Result<_>>()? }
            }
        })
    }
}

/// Checks that one more class, beside `known` classes, is within the limit.
fn check_classes(row: &Row<'_>, column: &str, known: usize) -> Result<()> {
    if known < OUTPUTS_MAX as usize {
        return Ok(());
    }
    let text = "one more";
    let remedy = "for whole numbers that are no classes, give task regress (--task regress)";
    Err(row.wrong(column, &format!("one of at most {OUTPUTS_MAX} classes"), text, remedy))
}

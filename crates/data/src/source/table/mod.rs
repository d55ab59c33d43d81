//! A table in a file: every row is a vector, with a class or with numbers (D13).
//!
//! The file is CSV, whose first line has the names of the columns, or with the feature `parquet`
//! Parquet or Arrow IPC, whose values are read as the text that a CSV file would have. A column
//! `split` (train or test) divides the rows; without it all rows are for training. Target columns
//! are named, all others are features: one number, or one value for each category ([`TableRules`]).
//! The rules follow from the training rows alone, or come from another table. The order of a split
//! is the order of its rows.

mod cells;
#[cfg(feature = "parquet")]
mod columns;
mod encode;
mod file;
mod fit;
mod format;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

use self::cells::Header;
use self::encode::{FeatureEncoder, TargetEncoder};
use super::csv_file::{self, quoted};
use super::identity::WatchedFiles;
use super::table_rules::{
    FeatureColumn, FeatureRule, MissingValues, TableOptions, TableRules, TargetColumns,
};
use super::{Layout, OnBad, Reader, Sink, Source, Split, TestSplit};
use crate::error::{Error, Result, damaged};
use crate::notes;
use crate::shape::{InputKind, SampleShape, StoredType};
use crate::targets::{Standardization, StoredTargets, TargetForm, TargetKind};

/// Number of classes of whole numbers above which a note asks whether they are classes.
const CLASSES_NOTED: usize = 100;

/// A dataset in a table.
pub(crate) struct TableReader {
    path: PathBuf,
    header: Header,
    rules: Arc<TableRules>,
    layout: Layout,
    /// Train, then test.
    targets: [StoredTargets; 2],
    /// Columns that are not read.
    unread: Vec<String>,
    /// Whether the notes about the file have been reported.
    reported: Once,
}

/// Opens the file at `path`: derives the rules, unless `options` have some, and reads the targets.
///
/// # Errors
/// [`Error::Argument`] for options that do not fit the file; [`Error::Layout`] with line and column
/// for a value that does not fit; [`Error::EmptySplit`]; the errors of reading.
pub(crate) fn open(
    options: &TableOptions,
    path: &Path,
    watch: &WatchedFiles,
) -> Result<TableReader> {
    csv_file::check_file(Source::Table, path, watch)?;
    let (header, _) = Header::open(path)?;
    let rules = match &options.rules {
        Some(rules) => {
            check_options(rules, options)?;
            rules.clone()
        }
        None => Arc::new(fit::derive(path, &header, options)?),
    };
    let targets = read_targets(path, &header, &rules)?;
    let (kind, outputs, standardization) = outputs(&rules);
    let test = match targets[1].len() {
        0 => TestSplit::Missing("rows whose `split` is test"),
        len => TestSplit::Samples(len),
    };
    let layout = Layout {
        kind: InputKind::Vector,
        shape: SampleShape { channels: rules.width(), height: 1, width: 1 },
        stored: StoredType::F32,
        targets: kind,
        classes: outputs,
        standardization,
        train: targets[0].len(),
        test,
    };
    let features = rules.features.iter().map(|column| column.name.as_str());
    let split = header.split.map(|split| header.names[split].as_str());
    let read: HashSet<&str> = features.chain(rules.target_names()).chain(split).collect();
    let unread = header.names.iter().filter(|name| !read.contains(name.as_str()));
    let unread = unread.cloned().collect();
    let path = path.to_path_buf();
    Ok(TableReader { path, header, rules, layout, targets, unread, reported: Once::new() })
}

/// Checks that given rules are sound, and that the other options do not contradict them.
fn check_options(rules: &TableRules, options: &TableOptions) -> Result<()> {
    rules.check()?;
    let names: Vec<String> = rules.target_names().map(str::to_string).collect();
    let given: Vec<&str> = options.target.iter().map(|name| name.trim()).collect();
    if !given.is_empty() && names != given {
        return Err(Error::Argument {
            operation: "table",
            argument: "target",
            expected: format!("{}, as in the given rules", cells::few(&names)),
            got: quoted(&given.join(",")),
            remedy: "leave the targets out".into(),
        });
    }
    let lacks = |column: &FeatureColumn| column.rule == FeatureRule::Numeric { fill: None };
    let lacking = rules.features.iter().find(|column| lacks(column));
    if let (MissingValues::Fill, Some(column)) = (options.missing, lacking) {
        return Err(Error::Argument {
            operation: "table",
            argument: "missing",
            expected: "refuse, as in the given rules".into(),
            got: format!("fill, and no rule to fill {}", quoted(&column.name)),
            remedy: "train with --missing fill".into(),
        });
    }
    Ok(())
}

/// Kind, names and constants of the targets.
fn outputs(rules: &TableRules) -> (TargetKind, Vec<String>, Standardization) {
    match &rules.targets {
        TargetColumns::Classes { classes, .. } => {
            (TargetKind::Classes, classes.clone(), Standardization::default())
        }
        TargetColumns::Numbers { columns } => {
            let (mean, std) = columns.iter().map(|column| (column.mean, column.std)).unzip();
            let names = columns.iter().map(|column| column.name.clone()).collect();
            (TargetKind::Numbers, names, Standardization { mean, std })
        }
    }
}

/// Reads the targets of train, then of test.
fn read_targets(path: &Path, header: &Header, rules: &TableRules) -> Result<[StoredTargets; 2]> {
    let encoder = TargetEncoder::new(path, header, &rules.targets)?;
    // The features must exist too, before targets are read.
    FeatureEncoder::new(path, header, &rules.features)?;
    let (kind, outputs, _) = outputs(rules);
    let form = TargetForm::new(kind, outputs.len());
    let mut splits = [(); 2].map(|()| StoredTargets::with_capacity(form, 0));
    let mut file = header.reopen(path)?;
    while let Some(row) = file.next_row()? {
        let split = usize::from(header.is_test(&row)?);
        encoder.encode(&row, &mut splits[split])?;
    }
    Ok(splits)
}

impl TableReader {
    /// Notes about the file, once.
    fn report(&self) {
        self.reported.call_once(|| {
            if !self.unread.is_empty() {
                let names = notes::some_of(self.unread.iter().map(|name| quoted(name)));
                notes::say(&format!(
                    "only the columns of the given rules are read; ignored: {names}"
                ));
            }
            if let TargetColumns::Classes { column, classes } = &self.rules.targets {
                let are_whole = classes.iter().all(|class| cells::whole(class).is_some());
                let (column, count) = (quoted(column), classes.len());
                if count > CLASSES_NOTED && are_whole {
                    notes::say(&format!(
                        "column {column} of whole numbers is trained as {count} classes; task \
                         regress makes it numbers"
                    ));
                } else if count > CLASSES_NOTED {
                    notes::say(&format!("column {column} of text is trained as {count} classes"));
                }
            }
        });
    }

    /// The error for a file that has another number of rows than when it was opened.
    fn other_rows(&self, expected: usize, got: &str) -> Error {
        damaged(&self.path, 0, "the number of rows", format!("{expected}, as before"), got)
    }
}

impl Reader for TableReader {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn table_rules(&self) -> Option<&TableRules> {
        Some(&self.rules)
    }

    fn read(&self, split: Split, _on_bad: OnBad<'_>, sink: Sink<'_>) -> Result<()> {
        self.report();
        let targets = &self.targets[split as usize];
        let mut file = self.header.reopen(&self.path)?;
        let encoder = FeatureEncoder::new(&self.path, &self.header, &self.rules.features)?;
        let chunk = self.layout.chunk_samples();
        let mut values: Vec<f32> = vec![];
        let (mut start, mut len) = (0, 0);
        while let Some(row) = file.next_row()? {
            if self.header.is_test(&row)? != (split == Split::Test) {
                continue;
            }
            if len == targets.len() {
                return Err(self.other_rows(targets.len(), "more"));
            }
            encoder.encode(&row, &mut values)?;
            len += 1;
            if len - start == chunk {
                sink(bytemuck::cast_slice(&values), targets.part(start..len))?;
                values.clear();
                start = len;
            }
        }
        if len < targets.len() {
            return Err(self.other_rows(targets.len(), &len.to_string()));
        }
        if len > start {
            sink(bytemuck::cast_slice(&values), targets.part(start..len))?;
        }
        Ok(())
    }
}

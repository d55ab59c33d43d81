//! Columns and rows of any table of a run.

use std::path::Path;

use meristem::train::reading::{Overview, Skipped};

use super::members::Members;
use super::table::{self, Cell, Column, each_line};
use crate::cli::Table;
use crate::failure::Failure;

/// The columns of the table of a run.
///
/// # Errors
/// As [`read`].
pub(super) fn columns(table: Table, run: &Path) -> Result<Vec<Column>, Failure> {
    match table {
        Table::Members => Ok(Members::read(run)?.0.columns()),
        table => Ok(table::columns(table, Overview::read(run).task.score())),
    }
}

/// Calls `take` with every row of the table, in order, until it returns false. Returns the skipped
/// lines of the events.
///
/// # Errors
/// The events cannot be read, or were truncated during reading.
pub(super) fn read(
    table: Table,
    run: &Path,
    take: &mut dyn FnMut(Vec<Cell>) -> bool,
) -> Result<Skipped, Failure> {
    if table == Table::Members {
        let (members, skipped) = Members::read(run)?;
        members.rows().all(take);
        return Ok(skipped);
    }
    each_line(table, run, &mut |line| table::rows(table, &line).into_iter().all(&mut *take))
}

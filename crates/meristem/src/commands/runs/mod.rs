//! `meristem runs`.

pub(super) mod compare;
mod report;
mod verify;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use comfy_table::{CellAlignment, Table};
use meristem::train::reading::{FoundRuns, Overview, Run, UnreadableFolder, find};
use serde_json::json;

use super::{Outcome, locate, print_json};
use crate::cli::{RunsArguments, RunsCommand};
use crate::failure::Failure;
use crate::page::age;
use crate::plain::{self, printable, thousands};
use crate::{score, table};

pub(crate) fn run(arguments: &RunsArguments) -> Outcome {
    match &arguments.command {
        Some(RunsCommand::Compare(arguments)) => compare::run(arguments),
        Some(RunsCommand::Report(arguments)) => report::run(arguments),
        Some(RunsCommand::Verify(arguments)) => verify::run(arguments),
        None => list(&arguments.folder, arguments.json),
    }
}

fn list(folder: &Path, json: bool) -> Outcome {
    let FoundRuns { runs, unreadable, truncated } = find(folder)?;
    let mut rows: Vec<Overview> = runs.iter().map(|run| Overview::read(run)).collect();
    // The newest run is the last, so that it is just above the prompt.
    let age = |row: &Overview| row.age_seconds.unwrap_or(f64::MAX);
    rows.sort_by(|a, b| age(b).total_cmp(&age(a)).then_with(|| a.run.cmp(&b.run)));
    if json {
        let rows: Vec<_> = rows.iter().map(score::row).collect();
        print_json(&json!({"runs": rows, "unreadable": unreadable, "truncated": truncated}))?;
        return Ok(ExitCode::SUCCESS);
    }
    if rows.is_empty() {
        plain::out(&format!("no runs in {}", printable(&folder.display().to_string())))
    } else {
        plain::out(&overviews(&rows, folder).to_string())
    }
    for row in &rows {
        if let Some(problem) = &row.problem {
            plain::out(&printable(&format!("{}: {problem}", row.run.display())));
        }
    }
    for UnreadableFolder { folder, problem, .. } in &unreadable {
        plain::err(&printable(&format!("warning: cannot read {}: {problem}", folder.display())));
    }
    if truncated {
        plain::err("warning: only the first 100,000 entries were searched; name a folder below");
    }
    Ok(ExitCode::SUCCESS)
}

/// A table with a row for each run, named relative to `folder`.
fn overviews(rows: &[Overview], folder: &Path) -> Table {
    let mut table = table::new();
    table.set_header([
        "run",
        "state",
        "controller",
        "control",
        "test",
        "parameters",
        "steps",
        "age",
    ]);
    for row in rows {
        let name = row.run.strip_prefix(folder).unwrap_or(&row.run).display().to_string();
        let name = if name.is_empty() { row.run.display().to_string() } else { name };
        table.add_row([
            printable(&name),
            row.state.name().into(),
            printable(row.controller.as_deref().unwrap_or("–")),
            score::named(row.task.score(), row.control_score),
            score::named(row.task.score(), row.test_score),
            row.parameters.map_or("–".into(), |count| thousands(count.round() as u64)),
            row.steps.map_or("–".into(), |[done, all]| format!("{done}/{all}")),
            row.age_seconds.map_or("–".into(), age),
        ]);
    }
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Reads runs, each given by its path or by its name in `runs`.
fn read(runs: &[PathBuf]) -> Result<Vec<Run>, Failure> {
    runs.iter().map(|run| Ok(Run::read(&locate(run))?)).collect()
}

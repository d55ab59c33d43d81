//! `meristem runs`.

mod compare;
mod html;
mod report;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use comfy_table::{CellAlignment, Table};
use meristem::train::reading::{Found, Overview, Run, Skipped, find};
use serde_json::json;

use super::{Outcome, locate, print_json};
use crate::cli::{RunsArguments, RunsCommand};
use crate::failure::Failure;
use crate::plain::{self, counted, duration, percent, printable, thousands};
use crate::table;

pub(crate) fn run(arguments: &RunsArguments) -> Outcome {
    match &arguments.command {
        Some(RunsCommand::Compare(arguments)) => compare::run(arguments),
        Some(RunsCommand::Report(arguments)) => report::run(arguments),
        None => list(&arguments.folder, arguments.json),
    }
}

fn list(folder: &Path, json: bool) -> Outcome {
    let Found { runs, unreadable, truncated } = find(folder)?;
    let mut rows: Vec<Overview> = runs.iter().map(|run| Overview::read(run)).collect();
    // The newest is the last, just above the prompt.
    let age = |row: &Overview| row.age_seconds.unwrap_or(f64::MAX);
    rows.sort_by(|a, b| age(b).total_cmp(&age(a)).then_with(|| a.run.cmp(&b.run)));
    if json {
        let unreadable: Vec<_> = unreadable
            .iter()
            .map(|(folder, problem)| json!({"folder": folder, "problem": problem}))
            .collect();
        print_json(&json!({"runs": rows, "unreadable": unreadable, "truncated": truncated}))?;
        return Ok(ExitCode::SUCCESS);
    }
    match rows.is_empty() {
        true => plain::out(&format!("no runs in {}", printable(&folder.display().to_string()))),
        false => plain::out(&overviews(&rows, folder).to_string()),
    }
    for row in &rows {
        if let Some(problem) = &row.problem {
            plain::out(&printable(&format!("{}: {problem}", row.run.display())));
        }
    }
    for (folder, problem) in &unreadable {
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
            percent(row.control_accuracy),
            percent(row.test_accuracy),
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

/// Formats an age, such as `12 min`, `3 h` or `5 days`.
fn age(seconds: f64) -> String {
    let minutes = (seconds / 60.0) as usize;
    match minutes {
        0..120 => format!("{minutes} min"),
        120..2880 => format!("{} h", minutes / 60),
        _ => counted(minutes / 1440, ["day", "days"]),
    }
}

/// Reads runs that were named, each as a path or as the name of a folder in `runs`.
fn read(runs: &[PathBuf]) -> Result<Vec<Run>, Failure> {
    runs.iter().map(|run| Ok(Run::read(&locate(run))?)).collect()
}

/// Words on lines of the events that were not understood; `None` if all were.
fn skipped(skipped: Skipped) -> Option<String> {
    let Skipped { damaged, unknown, newer } = skipped;
    let parts = [
        (damaged, "damaged"),
        (unknown, "of kinds that this version does not know"),
        (newer, "of a newer format"),
    ];
    let parts = parts.iter().filter(|(count, _)| *count > 0);
    let parts: Vec<String> = parts.map(|(count, kind)| format!("{count} {kind}")).collect();
    (!parts.is_empty()).then(|| format!("lines of events.jsonl left out: {}", parts.join(", ")))
}

/// Results of runs by name, each with its value for every run.
fn results(runs: &[Run]) -> Vec<(&'static str, Vec<String>)> {
    let number = |value: Option<f64>| value.map_or("–".into(), |n| thousands(n.round() as u64));
    type Figure = fn(&Overview) -> String;
    let rows: [(&'static str, Figure); 8] = [
        ("state", |row| row.state.name().into()),
        ("control accuracy", |row| percent(row.control_accuracy)),
        ("test accuracy", |row| percent(row.test_accuracy)),
        ("steps", |row| row.steps.map_or("–".into(), |[done, all]| format!("{done}/{all}"))),
        ("training compute", |row| {
            row.training_flops.map_or("–".into(), |flops| plain::flops(flops as f64))
        }),
        ("time", |row| {
            let known = row.wall_seconds.and_then(|s| Duration::try_from_secs_f64(s).ok());
            known.map_or("–".into(), duration)
        }),
        ("seed", |row| row.seed.map_or("–".into(), |seed| seed.to_string())),
        ("controller", |row| row.controller.clone().unwrap_or("–".into())),
    ];
    let of = |figure: Figure| runs.iter().map(|run| figure(&run.overview)).collect();
    let mut rows: Vec<_> = rows.into_iter().map(|(name, figure)| (name, of(figure))).collect();
    let parameters = runs.iter().map(|run| number(run.overview.parameters)).collect();
    rows.insert(3, ("parameters", parameters));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_read_well() {
        let all = [30.0, 3000.0, 10_000.0, 100_000.0, 200_000.0, 1e6].map(age);
        assert_eq!(all, ["0 min", "50 min", "2 h", "27 h", "2 days", "11 days"]);
    }
}

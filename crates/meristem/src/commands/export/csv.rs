//! `meristem export csv`.

use std::fmt::Display;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;

use meristem::control::{HEADS, Op};
use meristem::train::check_output;
use meristem::train::events::{Event, SlotState, StepCompleted};
use meristem::train::reading::{EventTail, Line, Reached, Skipped, check_is_run};

use super::tell_skipped;
use crate::cli::{CsvArguments, CsvTable};
use crate::commands::{Outcome, locate};
use crate::failure::Failure;
use crate::plain::{self, printable, thousands};

/// Bytes of events that are read at a time.
const PART_BYTES: u64 = 64 << 20;

pub(super) fn run(arguments: &CsvArguments) -> Outcome {
    let run = locate(&arguments.run);
    check_is_run(&run)?;
    match &arguments.out {
        None => {
            let rows = write(arguments.table, &run, &mut BufWriter::new(io::stdout().lock()));
            tell_skipped(rows?.1);
        }
        Some(out) => to_file(arguments, &run, out)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn to_file(arguments: &CsvArguments, run: &Path, out: &Path) -> Result<(), Failure> {
    check_output("out", out)?;
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty());
    let failed = |error: &dyn Display| {
        let message = format!("cannot write {}: {error}", out.display());
        Failure::failed(message, "free some space, or write to another disk")
    };
    // The file appears once it is complete.
    let file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")));
    let mut file = BufWriter::new(file.map_err(|error| failed(&error))?);
    let (rows, skipped) = write(arguments.table, run, &mut file)?;
    let file = file.into_inner().map_err(|error| failed(&error))?;
    file.persist(out).map_err(|error| failed(&error))?;
    plain::out(&printable(&format!("{}: {} rows", out.display(), thousands(rows))));
    tell_skipped(skipped);
    Ok(())
}

/// Writes the table as CSV (RFC 4180). Returns the number of rows, and the lines of the events that
/// were not understood.
fn write(table: CsvTable, run: &Path, to: &mut dyn Write) -> Result<(u64, Skipped), Failure> {
    let events = run.join("events.jsonl");
    let mut tail = EventTail::new(&events);
    if table == CsvTable::Batches {
        tail = tail.with_batches();
    }
    let mut written = record(to, &header(table));
    let mut count = 0;
    loop {
        let reached = tail.read(PART_BYTES, &mut |line| {
            for row in rows(table, &line) {
                count += 1;
                if written.is_ok() {
                    written = record(to, &row);
                }
            }
        })?;
        match reached {
            _ if written.is_err() => break,
            Reached::Limit => {}
            Reached::End => break,
            Reached::Restarted => {
                let message = format!("{} was cut while it was read", events.display());
                return Err(Failure::failed(message, "the run was resumed: try again"));
            }
        }
    }
    match written.and_then(|()| to.flush()) {
        // As of `meristem export csv RUN | head`.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::failed(
            format!("cannot write the table: {error}"),
            "free some space, or write to another disk",
        )),
        _ => Ok((count, tail.skipped())),
    }
}

fn record(to: &mut dyn Write, cells: &[String]) -> io::Result<()> {
    for (number, cell) in cells.iter().enumerate() {
        let comma = if number > 0 { "," } else { "" };
        match cell.contains([',', '"', '\n', '\r']) {
            true => write!(to, "{comma}\"{}\"", cell.replace('"', "\"\""))?,
            false => write!(to, "{comma}{cell}")?,
        }
    }
    to.write_all(b"\r\n")
}

/// Names of the columns, which are keys of the events.
fn header(table: CsvTable) -> Vec<String> {
    let names: &[&str] = match table {
        CsvTable::Steps => &[
            "seconds",
            "env",
            "round",
            "step",
            "train_loss",
            "train_accuracy",
            "control_loss",
            "control_accuracy",
            "host_gradient_norm",
            "host_parameters",
            "grown_parameters",
            "action",
            "reward",
            "step_seconds",
            "images_per_s",
            "twin_train_loss",
            "twin_control_loss",
            "twin_control_accuracy",
        ],
        CsvTable::Slots => &[
            "env",
            "round",
            "step",
            "slot",
            "stage",
            "blueprint",
            "alpha",
            "contribution",
            "gradient_health",
        ],
        CsvTable::Policy => &[
            "round",
            "transitions",
            "mean_return",
            "epochs",
            "stopped_by_kl",
            "skipped",
            "kl",
            "clip_fraction",
            "policy_objective",
            "value_loss",
            "gradient_norm",
            "explained_variance",
            "return_scale",
        ],
        CsvTable::Batches => &["env", "round", "step", "batch", "loss"],
    };
    let mut names: Vec<String> = names.iter().map(ToString::to_string).collect();
    if table == CsvTable::Policy {
        names.extend(Op::ALL.iter().map(|op| format!("op_{op}")));
        names.extend(HEADS.iter().map(|head| format!("entropy_{}", head.name)));
    }
    names
}

/// Rows of an event in the table, with the columns of [`header`].
fn rows(table: CsvTable, line: &Line) -> Vec<Vec<String>> {
    match (table, &line.event) {
        (CsvTable::Steps, Event::StepCompleted(step)) => vec![of_step(line.seconds, step)],
        (CsvTable::Slots, Event::StepCompleted(step)) => {
            step.slots.iter().map(|slot| of_slot(step, slot)).collect()
        }
        (CsvTable::Batches, Event::BatchCompleted { env, round, step, batch, loss }) => {
            let counts = [env, round, step, batch].map(|count| count.to_string());
            vec![counts.into_iter().chain([number(*loss)]).collect()]
        }
        (CsvTable::Policy, Event::PolicyUpdated { round, report: r }) => {
            let mut row = vec![
                round.to_string(),
                r.transitions.to_string(),
                number(r.mean_return),
                r.epochs.to_string(),
                r.stopped_by_kl.to_string(),
                r.skipped.to_string(),
            ];
            let figures = [r.kl, r.clip_fraction, r.policy_objective, r.value_loss];
            row.extend(figures.map(number));
            row.extend([r.gradient_norm, r.explained_variance, r.return_scale].map(number));
            row.extend(r.ops.map(|count| count.to_string()));
            row.extend(r.entropies.map(number));
            vec![row]
        }
        _ => vec![],
    }
}

/// A number that reads back to the same bits; nothing if it is not finite.
fn number(value: f64) -> String {
    if value.is_finite() { value.to_string() } else { String::new() }
}

fn known(value: Option<f64>) -> String {
    value.map_or(String::new(), number)
}

fn of_step(seconds: f64, step: &StepCompleted) -> Vec<String> {
    vec![
        number(seconds),
        step.env.to_string(),
        step.round.to_string(),
        step.step.to_string(),
        number(step.train_loss),
        number(step.train_accuracy),
        known(step.control_loss),
        known(step.control_accuracy),
        known(step.host_gradient_norm),
        step.host_parameters.to_string(),
        step.grown_parameters.to_string(),
        step.action.clone(),
        number(step.reward.total()),
        known(step.step_seconds),
        known(step.images_per_s),
        known(step.twin.and_then(|twin| twin.train_loss)),
        known(step.twin.and_then(|twin| twin.control_loss)),
        known(step.twin.and_then(|twin| twin.control_accuracy)),
    ]
}

fn of_slot(step: &StepCompleted, slot: &SlotState) -> Vec<String> {
    vec![
        step.env.to_string(),
        step.round.to_string(),
        step.step.to_string(),
        slot.slot.clone(),
        slot.stage.clone(),
        slot.blueprint.clone().unwrap_or_default(),
        number(slot.alpha),
        known(slot.contribution),
        known(slot.gradient_health),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_with_commas_quotes_and_lines_are_quoted() {
        let mut out = vec![];
        record(&mut out, &["a".into(), "b,\"c\"\nd".into(), String::new()]).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "a,\"b,\"\"c\"\"\nd\",\r\n");
    }
}

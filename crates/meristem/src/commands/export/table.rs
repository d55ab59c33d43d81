//! Events of a run as the rows of a table.

use std::path::Path;

use meristem::control::{ActionOp, HEADS};
use meristem::nn::ScoreKind;
use meristem::train::events::{Event, SlotState, StepCompleted};
use meristem::train::reading::{EventLine, EventTail, Reached, Skipped};

use crate::cli::Table;
use crate::failure::Failure;

/// Bytes of events that are read at a time.
const PART_BYTES: u64 = 64 << 20;

/// Type of a column's cells. Numbers and texts may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Count,
    Number,
    Flag,
    Text,
}

/// A column: its name, a key of the events, and its type.
pub(super) type Column = (String, Kind);

/// A cell of the type of its column.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell {
    Count(u64),
    /// A finite number; `None` if it was not measured or is not finite.
    Number(Option<f64>),
    Flag(bool),
    Text(Option<String>),
}

/// Calls `take` with every line of the events that a table needs, until it returns false. Returns
/// the skipped lines.
///
/// # Errors
/// The events cannot be read, or were truncated during reading.
pub(super) fn each_line(
    table: Table,
    run: &Path,
    take: &mut dyn FnMut(EventLine) -> bool,
) -> Result<Skipped, Failure> {
    let events = run.join("events.jsonl");
    let mut tail = EventTail::new(&events);
    if table == Table::Batches {
        tail = tail.with_batches();
    }
    let mut wanted = true;
    loop {
        let reached = tail.read(PART_BYTES, &mut |line| {
            wanted = wanted && take(line);
        })?;
        match reached {
            _ if !wanted => break,
            Reached::Limit => {}
            Reached::End => break,
            Reached::Restarted => {
                let message = format!("{} was truncated while it was read", events.display());
                return Err(Failure::failed(message, "the run was resumed: try again"));
            }
        }
    }
    Ok(tail.skipped())
}

/// The columns of a table of events of a run with scores of this kind; none for [`Table::Members`],
/// whose columns [`super::members`] has.
pub(super) fn columns(table: Table, score: ScoreKind) -> Vec<Column> {
    use Kind::{Count, Flag, Number, Text};
    let columns: &[(&str, Kind)] = match table {
        Table::Steps => &[
            ("seconds", Number),
            ("env", Count),
            ("round", Count),
            ("step", Count),
            ("train_loss", Number),
            ("train_accuracy", Number),
            ("control_loss", Number),
            ("control_accuracy", Number),
            ("host_gradient_norm", Number),
            ("host_parameters", Count),
            ("grown_parameters", Count),
            ("action", Text),
            ("reward", Number),
            ("step_seconds", Number),
            ("images_per_s", Number),
            ("twin_train_loss", Number),
            ("twin_control_loss", Number),
            ("twin_control_accuracy", Number),
        ],
        Table::Slots => &[
            ("env", Count),
            ("round", Count),
            ("step", Count),
            ("slot", Text),
            ("stage", Text),
            ("blueprint", Text),
            ("alpha", Number),
            ("contribution", Number),
            ("gradient_health", Number),
        ],
        Table::Policy => &[
            ("round", Count),
            ("transitions", Count),
            ("mean_return", Number),
            ("epochs", Count),
            ("stopped_by_kl", Flag),
            ("skipped", Count),
            ("kl", Number),
            ("clip_fraction", Number),
            ("policy_objective", Number),
            ("value_loss", Number),
            ("gradient_norm", Number),
            ("explained_variance", Number),
            ("return_scale", Number),
        ],
        Table::Batches => {
            &[("env", Count), ("round", Count), ("step", Count), ("batch", Count), ("loss", Number)]
        }
        Table::Members => &[],
    };
    let named = |name: &str| name.replace(ScoreKind::Accuracy.key(), score.key());
    let mut columns: Vec<Column> =
        columns.iter().map(|(name, kind)| (named(name), *kind)).collect();
    if table == Table::Policy {
        columns.extend(ActionOp::ALL.iter().map(|op| (format!("op_{op}"), Count)));
        columns.extend(HEADS.iter().map(|head| (format!("entropy_{}", head.name), Number)));
    }
    columns
}

/// Rows of an event in the table, with the cells of [`columns`].
pub(super) fn rows(table: Table, line: &EventLine) -> Vec<Vec<Cell>> {
    match (table, &line.event) {
        (Table::Steps, Event::StepCompleted(step)) => vec![of_step(line.seconds, step)],
        (Table::Slots, Event::StepCompleted(step)) => {
            step.slots.iter().map(|slot| of_slot(step, slot)).collect()
        }
        (Table::Batches, Event::BatchCompleted { env, round, step, batch, loss }) => {
            let counts = [*env, *round, *step, *batch].map(count);
            vec![counts.into_iter().chain([number(*loss)]).collect()]
        }
        (Table::Policy, Event::PolicyUpdated { round, report: r }) => {
            let mut row = vec![
                count(*round),
                count(r.transitions),
                number(r.mean_return),
                count(r.epochs),
                Cell::Flag(r.stopped_by_kl),
                count(r.skipped),
            ];
            let figures = [r.kl, r.clip_fraction, r.policy_objective, r.value_loss];
            row.extend(figures.map(number));
            row.extend([r.gradient_norm, r.explained_variance, r.return_scale].map(number));
            row.extend(r.ops.map(Cell::Count));
            row.extend(r.entropies.map(number));
            vec![row]
        }
        _ => vec![],
    }
}

pub(super) fn count(value: usize) -> Cell {
    Cell::Count(value as u64)
}

fn number(value: f64) -> Cell {
    known(Some(value))
}

pub(super) fn known(value: Option<f64>) -> Cell {
    Cell::Number(value.filter(|value| value.is_finite()))
}

fn text(value: &str) -> Cell {
    Cell::Text(Some(value.to_owned()))
}

fn of_step(seconds: f64, step: &StepCompleted) -> Vec<Cell> {
    vec![
        number(seconds),
        count(step.env),
        count(step.round),
        count(step.step),
        number(step.train_loss),
        number(step.train_score),
        known(step.control_loss),
        known(step.control_score),
        known(step.host_gradient_norm),
        count(step.host_parameters),
        count(step.grown_parameters),
        text(&step.action),
        number(step.reward.total()),
        known(step.step_seconds),
        known(step.images_per_s),
        known(step.twin.and_then(|twin| twin.train_loss)),
        known(step.twin.and_then(|twin| twin.control_loss)),
        known(step.twin.and_then(|twin| twin.control_score)),
    ]
}

fn of_slot(step: &StepCompleted, slot: &SlotState) -> Vec<Cell> {
    vec![
        count(step.env),
        count(step.round),
        count(step.step),
        text(&slot.slot),
        text(&slot.stage.to_string()),
        Cell::Text(slot.blueprint.clone()),
        number(slot.alpha),
        known(slot.contribution),
        known(slot.gradient_health),
    ]
}

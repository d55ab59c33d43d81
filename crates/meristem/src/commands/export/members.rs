//! The table `members`: a row for each member of a run, and another each time that a member became
//! a copy.

use std::collections::BTreeMap;
use std::path::Path;

use meristem::nn::ScoreKind;
use meristem::train::events::{Event, StepCompleted};
use meristem::train::reading::{Skipped, member_settings};

use super::table::{Cell, Column, Kind, count, each_line, known};
use crate::cli::Table;
use crate::failure::Failure;

/// The members of a run.
#[derive(Default)]
pub(super) struct Members {
    rows: Vec<Row>,
    /// State of each member in its newest step.
    newest: Vec<Newest>,
    /// Kind of the scores.
    score: ScoreKind,
    /// Names of the settings, and whether all their values are numbers.
    settings: Vec<(String, bool)>,
}

struct Row {
    member: usize,
    /// The first step with these settings.
    from_step: usize,
    copy_of: Option<usize>,
    settings: BTreeMap<String, String>,
}

/// The newest step of a member.
#[derive(Clone, Default)]
struct Newest {
    /// The step of the run with which the member began.
    begun: usize,
    steps: usize,
    /// Sum and number of the control scores of its envs.
    score: (f64, usize),
    ended: Option<String>,
}

impl Members {
    /// Reads the events of a run.
    ///
    /// # Errors
    /// As [`each_line`].
    pub(super) fn read(run: &Path) -> Result<(Self, Skipped), Failure> {
        let mut members = Self::default();
        let skipped = each_line(Table::Members, run, &mut |line| {
            members.add(line.event);
            true
        })?;
        let mut settings: Vec<(String, bool)> = vec![];
        for (name, value) in members.rows.iter().flat_map(|row| &row.settings) {
            let is_number = value.parse().is_ok_and(|number: f64| number.is_finite());
            match settings.iter_mut().find(|(own, _)| own == name) {
                Some((_, numbers)) => *numbers &= is_number,
                None => settings.push((name.clone(), is_number)),
            }
        }
        members.settings = settings;
        Ok((members, skipped))
    }

    fn add(&mut self, event: Event) {
        match event {
            Event::RunStarted(started) => {
                self.score = started.task.score();
                self.newest = vec![Newest::default(); started.members.len()];
                for (member, settings) in started.members.iter().enumerate() {
                    self.row(member, (0, None), settings);
                }
            }
            Event::StepCompleted(step) => self.step(&step),
            Event::MembersEnded { members, reason, .. } => {
                for member in members {
                    if let Some(newest) = self.newest.get_mut(member) {
                        newest.ended = Some(reason.to_string());
                    }
                }
            }
            Event::MemberBegun { member, step, settings, .. } => {
                self.begin(member, step, &settings)
            }
            Event::MemberCopied { member, from, step, settings, .. } => {
                if let Some(newest) = self.newest.get_mut(member) {
                    newest.ended = None;
                    self.row(member, (step.saturating_add(1), Some(from)), &settings);
                }
            }
            _ => {}
        }
    }

    fn row(&mut self, member: usize, (from_step, copy_of): (usize, Option<usize>), text: &str) {
        let settings =
            member_settings(text).map(|(name, value)| (name.into(), value.into())).collect();
        self.rows.push(Row { member, from_step, copy_of, settings });
    }

    /// A member begins in a place, or with settings that a program chose: its row of the run's
    /// beginning gets the step and the settings.
    fn begin(&mut self, member: usize, step: usize, text: &str) {
        let settings = member_settings(text).map(|(name, value)| (name.into(), value.into()));
        if let Some(row) = self.rows.iter_mut().find(|row| row.member == member) {
            (row.from_step, row.settings) = (step, settings.collect());
            self.newest[member] = Newest { begun: step, ..Newest::default() };
        }
    }

    fn step(&mut self, step: &StepCompleted) {
        let Some(member) = step.env.checked_rem(self.newest.len()) else { return };
        let newest = &mut self.newest[member];
        let steps = step.step.saturating_add(1).saturating_sub(newest.begun);
        let (sum, count) = if newest.steps == steps { newest.score } else { (0.0, 0) };
        newest.steps = steps;
        newest.score = (sum + step.control_score.unwrap_or(f64::NAN), count + 1);
    }

    /// The columns.
    pub(super) fn columns(&self) -> Vec<Column> {
        let settings = self.settings.iter().map(|(name, numbers)| {
            (name.clone(), if *numbers { Kind::Number } else { Kind::Text })
        });
        let first =
            [("member", Kind::Count), ("from_step", Kind::Count), ("copy_of", Kind::Number)];
        let first = first.map(|(name, kind)| (name.to_string(), kind));
        let score = (format!("control_{}", self.score.key()), Kind::Number);
        let last = [("steps".into(), Kind::Count), score, ("ended".into(), Kind::Text)];
        first.into_iter().chain(settings).chain(last).collect()
    }

    /// The rows, with the cells of [`Members::columns`].
    pub(super) fn rows(&self) -> impl Iterator<Item = Vec<Cell>> {
        self.rows.iter().map(|row| {
            let newest = &self.newest[row.member];
            let copy_of = row.copy_of.map(|from| from as f64);
            let mut cells = vec![count(row.member), count(row.from_step), known(copy_of)];
            cells.extend(self.settings.iter().map(|(name, numbers)| {
                let value = row.settings.get(name);
                if *numbers {
                    known(value.and_then(|value| value.parse().ok()))
                } else {
                    Cell::Text(value.cloned())
                }
            }));
            let (sum, envs) = newest.score;
            let score = known(Some(sum / envs as f64));
            cells.extend([count(newest.steps), score, Cell::Text(newest.ended.clone())]);
            cells
        })
    }
}

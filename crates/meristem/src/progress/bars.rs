//! Progress bars of a run on a terminal.

use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use meristem::nn::ScoreKind;
use meristem::train::events::{RunStarted, StepCompleted};

use crate::plain::printable;

use super::is_stopping;
use super::lines::{env_status, scores};
use super::shown::{OutputForm, shown};

/// One line per env, limited by the rows of the terminal, and one for the run.
pub(super) struct Bars {
    pub(super) all: MultiProgress,
    envs: Vec<ProgressBar>,
    /// Line for the envs without a separate line.
    others: Option<ProgressBar>,
    total: ProgressBar,
    /// Kind of the scores.
    score: ScoreKind,
}

/// Number of envs with a separate line on a terminal with `rows` rows. One row is left for the
/// total, one for the cursor, and one for the other envs if not all fit.
fn lines_of_envs(envs: usize, rows: usize) -> usize {
    if envs + 2 <= rows { envs } else { rows.saturating_sub(3) }
}

impl Bars {
    pub(super) fn new(run: &RunStarted) -> Self {
        let rows =
            console::Term::stderr().size_checked().map_or(usize::MAX, |(rows, _)| rows.into());
        let lines = lines_of_envs(run.envs, rows);
        let all = MultiProgress::new();
        let line = ProgressStyle::with_template("{prefix:>8} {wide_msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let whole = ProgressStyle::with_template("{bar:10} {prefix}  {wide_msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = |name: String| {
            let bar = all.add(ProgressBar::new_spinner().with_style(line.clone()));
            bar.set_prefix(name);
            bar.set_message("in the first step");
            bar
        };
        let envs = (0..lines).map(|env| bar(format!("env {env}"))).collect();
        let others = (lines < run.envs).then(|| bar(format!("{} more", run.envs - lines)));
        let total = all.add(ProgressBar::new((run.steps * run.rounds) as u64).with_style(whole));
        total.enable_steady_tick(Duration::from_millis(500));
        *shown() = OutputForm::Bar(total.clone());
        Self { all, envs, others, total, score: run.task.score() }
    }

    /// Updates the bar of the run, unless it shows that the run is stopping.
    pub(super) fn step_completed(&self, done: usize, place: String, rate: String) {
        // With the lock, no stop request can set its message between the check below and
        // `set_message`, which would replace it.
        let _unchanged = shown();
        self.total.set_position(done as u64);
        self.total.set_prefix(place);
        if !is_stopping() {
            self.total.set_message(rate);
        }
    }

    pub(super) fn show_others(&self, envs: &[Option<StepCompleted>]) {
        let Some(bar) = &self.others else { return };
        bar.set_message(scores(self.score, envs.get(self.envs.len()..).unwrap_or_default()));
        bar.tick();
    }

    pub(super) fn env(&self, step: &StepCompleted) {
        let Some(bar) = self.envs.get(step.env) else { return };
        bar.set_message(printable(&env_status(self.score, step)));
        bar.tick();
    }

    pub(super) fn clear(self) {
        *shown() = OutputForm::Lines;
        self.envs.iter().chain(&self.others).for_each(ProgressBar::finish_and_clear);
        self.total.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_of_envs_leave_a_row_for_the_total() {
        assert_eq!(lines_of_envs(4, 24), 4);
        assert_eq!([lines_of_envs(22, 24), lines_of_envs(23, 24)], [22, 21]);
        assert_eq!([lines_of_envs(64, 10), lines_of_envs(64, 2)], [7, 0]);
    }
}

//! State of the view: the run and the user's choices.

use std::cmp::Ordering;

use meristem::train::reading::{EnvHistory, Follower, RunHistory};

/// Bytes of events that are read between two checks of the keyboard.
const PART_BYTES: u64 = 8 << 20;

/// Effect of a key on the view.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Key {
    /// Choose an env this number of rows up.
    Up(usize),
    /// Choose an env this number of rows down.
    Down(usize),
    /// Sort by the next column.
    Sort,
    /// Reverse the order.
    Reverse,
    /// Scroll the host up.
    HostUp,
    /// Scroll the host down.
    HostDown,
}

/// Sort key of the envs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Column {
    Env,
    Control,
    Loss,
    Parameters,
}

/// The run and the state of its view.
pub(super) struct App {
    pub(super) follower: Follower,
    pub(super) colours: bool,
    pub(super) sort: Column,
    pub(super) reversed: bool,
    /// Number of the chosen env.
    pub(super) chosen: Option<usize>,
    /// Number of scrolled lines of the host panel.
    pub(super) host_from: usize,
    /// Whether this process trains the run.
    pub(super) trains_here: bool,
    /// Whether a stop of the run, which this process trains, was requested.
    pub(super) is_stopping: bool,
}

impl App {
    pub(super) fn new(follower: Follower, colours: bool) -> Self {
        Self {
            follower,
            colours,
            sort: Column::Env,
            reversed: false,
            chosen: None,
            host_from: 0,
            trains_here: false,
            is_stopping: false,
        }
    }

    /// Reads events appended to the file, about 8 MiB at most. Returns whether the end was reached.
    pub(super) fn look(&mut self) -> bool {
        let all_read = self.follower.look(PART_BYTES);
        let kept = self.chosen.filter(|number| self.history().envs.contains_key(number));
        self.chosen = kept.or_else(|| self.order().first().copied());
        all_read
    }

    /// The history of the run so far.
    pub(super) fn history(&self) -> &RunHistory {
        &self.follower.run.history
    }

    /// The chosen env.
    pub(super) fn env(&self) -> Option<(usize, &EnvHistory)> {
        let number = self.chosen?;
        Some((number, self.history().envs.get(&number)?))
    }

    /// Numbers of the envs in the order of the table: by number, or by falling values. Envs without
    /// a value in the sort column are last. `reversed` reverses all of this.
    pub(super) fn order(&self) -> Vec<usize> {
        let figure = |env: &EnvHistory| match self.sort {
            Column::Env => None,
            Column::Control => env.last.as_ref().and_then(|step| step.control_score),
            Column::Loss => env.last.as_ref().map(|step| step.train_loss),
            Column::Parameters => env.parameters.last(),
        };
        let mut envs: Vec<(usize, Option<f64>)> =
            self.history().envs.iter().map(|(number, env)| (*number, figure(env))).collect();
        envs.sort_by(|(a, x), (b, y)| {
            let by_figure = match (x, y) {
                (Some(x), Some(y)) => y.total_cmp(x),
                (x, y) => y.is_some().cmp(&x.is_some()),
            };
            let order = by_figure.then(a.cmp(b));
            if self.reversed { order.reverse() } else { order }
        });
        envs.into_iter().map(|(number, _)| number).collect()
    }

    pub(super) fn press(&mut self, key: Key) {
        match key {
            Key::Up(rows) => self.choose(rows, Ordering::Less),
            Key::Down(rows) => self.choose(rows, Ordering::Greater),
            Key::Sort => {
                self.sort = match self.sort {
                    Column::Env => Column::Control,
                    Column::Control => Column::Loss,
                    Column::Loss => Column::Parameters,
                    Column::Parameters => Column::Env,
                }
            }
            Key::Reverse => self.reversed = !self.reversed,
            Key::HostUp => self.host_from = self.host_from.saturating_sub(1),
            Key::HostDown => self.host_from += 1,
        }
    }

    fn choose(&mut self, rows: usize, direction: Ordering) {
        let order = self.order();
        let at = order.iter().position(|number| Some(*number) == self.chosen).unwrap_or(0);
        let to = match direction {
            Ordering::Less => at.saturating_sub(rows),
            _ => at.saturating_add(rows).min(order.len().saturating_sub(1)),
        };
        self.chosen = order.get(to).copied();
        self.host_from = 0;
    }
}

//! State of the view: the run so far, and what the user chose to see of it.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use meristem::train::Summary;
use meristem::train::reading::{
    EnvHistory, EventTail, History, Reached, RunState, Skipped, is_in_progress, read_summary,
};

/// Bytes of events that are read between two looks at the keyboard.
const PART_BYTES: u64 = 8 << 20;
/// Time between two questions whether the run's process is alive.
const STATE_EVERY: Duration = Duration::from_secs(2);

/// A wish of the user.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Key {
    /// Choose an env so many rows up.
    Up(usize),
    /// Choose an env so many rows down.
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

/// Column that the envs are sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Column {
    Env,
    Control,
    Loss,
    Parameters,
}

/// The run and the view of it.
pub(super) struct App {
    pub(super) folder: PathBuf,
    pub(super) history: History,
    pub(super) state: RunState,
    /// Results of an ended run, for its memory.
    pub(super) summary: Option<Summary>,
    /// Reason why nothing more is read.
    pub(super) problem: Option<String>,
    /// Whether some of the events are not read yet.
    pub(super) is_reading: bool,
    pub(super) colours: bool,
    pub(super) sort: Column,
    pub(super) reversed: bool,
    /// Number of the chosen env.
    pub(super) chosen: Option<usize>,
    /// Lines of the host that are above its window.
    pub(super) host_from: usize,
    tail: EventTail,
    state_asked: Option<Instant>,
}

impl App {
    pub(super) fn new(folder: &Path, colours: bool) -> Self {
        Self {
            folder: folder.into(),
            history: History::default(),
            state: RunState::Running,
            summary: None,
            problem: None,
            is_reading: true,
            colours,
            sort: Column::Env,
            reversed: false,
            chosen: None,
            host_from: 0,
            tail: EventTail::new(&folder.join("events.jsonl")),
            state_asked: None,
        }
    }

    /// Reads what was appended, at most 8 MiB. True if there was no more.
    pub(super) fn look(&mut self) -> bool {
        let reached = self.history.follow(&mut self.tail, PART_BYTES);
        self.is_reading = matches!(reached, Ok(Reached::Limit | Reached::Restarted));
        self.problem = match reached {
            Ok(_) => None,
            Err(_) if !self.folder.is_dir() => Some("the folder of the run was removed".into()),
            // A run that begins has no events yet.
            Err(error) => (self.state != RunState::Running).then(|| error.to_string()),
        };
        if !self.is_reading {
            self.ask_state();
        }
        let kept = self.chosen.filter(|number| self.history.envs.contains_key(number));
        self.chosen = kept.or_else(|| self.order().first().copied());
        !self.is_reading
    }

    fn ask_state(&mut self) {
        if self.state_asked.is_some_and(|asked| asked.elapsed() < STATE_EVERY) {
            return;
        }
        self.state_asked = Some(Instant::now());
        let ended = self.history.ended.as_ref().map(|(status, _)| status.as_str());
        self.state = match ended {
            Some(status) => RunState::of_name(status),
            None if is_in_progress(&self.folder) => RunState::Running,
            None => RunState::Killed,
        };
        match ended {
            Some(_) if self.summary.is_none() => {
                self.summary = read_summary(&self.folder).ok().flatten();
            }
            Some(_) => {}
            None => self.summary = None,
        }
    }

    /// Lines of the events that were not understood.
    pub(super) fn skipped(&self) -> Skipped {
        self.tail.skipped()
    }

    /// The chosen env.
    pub(super) fn env(&self) -> Option<(usize, &EnvHistory)> {
        let number = self.chosen?;
        Some((number, self.history.envs.get(&number)?))
    }

    /// Numbers of the envs in the order of the table. Envs without a figure come last.
    pub(super) fn order(&self) -> Vec<usize> {
        let figure = |env: &EnvHistory| match self.sort {
            Column::Env => None,
            Column::Control => env.last.as_ref().and_then(|step| step.control_accuracy),
            Column::Loss => env.last.as_ref().map(|step| step.train_loss),
            Column::Parameters => env.parameters.last(),
        };
        let mut envs: Vec<(usize, Option<f64>)> =
            self.history.envs.iter().map(|(number, env)| (*number, figure(env))).collect();
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

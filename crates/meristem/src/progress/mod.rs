//! Progress of a run: bars on a terminal, lines elsewhere.

mod bars;
mod lines;
mod shown;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use meristem::train::events::{Event, RunStarted, StepCompleted};
use meristem::train::{Notice, Observer};

use crate::escape;
use crate::plain::{self, duration, thousands};
use bars::Bars;
use lines::{beginning, event_text, mean_score, round_ended, scores, update_statistics};
use shown::{HeldLine, OutputForm, shown};
pub(crate) use shown::{ScreenGuard, has_screen};

/// Whether a signal has requested a stop.
static STOP: AtomicBool = AtomicBool::new(false);

/// Requests the end of the run at the next step boundary, and prints a message, in the bar if there
/// is one. `what_is_left` describes the results that the run leaves.
pub(crate) fn request_stop(what_is_left: &str) {
    let shown = shown();
    STOP.store(true, Ordering::Relaxed);
    match &*shown {
        // This text fits next to the bar at 80 columns.
        OutputForm::Bar(total) => total.set_message("stopping after this step; again to stop now"),
        // The view shows the message.
        OutputForm::Screen(_) => {}
        OutputForm::Lines => plain::err(&format!(
            "stopping after this step, with {what_is_left}; send the signal again to stop now"
        )),
    }
}

/// Whether the end of the run was requested.
pub(crate) fn is_stopping() -> bool {
    STOP.load(Ordering::Relaxed)
}

/// Form of progress output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// No progress.
    Quiet,
    /// Lines on stdout.
    Lines,
    /// Lines on stderr, because stdout has the results.
    LinesOnStderr,
    /// Bars on stderr, which is a terminal.
    Bars,
}

/// Observer that prints the progress of a run.
pub(crate) struct Progress {
    mode: Mode,
    /// Whether to print statistics of the policy after each round.
    verbose: bool,
    rank: usize,
    run: Option<RunStarted>,
    /// Newest `step_completed` of each env.
    envs: Vec<Option<StepCompleted>>,
    /// Number of envs in training.
    trained: usize,
    /// The incomplete step: its newest event, and the number of its events so far.
    arriving: Option<(StepCompleted, usize)>,
    stepping: StepDurations,
    bars: Option<Bars>,
}

impl Progress {
    pub(crate) fn new(mode: Mode) -> Self {
        let stepping = StepDurations { started: Instant::now(), steps: 0 };
        Self {
            mode,
            verbose: false,
            rank: 0,
            run: None,
            envs: vec![],
            trained: 0,
            arriving: None,
            stepping,
            bars: None,
        }
    }

    /// Sets whether statistics of the policy are printed after each round.
    pub(crate) fn verbose(self, verbose: bool) -> Self {
        Self { verbose, ..self }
    }

    /// Whether a run has started or resumed.
    pub(crate) fn has_begun(&self) -> bool {
        self.run.is_some()
    }

    /// Whether this process is rank 0, which reports progress.
    pub(crate) fn is_of_first_rank(&self) -> bool {
        self.rank == 0
    }

    /// Prints a permanent line, above the bars if there are any.
    pub(crate) fn line(&self, text: &str) {
        let mut shown = shown();
        if let (OutputForm::Screen(held), false) = (&mut *shown, self.mode == Mode::Quiet) {
            let on_stderr = self.mode != Mode::Lines;
            return held.push(HeldLine { text: text.into(), on_stderr });
        }
        drop(shown);
        match (self.mode, &self.bars) {
            (Mode::Quiet, _) => {}
            (Mode::Lines, _) => plain::out(text),
            (Mode::LinesOnStderr, _) => plain::err(text),
            // If the write fails, the run continues without output.
            (Mode::Bars, Some(bars)) => drop(bars.all.println(escape::lines(text))),
            (Mode::Bars, None) => plain::err(text),
        }
    }

    fn begin(&mut self, run: &RunStarted) {
        beginning(run).iter().for_each(|line| self.line(line));
        self.envs = vec![None; run.envs];
        self.trained = run.places.map_or(run.envs, |places| envs_of(run, places));
        self.arriving = None;
        self.stepping = StepDurations { started: Instant::now(), steps: 0 };
        self.run = Some(run.clone());
        self.show_bars();
    }

    /// Shows the bars, unless they exist or a view has the screen.
    fn show_bars(&mut self) {
        if let (Mode::Bars, None, Some(run)) = (self.mode, &self.bars, &self.run)
            && !has_screen()
        {
            self.bars = Some(Bars::new(run));
        }
    }

    fn step(&mut self, step: &StepCompleted) {
        self.show_bars();
        if let Some(bars) = &self.bars {
            bars.env(step);
        }
        if let Some(place) = self.envs.get_mut(step.env) {
            *place = Some(step.clone());
        }
        let same = |(other, _): &(StepCompleted, usize)| {
            (other.round, other.step) == (step.round, step.step)
        };
        let before = self.arriving.take_if(|arriving| !same(arriving));
        if let Some((last, arrived)) = before {
            // Fewer envs than `trained` are in training, as after a resume.
            self.trained = arrived;
            self.complete_step(&last);
        }
        let arrived = 1 + self.arriving.as_ref().map_or(0, |(_, arrived)| *arrived);
        self.arriving = Some((step.clone(), arrived));
        // The event of the last env completes the step.
        if arrived == self.trained {
            self.arriving = None;
            self.complete_step(step);
        }
    }

    /// Notes that members are not trained any more.
    fn members_ended(&mut self, members: usize) {
        let envs = self.run.as_ref().map_or(0, |run| envs_of(run, members));
        self.trained = self.trained.saturating_sub(envs);
        // Later steps take less time.
        self.stepping = StepDurations { started: Instant::now(), steps: 0 };
    }

    fn complete_step(&mut self, step: &StepCompleted) {
        let Some(run) = &self.run else { return };
        self.stepping.steps += 1;
        let done = step.round * run.steps + step.step + 1;
        let left = self.stepping.left((run.steps * run.rounds).saturating_sub(done));
        let speed = |rate| format!("{} samples/s, ", thousands(rate as u64));
        let rate = step.images_per_s.map_or_else(String::new, speed);
        let rate = format!("{rate}{} left", duration(left));
        let round = match run.rounds {
            1 => String::new(),
            rounds => format!("round {}/{rounds} ", step.round + 1),
        };
        let (number, steps) = (step.step + 1, run.steps);
        if let Some(bars) = &self.bars {
            bars.step_completed(done, format!("{round}step {number}/{steps}"), rate);
            bars.show_others(&self.envs);
            return;
        }
        // An open view shows the steps, so no line is printed.
        if self.mode == Mode::Bars {
            return;
        }
        // Envs that are not trained any more have events of earlier steps.
        let same = |env: &&StepCompleted| (env.round, env.step) == (step.round, step.step);
        let envs: Vec<_> = self.envs.iter().flatten().filter(same).cloned().map(Some).collect();
        let scores = scores(run.task.score(), &envs);
        self.line(&format!("{round}step {number:>3}/{steps}  {scores}  {rate}"));
    }

    fn batch(&self, event: &Event) {
        let Event::BatchCompleted { env, round, step, batch, loss } = event else { return };
        let [round, step, batch] = [round, step, batch].map(|index| index + 1);
        let line = format!("round {round} step {step} batch {batch} env {env} loss {loss:?}");
        self.line(&line);
    }
}

impl Observer for Progress {
    fn notice(&mut self, notice: &Notice<'_>) {
        if let Notice::Joined(rank) = notice {
            self.rank = *rank;
        }
        if let Some(warning) = notice.warning() {
            plain::err(&format!("warning: {warning}"));
        }
    }

    fn event(&mut self, event: &Event) {
        match event {
            Event::RunStarted(run) => self.begin(run),
            Event::StepCompleted(step) => self.step(step),
            Event::BatchCompleted { .. } => self.batch(event),
            Event::PolicyUpdated { round, report } => {
                let kind = self.run.as_ref().map(|run| run.task.score()).unwrap_or_default();
                self.line(&round_ended(*round, (kind, mean_score(&self.envs)), report));
                if self.verbose {
                    self.line(&update_statistics(report));
                }
            }
            Event::RunEnded { .. } => {
                if let Some(bars) = self.bars.take() {
                    bars.clear();
                }
            }
            other => {
                match other {
                    Event::MembersEnded { members, .. } => self.members_ended(members.len()),
                    // Members that begin with the first step are counted already.
                    Event::MemberBegun { step: 1.., .. } => {
                        self.trained += self.run.as_ref().map_or(0, |run| envs_of(run, 1));
                    }
                    _ => {}
                }
                if let Some(text) = event_text(other) {
                    self.line(&text);
                }
            }
        }
    }

    fn stop_requested(&self) -> bool {
        is_stopping()
    }
}

/// Number of envs of some members.
fn envs_of(run: &RunStarted, members: usize) -> usize {
    members * run.envs / run.members.len().max(1)
}

/// Total duration and number of the completed steps.
struct StepDurations {
    started: Instant,
    steps: u32,
}

impl StepDurations {
    fn left(&self, steps: usize) -> Duration {
        self.started.elapsed() / self.steps.max(1) * u32::try_from(steps).unwrap_or(u32::MAX)
    }
}

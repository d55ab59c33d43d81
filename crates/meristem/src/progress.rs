//! Progress of a run: bars on a terminal, lines elsewhere.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use meristem::control::{HEADS, Op, RoundReport};
use meristem::train::Observer;
use meristem::train::events::{Event, RunStarted, SlotState, StepCompleted};

use crate::plain::{self, counted, duration, mean, percent, thousands};

/// Whether a signal has asked to stop.
static STOP: AtomicBool = AtomicBool::new(false);

/// The bar of the whole run, if there are bars. Lines that another thread writes to stderr would be
/// overwritten.
static TOTAL: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Asks the run to end at its next step boundary, and reports that, in the bar if there is one.
/// `what_is_left` describes the results that remain.
pub(crate) fn request_stop(what_is_left: &str) {
    let total = TOTAL.lock().unwrap_or_else(PoisonError::into_inner);
    STOP.store(true, Ordering::Relaxed);
    match &*total {
        // At 80 columns, no more fits next to the bar.
        Some(total) => total.set_message("stopping after this step; again to stop now"),
        None => plain::err(&format!(
            "stopping after this step, with {what_is_left}; send the signal again to stop now"
        )),
    }
}

/// Form of progress output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// No progress.
    Quiet,
    /// Lines on stdout.
    Lines,
    /// Lines on stderr, because stdout has the JSON.
    LinesOnStderr,
    /// Bars on stderr, if both are terminals.
    Bars,
}

/// Display of a run's progress.
pub(crate) struct Progress {
    mode: Mode,
    /// Whether to print statistics of the policy after each round.
    verbose: bool,
    rank: usize,
    run: Option<RunStarted>,
    /// Last step of each env.
    envs: Vec<Option<StepCompleted>>,
    stepping: Stepping,
    bars: Option<Bars>,
}

impl Progress {
    pub(crate) fn new(mode: Mode) -> Self {
        let stepping = Stepping { started: Instant::now(), steps: 0 };
        Self { mode, verbose: false, rank: 0, run: None, envs: vec![], stepping, bars: None }
    }

    /// Sets whether statistics of the policy are printed after each round.
    pub(crate) fn verbose(self, verbose: bool) -> Self {
        Self { verbose, ..self }
    }

    /// Whether a run has started or resumed.
    pub(crate) fn has_begun(&self) -> bool {
        self.run.is_some()
    }

    /// Whether this process reports progress.
    pub(crate) fn is_of_first_rank(&self) -> bool {
        self.rank == 0
    }

    /// Prints a permanent line, above the bars or among the lines.
    pub(crate) fn line(&self, text: &str) {
        match (self.mode, &self.bars) {
            (Mode::Quiet, _) => {}
            (Mode::Lines, _) => plain::out(text),
            (Mode::LinesOnStderr, _) => plain::err(text),
            // If the terminal cannot be written to, the run continues without output.
            (Mode::Bars, Some(bars)) => drop(bars.all.println(text)),
            (Mode::Bars, None) => plain::err(text),
        }
    }

    fn begin(&mut self, run: &RunStarted) {
        self.line(&format!(
            "{} of `{}` ({} parameters) on {}, each with {} images per step (epoch {})",
            counted(run.envs, ["env", "envs"]),
            run.host,
            thousands(run.host_parameters as u64),
            run.dataset,
            images_per_step(run.images_per_step),
            run.epoch,
        ));
        self.line(&format!(
            "{} training, {} control{}; {} of {} of {}",
            thousands(run.train_samples as u64),
            thousands(run.control_samples as u64),
            test_images(run.test_samples),
            counted(run.rounds, ["round", "rounds"]),
            counted(run.steps, ["step", "steps"]),
            counted(run.batches, ["batch", "batches"]),
        ));
        let ranks = match run.ranks {
            1 => String::new(),
            ranks => format!(", {ranks} ranks ({})", run.exchange),
        };
        let devices = match &run.devices[..] {
            [one] if one == "cpu" => String::new(),
            [one] => format!("on {one} with "),
            devices => format!("{} devices ({}) of ", devices.len(), devices.join(", ")),
        };
        self.line(&format!(
            "controller {}, {devices}{}{ranks}, {}, seed {}",
            run.controller,
            counted(run.threads, ["thread", "threads"]),
            run.instruction_set,
            run.seed,
        ));
        self.envs = vec![None; run.envs];
        self.stepping = Stepping { started: Instant::now(), steps: 0 };
        if self.mode == Mode::Bars {
            self.bars = Some(Bars::new(run));
        }
        self.run = Some(run.clone());
    }

    fn step(&mut self, step: &StepCompleted) {
        if let Some(bars) = &self.bars {
            bars.env(step);
        }
        if let Some(place) = self.envs.get_mut(step.env) {
            *place = Some(step.clone());
        }
        // The envs of a step come one after another; the last one completes it.
        if step.env + 1 == self.envs.len() {
            self.complete_step(step);
        }
    }

    fn complete_step(&mut self, step: &StepCompleted) {
        let Some(run) = &self.run else { return };
        self.stepping.steps += 1;
        let done = step.round * run.steps + step.step + 1;
        let left = self.stepping.left((run.steps * run.rounds).saturating_sub(done));
        let told = |rate| format!("{} images/s, ", thousands(rate as u64));
        let rate = step.images_per_s.map_or_else(String::new, told);
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
        let accuracies = accuracies(&self.envs);
        self.line(&format!("{round}step {number:>3}/{steps}  {accuracies}  {rate}"));
    }

    fn batch(&self, event: &Event) {
        let Event::BatchCompleted { env, round, step, batch, loss } = event else { return };
        let [round, step, batch] = [round, step, batch].map(|index| index + 1);
        let line = format!("round {round} step {step} batch {batch} env {env} loss {loss:?}");
        self.line(&line);
    }
}

impl Observer for Progress {
    fn joined(&mut self, rank: usize) {
        self.rank = rank;
    }

    fn devices_changed(&mut self, began: &[String], now: &[String]) {
        let [began, now] = [began, now].map(|devices| devices.join(","));
        plain::err(&format!(
            "warning: the run began on {began} and goes on on {now}; another kind of device rounds \
             differently, so its results differ from here on"
        ));
    }

    fn event(&mut self, event: &Event) {
        match event {
            Event::RunStarted(run) => self.begin(run),
            Event::StepCompleted(step) => self.step(step),
            Event::BatchCompleted { .. } => self.batch(event),
            Event::PolicyUpdated { round, report } => {
                let accuracy = mean_accuracy(&self.envs);
                self.line(&round_ended(*round, accuracy, report));
                if self.verbose {
                    self.line(&learned(report));
                }
            }
            Event::RunEnded { .. } => {
                if let Some(bars) = self.bars.take() {
                    bars.clear();
                }
            }
            other => {
                if let Some(text) = story(other) {
                    self.line(&text);
                }
            }
        }
    }

    fn stop_requested(&self) -> bool {
        STOP.load(Ordering::Relaxed)
    }
}

/// `9,000`, or `2,176 to 2,250` where envs differ.
fn images_per_step([least, most]: [usize; 2]) -> String {
    match least == most {
        true => thousands(most as u64),
        false => format!("{} to {}", thousands(least as u64), thousands(most as u64)),
    }
}

/// The end of the splits' sizes.
fn test_images(samples: Option<usize>) -> String {
    match samples {
        Some(samples) => format!(", {} test images", thousands(samples as u64)),
        None => " images, no test split".into(),
    }
}

/// The text of an event that gets a line of its own.
fn story(event: &Event) -> Option<String> {
    Some(match event {
        Event::ModuleGerminated { env, slot, blueprint, parameters, .. } => format!(
            "  env {env}: {blueprint} germinates in {slot} ({} parameters)",
            thousands(*parameters as u64)
        ),
        Event::StageChanged { env, slot, to, .. }
            if ["training", "blending", "holding"].contains(&to.as_str()) =>
        {
            format!("  env {env}: {slot} is {to}")
        }
        Event::ModulePruned { env, slot, blueprint, contribution, .. } => {
            format!("  env {env}: {blueprint} in {slot} is pruned{}", worth(*contribution))
        }
        Event::ModuleFossilized { env, slot, blueprint, contribution, .. } => {
            format!("  env {env}: {blueprint} in {slot} is fossilized{}", worth(*contribution))
        }
        Event::GovernorRollback { env, failure, restored_step, .. } => {
            let to = restored_step.map_or("the start of its episode".into(), |step| {
                format!("its state after step {}", step + 1)
            });
            format!("  env {env}: {}; it is rolled back to {to}", failure.describe())
        }
        Event::Anomaly { env, what, .. } => format!("  env {env}: {what}"),
        _ => return None,
    })
}

/// Formats the end of a policy's round as one line.
fn round_ended(round: usize, accuracy: Option<f64>, report: &RoundReport) -> String {
    let skipped = if report.skipped > 0 { "; update skipped" } else { "" };
    let (number, accuracy) = (round + 1, percent(accuracy));
    format!("  round {number}: mean accuracy {accuracy}, return {:.3}{skipped}", report.mean_return)
}

/// Formats the statistics of a policy's update as one line, with the entropies of all heads that
/// had a choice.
fn learned(report: &RoundReport) -> String {
    let heads = HEADS.iter().zip(report.entropies).filter(|(_, entropy)| *entropy > 0.0);
    let entropies: Vec<String> =
        heads.map(|(head, entropy)| format!("{} {entropy:.2}", head.name)).collect();
    let ops = Op::ALL.iter().zip(report.ops).filter(|(_, count)| *count > 0);
    let ops: Vec<String> = ops.map(|(op, count)| format!("{op} {count}")).collect();
    let ranks = report.fingerprint.as_ref();
    let ranks = ranks.map_or(String::new(), |hash| format!("; fingerprint {hash} on all ranks"));
    format!(
        "    KL {:.4}, explained variance {:.2}, entropy {}; actions {}{ranks}",
        report.kl,
        report.explained_variance,
        entropies.join(" "),
        ops.join(" ")
    )
}

/// Mean control accuracy over all envs after the last step.
fn mean_accuracy(envs: &[Option<StepCompleted>]) -> Option<f64> {
    mean(envs.iter().flatten().filter_map(|step| step.control_accuracy))
}

fn worth(contribution: Option<f64>) -> String {
    contribution.map_or(String::new(), |pp| format!(" (contribution {pp:+.1} points)"))
}

/// Formats accuracies, such as `control accuracy 81.2 80.4 %, bare 78.5 %`, or as a range if there
/// are many. Of twins it gives the mean.
fn accuracies(envs: &[Option<StepCompleted>]) -> String {
    let shares: Vec<f64> = envs
        .iter()
        .flatten()
        .map(|step| step.control_accuracy.unwrap_or(step.train_accuracy))
        .collect();
    let what = match envs.iter().flatten().any(|step| step.control_accuracy.is_some()) {
        true => "control",
        false => "training",
    };
    let (median, least, greatest) = plain::spread(&shares);
    let figures = match shares.len() {
        0..=8 => shares.iter().map(|s| format!("{:4.1}", 100.0 * s)).collect::<Vec<_>>().join(" "),
        _ => {
            format!("{:.1} to {:.1}, median {:.1}", 100.0 * least, 100.0 * greatest, 100.0 * median)
        }
    };
    let twins = envs.iter().flatten().filter_map(|step| step.twin?.control_accuracy);
    let bare =
        mean(twins).map_or(String::new(), |share| format!(", bare {}", percent(Some(share))));
    format!("{what} accuracy {figures} %{bare}")
}

/// Duration of the steps so far.
struct Stepping {
    started: Instant,
    steps: u32,
}

impl Stepping {
    fn left(&self, steps: usize) -> Duration {
        self.started.elapsed() / self.steps.max(1) * u32::try_from(steps).unwrap_or(u32::MAX)
    }
}

/// One line per env, as far as the terminal has room, and one for the run.
struct Bars {
    all: MultiProgress,
    envs: Vec<ProgressBar>,
    /// Line for all envs without a line of their own.
    others: Option<ProgressBar>,
    total: ProgressBar,
}

/// Number of envs that get a line of their own on a terminal with `rows` rows. The total needs a
/// row, so do the other envs if there are too many, and so does the cursor.
fn lines_of_envs(envs: usize, rows: usize) -> usize {
    if envs + 2 <= rows { envs } else { rows.saturating_sub(3) }
}

impl Bars {
    fn new(run: &RunStarted) -> Self {
        let rows =
            console::Term::stderr().size_checked().map_or(usize::MAX, |(rows, _)| rows.into());
        let shown = lines_of_envs(run.envs, rows);
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
        let envs = (0..shown).map(|env| bar(format!("env {env}"))).collect();
        let others = (shown < run.envs).then(|| bar(format!("{} more", run.envs - shown)));
        let total = all.add(ProgressBar::new((run.steps * run.rounds) as u64).with_style(whole));
        total.enable_steady_tick(Duration::from_millis(500));
        *TOTAL.lock().unwrap_or_else(PoisonError::into_inner) = Some(total.clone());
        Self { all, envs, others, total }
    }

    /// Updates the bar of the run, unless its line says that the run stops.
    fn step_completed(&self, done: usize, place: String, rate: String) {
        let _unchanged = TOTAL.lock().unwrap_or_else(PoisonError::into_inner);
        self.total.set_position(done as u64);
        self.total.set_prefix(place);
        if !STOP.load(Ordering::Relaxed) {
            self.total.set_message(rate);
        }
    }

    fn show_others(&self, envs: &[Option<StepCompleted>]) {
        let Some(bar) = &self.others else { return };
        bar.set_message(accuracies(envs.get(self.envs.len()..).unwrap_or_default()));
        bar.tick();
    }

    fn env(&self, step: &StepCompleted) {
        let Some(bar) = self.envs.get(step.env) else { return };
        bar.set_message(standing(step));
        bar.tick();
    }

    fn clear(self) {
        *TOTAL.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.envs.iter().chain(&self.others).for_each(ProgressBar::finish_and_clear);
        self.total.finish_and_clear();
    }
}

/// Formats accuracy, modules and parameters of an env. Modules come early, because the end may be
/// cut off at 80 columns.
fn standing(step: &StepCompleted) -> String {
    let accuracy = match step.control_accuracy {
        Some(share) => format!("control {}", percent(Some(share))),
        None => format!("training {}", percent(Some(step.train_accuracy))),
    };
    let grown = match step.grown_parameters {
        0 => String::new(),
        grown => format!(" + {}", thousands(grown as u64)),
    };
    let host = thousands(step.host_parameters as u64);
    let slots = step.slots.iter().map(slot);
    let parts = std::iter::once(accuracy).chain(slots).chain([format!("{host}{grown} parameters")]);
    parts.collect::<Vec<_>>().join("  ")
}

/// Formats a slot. A blending module shows its α instead of its stage.
fn slot(state: &SlotState) -> String {
    let blueprint = state.blueprint.as_deref().unwrap_or("");
    let stage = match state.stage.as_str() {
        "blending" => format!("α {:.2}", state.alpha),
        stage => stage.to_string(),
    };
    format!("{} {blueprint} {stage}", state.slot).replace("  ", " ")
}

#[cfg(test)]
mod tests {
    use meristem::train::events::TwinStep;

    use super::*;

    fn step(env: usize, control_accuracy: Option<f64>) -> Option<StepCompleted> {
        Some(StepCompleted {
            env,
            round: 0,
            step: 0,
            train_loss: 1.0,
            train_accuracy: 0.5,
            control_loss: None,
            control_accuracy,
            host_gradient_norm: None,
            host_parameters: 6418,
            grown_parameters: 0,
            slots: vec![],
            action: "WAIT".into(),
            reward: Default::default(),
            step_seconds: Some(1.0),
            images_per_s: Some(1.0),
            phases: None,
            gradients: None,
            fingerprint: None,
            twin: None,
        })
    }

    #[test]
    fn a_step_is_told_in_one_line() {
        let few = [step(0, Some(0.812)), step(1, Some(0.5))];
        assert_eq!(accuracies(&few), "control accuracy 81.2 50.0 %");
        let bare = [step(0, None)];
        assert_eq!(accuracies(&bare), "training accuracy 50.0 %");
        assert_eq!(mean_accuracy(&few), Some(0.656));
        let twin = |share| {
            let twin = TwinStep { train_loss: None, control_loss: None, control_accuracy: share };
            step(0, Some(0.812)).map(|step| StepCompleted { twin: Some(twin), ..step })
        };
        let beside = [twin(Some(0.7)), twin(Some(0.71))];
        assert_eq!(accuracies(&beside), "control accuracy 81.2 81.2 %, bare 70.5 %");
        assert_eq!(accuracies(&[twin(None)]), "control accuracy 81.2 %");
        assert_eq!(mean_accuracy(&bare), None);
        let many: Vec<_> = (0..9).map(|env| step(env, Some(env as f64 / 10.0))).collect();
        assert_eq!(accuracies(&many), "control accuracy 0.0 to 80.0, median 40.0 %");
    }

    #[test]
    fn envs_leave_room_for_the_total() {
        assert_eq!(lines_of_envs(4, 24), 4);
        assert_eq!([lines_of_envs(22, 24), lines_of_envs(23, 24)], [22, 21]);
        assert_eq!([lines_of_envs(64, 10), lines_of_envs(64, 2)], [7, 0]);
    }

    #[test]
    fn what_grows_stands_within_80_columns() {
        let slot = |slot: &str| SlotState {
            slot: slot.into(),
            stage: "blending".into(),
            blueprint: Some("conv_light".into()),
            alpha: 0.25,
            contribution: None,
            gradient_health: None,
        };
        let mut growing = step(0, Some(0.8)).unwrap();
        growing.slots = vec![slot("r0c1"), slot("r1c2")];
        let text = standing(&growing);
        let expected = "control 80.0 %  r0c1 conv_light α 0.25  r1c2 conv_light α 0.25";
        assert_eq!(text, format!("{expected}  6,418 parameters"));
        // After the prefix `   env 0 `.
        assert!(9 + expected.chars().count() < 80);
    }

    #[test]
    fn a_round_of_a_policy_is_told_in_a_line_and_a_verbose_one() {
        let mut report = RoundReport { mean_return: 1.25, kl: 0.0123, ..RoundReport::default() };
        report.explained_variance = 0.5;
        (report.entropies[0], report.entropies[2]) = (0.75, 1.0);
        (report.ops[0], report.ops[1]) = (7, 1);
        let expected = "  round 2: mean accuracy 50.0 %, return 1.250";
        assert_eq!(round_ended(1, Some(0.5), &report), expected);
        assert_eq!(
            learned(&report),
            "    KL 0.0123, explained variance 0.50, entropy op 0.75 blueprint 1.00; \
             actions WAIT 7 GERMINATE 1"
        );
        report.skipped = 1;
        assert_eq!(round_ended(1, Some(0.5), &report), format!("{expected}; update skipped"));
    }
}

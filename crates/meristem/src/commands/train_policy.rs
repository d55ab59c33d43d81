//! `meristem control train-policy`.

use comfy_table::CellAlignment;
use meristem::train::Observer;
use meristem::train::policy_training::{
    CurveLine, Evaluation, PolicyTraining, TrainedRound, TrainingObserver, train_policy,
};

use super::{Outcome, exit_code, print_json};
use crate::cli::TrainPolicyArguments;
use crate::plain::{self, printable, shown, thousands};
use crate::plot::{self, PlotFile};
use crate::progress::{Mode, Progress};
use crate::signals::stop_on_signals;
use crate::table;

/// Plot in the folder of a training.
const PLOT: &str = "curves.svg";

/// Prints rounds and evaluations on stderr, because results are on stdout.
struct PrintedTraining {
    /// Answers whether a stop was requested; prints nothing.
    progress: Progress,
    quiet: bool,
    rounds: usize,
}

impl Observer for PrintedTraining {
    fn stop_requested(&self) -> bool {
        self.progress.stop_requested()
    }
}

impl TrainingObserver for PrintedTraining {
    fn line(&mut self, line: &CurveLine) {
        if self.quiet {
            return;
        }
        plain::err(&printable(&match line {
            CurveLine::Round(round) => self.round(round),
            CurveLine::Evaluation(evaluation) => summary(evaluation),
        }));
    }
}

impl PrintedTraining {
    fn round(&self, line: &TrainedRound) -> String {
        let TrainedRound { round, seconds, dataset, steps, report, .. } = line;
        let place = format!("round {} of {}: {dataset}, {steps} steps", round + 1, self.rounds);
        match report {
            None => format!("{place}, diverged, without an update of the policy"),
            Some(report) => format!(
                "{place}, return {:+.3}, entropy of ops {:.2}, KL {:.4}, {:.0} transitions/s",
                report.mean_return,
                report.entropies[0],
                report.kl,
                report.transitions as f64 / seconds
            ),
        }
    }
}

fn summary(evaluation: &Evaluation) -> String {
    let all = evaluation.controllers.iter();
    let all = all.map(|(name, of)| format!("{name} {:+.3}", of.mean_return));
    let transitions = thousands(evaluation.transitions_total);
    format!("after {transitions} transitions: returns {}", all.collect::<Vec<_>>().join(", "))
}

pub(crate) fn run(arguments: &TrainPolicyArguments) -> Outcome {
    let mut request = PolicyTraining::read(&arguments.file)?;
    request.rounds = arguments.rounds.unwrap_or(request.rounds);
    let folder = arguments.folder();
    let _listening = stop_on_signals("the rounds that are complete", || {})?;
    let progress = Progress::new(Mode::Quiet);
    let (quiet, rounds) = (arguments.quiet, request.rounds);
    let mut observer = PrintedTraining { progress, quiet, rounds };
    let trained = train_policy(&request, &folder, &mut observer)?;
    if let Some(picture) = plot::policy_training(&trained.lines) {
        PlotFile::svg(folder.join(PLOT)).write(&picture)?;
    }
    let last = trained.lines.iter().rev().find_map(|line| match line {
        CurveLine::Evaluation(evaluation) => Some(evaluation),
        CurveLine::Round(_) => None,
    });
    match last {
        Some(evaluation) if arguments.json => print_json(evaluation)?,
        Some(evaluation) => plain::out(&report(evaluation)),
        None => {}
    }
    if !arguments.json {
        plain::out(&format!("folder {}", shown(&folder)));
    }
    Ok(exit_code(trained.status))
}

/// Table of an evaluation.
fn report(evaluation: &Evaluation) -> String {
    let mut table = table::new();
    table.set_header(["controller", "return", "gain over the twin, nats", "parameters"]);
    for (name, of) in &evaluation.controllers {
        let interval = of.ci95.map_or(String::new(), |half| format!(" ± {half:.3}"));
        let diverged = match of.diverged {
            0 => String::new(),
            tasks => format!(", without {tasks} diverged"),
        };
        table.add_row([
            printable(name),
            format!("{:+.3}{interval}{diverged}", of.mean_return),
            format!("{:+.4}", of.gain),
            format!("× {:.2}", of.growth),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let (transitions, round) = (thousands(evaluation.transitions_total), evaluation.round);
    format!("{table}\nafter {round} rounds, {transitions} transitions")
}

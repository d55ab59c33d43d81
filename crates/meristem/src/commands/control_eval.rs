//! `meristem control eval`.

use std::io::IsTerminal;
use std::process::ExitCode;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use meristem::nn::Network;
use meristem::train::statistics::{PairedDifference, Spread};
use meristem::train::study::{Planned, Study, StudyConfig, StudyObserver, compare};
use meristem::train::summary::Status;
use meristem::train::{Event, Observer};

use super::{Outcome, print_json};
use crate::cli::ControlEvalArguments;
use crate::plain::{self, counted};
use crate::progress::{Mode, Progress};
use crate::signals::stop_on_signals;

pub(crate) fn run(arguments: &ControlEvalArguments) -> Outcome {
    let (file, flags) = (arguments.settings.file()?, arguments.layer());
    let config = StudyConfig::resolve(file, flags, arguments.contenders(), arguments.seeds)?;
    if let Some(plot) = &arguments.plot {
        plot.check()?;
    }
    stop_on_signals("what is complete so far")?;
    let study = compare(&config, &mut Watch::new(arguments.quiet))?;
    if let Some(plot) = &arguments.plot {
        plot.write(&study)?;
    }
    match arguments.json {
        true => print_json(&study)?,
        false => plain::out(&report(&study)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Shows one run after another, all on stderr: stdout is for the comparison.
struct Watch {
    mode: Mode,
    progress: Progress,
}

impl Watch {
    fn new(quiet: bool) -> Self {
        let mode = match quiet {
            true => Mode::Quiet,
            false if std::io::stderr().is_terminal() => Mode::Bars,
            false => Mode::LinesOnStderr,
        };
        Self { mode, progress: Progress::new(mode) }
    }
}

impl Observer for Watch {
    fn event(&mut self, event: &Event) {
        self.progress.event(event);
    }

    fn batch_enqueued(&mut self, env: usize, network: &Network) -> meristem::train::Result<()> {
        self.progress.batch_enqueued(env, network)
    }

    fn stop_requested(&self) -> bool {
        self.progress.stop_requested()
    }
}

impl StudyObserver for Watch {
    fn run_begins(&mut self, planned: &Planned<'_>) {
        self.progress = Progress::new(self.mode);
        let &Planned { number, of, contender, seed, learns } = planned;
        let what = if learns { "learns for" } else { "with" };
        self.progress.line(&format!("run {number} of {of}: {contender} {what} seed {seed}"));
    }
}

/// What a user is told at the end.
fn report(study: &Study) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    let first = study.contenders.first().map(|first| first.contender.to_string());
    let against = format!("points over {}", first.unwrap_or_default());
    let columns = [
        "controller",
        "seeds",
        "test accuracy",
        "parameters",
        "points per 1000",
        &against,
        "ahead",
    ];
    table.set_header(columns);
    for report in &study.contenders {
        table.add_row([
            report.contender.to_string(),
            report.runs.len().to_string(),
            spread(report.test_accuracy, |share| format!("{:.2}", 100.0 * share)) + " %",
            spread(report.parameters, |count| plain::thousands(count.round() as u64)),
            spread(report.points_per_1000_parameters, |points| format!("{points:.2}")),
            spread(report.difference_pp.map(|d| d.spread), |pp| format!("{pp:+.2}")),
            ahead(report.difference_pp),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut lines = vec![table.to_string()];
    if study.status == Status::Interrupted {
        let complete = study.contenders.iter().map(|report| report.runs.len()).sum::<usize>();
        let all = study.contenders.len() * study.seeds.len();
        lines.push(format!(
            "stopped: {complete} of {all} runs are complete, the others are left out"
        ));
    }
    lines.push(format!(
        "mean ± standard deviation over seeds, each the mean of {}; {} of `{}`",
        counted(study.envs, ["env", "envs"]),
        counted(study.steps, ["step", "steps"]),
        study.host,
    ));
    lines.join("\n")
}

/// `81.20 ± 0.31`; the spread is that of the same format without sign.
fn spread(of: Option<Spread>, format: impl Fn(f64) -> String) -> String {
    let Some(Spread { mean, std, .. }) = of else { return "–".into() };
    let spread = std.map_or("–".into(), |std| format(std).trim_start_matches('+').to_string());
    format!("{} ± {spread}", format(mean))
}

/// `3 of 5`.
fn ahead(difference: Option<PairedDifference>) -> String {
    difference.map_or("–".into(), |d| format!("{} of {}", d.ahead, d.spread.count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_read_well() {
        let two = |x: f64| format!("{x:+.2}");
        let of = |std| Some(Spread { count: 3, mean: -1.5, std });
        assert_eq!(spread(of(Some(0.25)), two), "-1.50 ± 0.25");
        assert_eq!(spread(of(None), two), "-1.50 ± –");
        assert_eq!(spread(None, two), "–");
    }
}

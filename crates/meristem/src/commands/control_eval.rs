//! `meristem control eval`.

use std::path::{Path, PathBuf};

use comfy_table::CellAlignment;
use meristem::nn::ScoreKind;
use meristem::train::statistics::{PairedDifference, Spread};
use meristem::train::study::{Study, StudyConfig, compare};
use meristem::train::summary::Status;
use tempfile::TempDir;

use super::printed_study::PrintedStudy;
use super::{Outcome, exit_code, print_scores};
use crate::cli::ControlEvalArguments;
use crate::failure::Failure;
use crate::plain::{self, counted, printable};
use crate::plot;
use crate::signals::stop_on_signals;
use crate::{score, table};

/// Output folder of the runs.
struct RunsFolder {
    folder: PathBuf,
    /// Temporary folder that contains `folder`, if the runs are not kept.
    temporary: Option<TempDir>,
}

impl RunsFolder {
    fn of(kept: Option<&Path>) -> Result<Self, Failure> {
        if let Some(folder) = kept {
            return Ok(Self { folder: folder.to_owned(), temporary: None });
        }
        let temporary = tempfile::tempdir().map_err(|error| {
            let place = std::env::temp_dir();
            let message = format!("cannot create a folder in {}: {error}", place.display());
            Failure::failed(message, "set TMPDIR to a writable folder, or give --run-dir")
        })?;
        let folder = temporary.path().join("study");
        Ok(Self { folder, temporary: Some(temporary) })
    }

    /// Removes the temporary folder, to which a run may still be writing.
    fn clear(temporary: &Path) {
        // One attempt fails if a file is created meanwhile; one of a hundred attempts succeeds.
        let _ = (0..100).find(|_| std::fs::remove_dir_all(temporary).is_ok());
    }
}

pub(crate) fn run(arguments: &ControlEvalArguments) -> Outcome {
    if !arguments.quiet {
        arguments.settings.note_repeated();
    }
    let (file, flags) = (arguments.settings.file()?, arguments.settings.layer());
    let place = RunsFolder::of(arguments.run_dir.as_deref())?;
    let (contenders, seeds) = (arguments.contenders(), arguments.seeds);
    let config = StudyConfig::resolve(file, flags, contenders, seeds, place.folder)?;
    if let Some(plot) = &arguments.plot {
        plot.check()?;
    }
    let temporary = place.temporary.as_ref().map(|folder| folder.path().to_owned());
    let at_once = move || temporary.iter().for_each(|folder| RunsFolder::clear(folder));
    let _listening = stop_on_signals("the results of complete runs", at_once)?;
    let study = compare(&config, &mut PrintedStudy::new(arguments.quiet))?;
    match &arguments.plot {
        Some(_) if study.complete() == 0 => {
            plain::err("no plot was written, because no run is complete");
        }
        Some(plot) => plot.write(&plot::study(&study))?,
        None => {}
    }
    if arguments.json {
        print_scores(&study, study.task.score())?
    } else {
        plain::out(&report(&study))
    }
    Ok(exit_code(study.status))
}

/// Text of the comparison.
fn report(study: &Study) -> String {
    let stopped = stopped(study);
    if let Some(stopped) = stopped.as_ref().filter(|_| study.complete() == 0) {
        return format!("{stopped}; there is nothing to compare");
    }
    let mut table = table::new();
    let first = study.contenders.first().map(|first| printable(&first.contender.to_string()));
    let against = format!("points above {}", first.unwrap_or_default());
    let kind = study.task.score();
    let test = format!("test {kind}");
    let columns = ["controller", "seeds", &test, "parameters", "GFLOP", &against, "seeds ahead"];
    table.set_header(columns);
    for report in &study.contenders {
        table.add_row([
            printable(&report.contender.to_string()),
            report.runs.len().to_string(),
            spread(report.test_score, |score| match kind {
                ScoreKind::Accuracy => format!("{:.2}", 100.0 * score),
                _ => format!("{score:.4}"),
            }) + score::unit(kind),
            spread(report.parameters, |count| plain::thousands(count.round() as u64)),
            spread(report.flops, |flops| format!("{:.1}", flops / 1e9)),
            spread(report.difference_pp.map(|d| d.spread), |pp| format!("{pp:+.2}")),
            ahead(report.difference_pp),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut lines = vec![table.to_string()];
    lines.extend(stopped.map(|stopped| format!("{stopped}; others are left out")));
    lines.push(format!(
        "mean ± 95 % interval over seeds; a seed is the mean of {} with {} of `{}`",
        counted(study.envs, ["env", "envs"]),
        counted(study.steps, ["step", "steps"]),
        study.host,
    ));
    lines.join("\n")
}

/// Describes the position at which a study was stopped; `None` for a complete one.
fn stopped(study: &Study) -> Option<String> {
    let (complete, contenders) = (study.complete(), study.contenders.len());
    let seed = study.seeds.get(complete / contenders.max(1))?;
    let next = study.contenders.get(complete % contenders.max(1))?;
    let all = contenders * study.seeds.len();
    (study.status == Status::Interrupted).then(|| {
        let (number, who) = (complete + 1, &next.contender);
        format!(
            "stopped in run {number} ({who} with seed {seed}); \
             {complete} of {all} runs are complete"
        )
    })
}

/// Formats mean and 95 % interval, such as `81.20 ± 0.31`, both by `format`, the interval without
/// its sign.
fn spread(value: Option<Spread>, format: impl Fn(f64) -> String) -> String {
    let Some(Spread { mean, ci95, .. }) = value else { return "–".into() };
    let half = ci95.map_or("–".into(), |half| format(half).trim_start_matches('+').to_string());
    format!("{} ± {half}", format(mean))
}

/// Formats the number of seeds ahead, such as `3 of 5`.
fn ahead(difference: Option<PairedDifference>) -> String {
    difference.map_or("–".into(), |d| format!("{} of {}", d.ahead, d.spread.count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_formatted() {
        let two = |x: f64| format!("{x:+.2}");
        let of = |ci95| Some(Spread { count: 3, mean: -1.5, std: Some(7.0), ci95 });
        assert_eq!(spread(of(Some(0.25)), two), "-1.50 ± 0.25");
        assert_eq!(spread(of(None), two), "-1.50 ± –");
        assert_eq!(spread(None, two), "–");
    }
}

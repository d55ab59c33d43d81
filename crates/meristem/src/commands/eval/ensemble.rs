//! `meristem eval --ensemble`.

use std::path::Path;
use std::process::ExitCode;

use meristem::nn::ScoreKind;
use meristem::train::eval::{EnsembleConfig, EnsembleReport, Quality, evaluate_ensemble};

use crate::cli::EvalArguments;
use crate::commands::{Outcome, locate, print_scores};
use crate::failure::Failure;
use crate::plain::{self, counted, printable, thousands};
use crate::{score, table};

pub(super) fn run(arguments: &EvalArguments, run: &Path) -> Outcome {
    let options = &arguments.dataset;
    let given = options.dataset.is_some();
    if !given && options.is_changed() {
        return Err(Failure::usage(
            "options of a dataset with --ensemble, but no --dataset",
            "give --dataset, too; or leave them out, to evaluate on the dataset of the run",
        ));
    }
    let config = EnsembleConfig {
        members: (!arguments.members.is_empty()).then(|| arguments.members.clone()),
        top: arguments.top,
        dataset: given.then(|| options.spec()).transpose()?,
        split: super::split(&arguments.split)?,
        batch: arguments.batch,
        device: arguments.network.device()?,
        precision: arguments.network.precision,
        threads: arguments.threads,
        ..EnsembleConfig::new(locate(run))
    };
    let report = evaluate_ensemble(&config)?;
    if arguments.json {
        print_scores(&report, report.score_kind)?
    } else {
        plain::out(&text(&report))
    }
    Ok(ExitCode::SUCCESS)
}

fn text(report: &EnsembleReport) -> String {
    let kind = report.score_kind;
    let count = report.envs.len();
    let mut table = table::new();
    let samples = thousands(report.samples);
    table.set_header([
        format!("{}, {samples} samples", report.split),
        kind.to_string(),
        "loss".into(),
        "calibration error".into(),
    ]);
    let mut row = |name: String, quality: &Quality| {
        let error = quality.calibration_error;
        table.add_row([
            name,
            score::value(kind, Some(quality.score)),
            format!("{:.4}", quality.loss),
            error.map_or("–".into(), |error| score::value(ScoreKind::Accuracy, Some(error))),
        ]);
    };
    row(format!("ensemble of {count}"), &report.ensemble);
    let best = &report.best;
    let member = best.member.as_ref().map_or(String::new(), |member| format!(": {member}"));
    row(printable(&format!("best single, env {}{member}", best.env)), &best.quality);
    row(format!("mean of the {count} singles"), &report.mean_of_singles);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(comfy_table::CellAlignment::Right);
    }
    let by = match best.control_score {
        Some(_) => "control",
        None => "training",
    };
    let mut lines = vec![table.to_string()];
    lines.push(format!("the best single has the best {by} score"));
    if !report.left_out.is_empty() {
        let left_out = counted(report.left_out.len(), ["network is", "networks are"]);
        lines.push(format!("{left_out} not part of the ensemble; --json lists them"));
    }
    lines.join("\n")
}

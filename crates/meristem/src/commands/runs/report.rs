//! `meristem runs report`: runs as one page.

use std::process::ExitCode;

use meristem::train::check_output;
use meristem::train::reading::Run;
use meristem::train::run_folder::write_whole;

use super::super::Outcome;
use super::read;
use crate::cli::ReportArguments;
use crate::page::{Html, about, comparison, results, side_by_side};
use crate::plain::{self, counted, printable};

pub(super) fn run(arguments: &ReportArguments) -> Outcome {
    check_output("out", &arguments.out)?;
    let runs = read(&arguments.runs)?;
    write_whole(&arguments.out, page(&runs).as_bytes())?;
    let what = counted(runs.len(), ["run", "runs"]);
    plain::out(&printable(&format!("{}: report of {what}", arguments.out.display())));
    Ok(ExitCode::SUCCESS)
}

fn page(runs: &[Run]) -> String {
    let mut body = Html::of("h1", &format!("Report of {}", counted(runs.len(), ["run", "runs"])));
    if runs.len() > 1 {
        let mut list = Html::default();
        for (number, run) in runs.iter().enumerate() {
            let link = Html::link(number + 1, &run.path.display().to_string());
            list.push(Html::element("li", "", link));
        }
        body.push(Html::element("ol", "", list));
    }
    let all: Vec<&Run> = runs.iter().collect();
    match all[..] {
        [_] => body.push(side_by_side("Results", &results(&all))),
        _ => comparison(&all).into_iter().for_each(|part| body.push(part.html)),
    }
    for (number, run) in runs.iter().enumerate() {
        body.push(Html::heading(number + 1, &run.path.display().to_string()));
        about(run).into_iter().for_each(|part| body.push(part.html));
    }
    Html::file("Meristem: report", body)
}

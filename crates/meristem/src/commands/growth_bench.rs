//! `meristem growth bench`.

use meristem::train::growth_bench::{TaskReport, growth_bench};

use super::printed_study::PrintedStudy;
use super::{Outcome, exit_code, print_json};
use crate::cli::GrowthBenchArguments;
use crate::plain;
use crate::plot::{self, PlotFile};
use crate::signals::stop_on_signals;

pub(crate) fn run(arguments: &GrowthBenchArguments) -> Outcome {
    let request = arguments.request()?;
    let _listening = stop_on_signals("the results of complete runs", || {})?;
    let table = growth_bench(&request, &mut PrintedStudy::new(arguments.quiet))?;
    let has_runs = |task: &&TaskReport| task.methods.iter().any(|method| !method.runs.is_empty());
    for task in table.tasks.iter().filter(has_runs) {
        let path = request.folder.join(format!("{}.svg", task.task));
        PlotFile::svg(path).write(&plot::growth(task))?;
    }
    if arguments.json {
        print_json(&table)?;
    } else {
        plain::out(table.markdown().trim_end());
    }
    Ok(exit_code(table.status))
}

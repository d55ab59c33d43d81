//! `meristem host show`.

use std::process::ExitCode;

use comfy_table::CellAlignment;
use meristem::data::{InputKind, SampleShape};
use meristem::export::drawing::topology;
use meristem::grow::{self, HostSummary, TaskShape};
use meristem::train::read_host;

use super::{Outcome, print_json};
use crate::cli::HostShowArguments;
use crate::plain::{self, counted, thousands};
use crate::table;

pub(crate) fn show(arguments: &HostShowArguments) -> Outcome {
    arguments.plot.as_ref().map_or(Ok(()), |plot| plot.check())?;
    let (kind, shape) = arguments.input;
    let SampleShape { channels, height, width } = shape;
    let image = TaskShape { channels, height, width, classes: arguments.classes };
    let host = read_host(&arguments.host)?;
    let summary = host.summary(&image).map_err(grow::Error::from)?;
    if let Some(plot) = &arguments.plot {
        plot.write(&topology(&host, &[]))?;
    }
    if arguments.json {
        print_json(&summary)?;
    } else {
        print(&summary, &format!("{} of {}", kind.plural(), kind.describe(shape)), kind);
    }
    Ok(ExitCode::SUCCESS)
}

fn print(summary: &HostSummary, samples: &str, kind: InputKind) {
    let mut table = table::new();
    table.set_header(["name", "layer", "output", "parameters", "MACs"]);
    let number = |n: u64| if n == 0 { String::new() } else { thousands(n) };
    for layer in &summary.layers {
        table.add_row([
            layer.name.clone().unwrap_or_default(),
            format!("{}{}", "· ".repeat(layer.depth), layer.layer),
            layer.output.map(|size| size.to_string()).join("×"),
            number(layer.parameters as u64),
            number(layer.macs),
        ]);
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let described = summary.host.starts_with('{');
    plain::out(if described { &summary.name } else { &summary.host });
    plain::out(&table.to_string());
    plain::out(&format!(
        "{samples}, {}: {} parameters, {} multiply-accumulate operations per {kind}, {}",
        counted(summary.classes, ["class", "classes"]),
        thousands(summary.parameters as u64),
        thousands(summary.macs),
        counted(summary.slots, ["slot", "slots"]),
    ));
}

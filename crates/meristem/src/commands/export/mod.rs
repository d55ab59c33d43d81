//! `meristem export`.

mod csv;
mod onnx;
mod tensorboard;

use meristem::train::reading::Skipped;

use super::Outcome;
use crate::cli::ExportCommand;
use crate::plain;

pub(crate) fn run(command: &ExportCommand) -> Outcome {
    match command {
        ExportCommand::Csv(arguments) => csv::run(arguments),
        ExportCommand::Onnx(arguments) => onnx::run(arguments),
        ExportCommand::Tensorboard(arguments) => tensorboard::run(arguments),
    }
}

/// Warns of lines of the events that an export leaves out.
fn tell_skipped(Skipped { damaged, unknown, newer }: Skipped) {
    let lines = damaged + unknown + newer;
    if lines > 0 {
        plain::err(&format!("warning: {lines} lines of events.jsonl were not understood"));
    }
}

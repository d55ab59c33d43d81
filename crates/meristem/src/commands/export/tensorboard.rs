//! `meristem export tensorboard`.

use std::process::ExitCode;

use meristem::train::tensorboard;

use super::warn_skipped;
use crate::cli::TensorboardArguments;
use crate::commands::{Outcome, locate};
use crate::plain::{self, printable, thousands};

pub(super) fn run(arguments: &TensorboardArguments) -> Outcome {
    let exported = tensorboard::export(&locate(&arguments.run), &arguments.out)?;
    let (file, records) = (exported.file.display(), thousands(exported.records));
    plain::out(&printable(&format!("{file}: {records} records")));
    warn_skipped(exported.skipped);
    Ok(ExitCode::SUCCESS)
}

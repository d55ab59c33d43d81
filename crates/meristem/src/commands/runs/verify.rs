//! `meristem runs verify`: comparison of files with their checksums.

use std::process::ExitCode;

use meristem::train::{FileState, VerifiedFile, verify};
use serde_json::json;

use super::super::{Outcome, locate, print_json};
use crate::cli::VerifyRunsArguments;
use crate::failure::Failure;
use crate::plain::{self, counted, printable};

pub(super) fn run(arguments: &VerifyRunsArguments) -> Outcome {
    let files = verify(&locate(&arguments.folder))?;
    if arguments.json {
        print_json(&json!({ "files": files }))?
    } else {
        files.iter().for_each(|file| plain::out(&printable(&line(file))))
    }
    let damaged: Vec<String> = files
        .iter()
        .filter(|file| file.state == FileState::Damaged)
        .map(|file| file.file.display().to_string())
        .collect();
    if damaged.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let (count, total) = (damaged.len(), counted(files.len(), ["file", "files"]));
    let verb = if count == 1 { "is" } else { "are" };
    Err(Failure::failed(
        format!("{count} of {total} {verb} damaged or missing: {}", damaged.join(", ")),
        "copy them again from where they were written; a run resumes from an older checkpoint if a \
         damaged one is removed",
    ))
}

fn line(VerifiedFile { file, state, problem, .. }: &VerifiedFile) -> String {
    let mark = match state {
        FileState::Whole => "ok  ",
        FileState::Unchecked => "ok? ",
        FileState::Damaged => "FAIL",
    };
    let note = match state {
        FileState::Unchecked => Some("no checksum, from an earlier build"),
        _ => problem.as_deref(),
    };
    let note = note.map_or(String::new(), |note| format!(": {note}"));
    format!("{mark}  {}{note}", file.display())
}

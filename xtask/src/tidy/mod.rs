//! Rules of the house that no compiler checks, as one command.

mod arguments;
mod arrows;
mod cycles;
mod documents;
mod ids;
mod lints;
mod overview;
mod paths;
mod phrases;
mod places;
mod prose;
mod rooms;
mod sizes;
mod tree;
mod waits;

use std::path::Path;
use std::process::ExitCode;

/// A broken rule: its place, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    place: String,
    message: String,
}

impl Finding {
    fn new(place: impl Into<String>, message: impl Into<String>) -> Self {
        Self { place: place.into(), message: message.into() }
    }
}

/// Runs every rule over the repository at `root` and prints the findings.
pub(crate) fn run(root: &Path) -> ExitCode {
    let checked = tree::read(root).and_then(|tree| {
        let mut findings = arrows::check(&tree)?;
        findings.extend(arguments::check(&tree)?);
        findings.extend(cycles::check(&tree)?);
        findings.extend(documents::check(&tree));
        findings.extend(ids::check(&tree));
        findings.extend(lints::check(&tree)?);
        findings.extend(overview::check(&tree)?);
        findings.extend(phrases::check(&tree)?);
        findings.extend(places::check(&tree)?);
        findings.extend(prose::check(&tree));
        findings.extend(rooms::check(&tree)?);
        findings.extend(sizes::check(&tree)?);
        findings.extend(waits::check(&tree)?);
        findings.sort();
        Ok((tree, findings))
    });
    match checked {
        Ok((tree, findings)) if findings.is_empty() => {
            println!("tidy: {} files, nothing to mend", tree.files.len());
            ExitCode::SUCCESS
        }
        Ok((_, findings)) => {
            for Finding { place, message } in &findings {
                eprintln!("{place}: {message}");
            }
            eprintln!("tidy: {} findings", findings.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("tidy could not run: {error}");
            ExitCode::FAILURE
        }
    }
}

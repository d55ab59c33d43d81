//! `meristem check`.

use std::io::stderr;
use std::process::ExitCode;

use console::Term;

use super::{Outcome, print_json};
use crate::check::{self, CheckLine};
use crate::cli::CheckArguments;
use crate::environment::is_drawable;
use crate::plain;

pub(crate) fn run(arguments: &CheckArguments) -> Outcome {
    let device = arguments.device.id()?;
    let checks = check::select(device, &arguments.checks)?;
    // Some checks take seconds, so a terminal shows the name of the current check.
    let terminal = Term::stderr();
    let is_drawable = is_drawable(&stderr());
    let begin = |name: &str| {
        if is_drawable {
            // If the write fails, the checks continue without this line.
            let _ = terminal.write_str(&format!("…     {name}"));
        }
    };
    let each = |line: &CheckLine| {
        let _ = is_drawable.then(|| terminal.clear_line());
        if !arguments.json {
            plain::out(&shown(line));
        }
    };
    let lines = check::run(device, &checks, begin, each);
    if arguments.json {
        print_json(&lines)?;
    }
    let holds = lines.iter().all(|line| line.ok);
    Ok(if holds { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Formats a line, such as `ok    leak              500 epochs: …`, and below it the remedy of a
/// failed check.
fn shown(line: &CheckLine) -> String {
    let mark = if line.ok { "ok  " } else { "FAIL" };
    let text = format!("{mark}  {:<16}  {}", line.name, line.figure);
    match &line.remedy {
        Some(remedy) => format!("{text}\n      help: {remedy}"),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_check_has_its_remedy() {
        let mut line = CheckLine {
            name: "leak",
            ok: false,
            figure: "1.0 MB became 2.0 MB".into(),
            remedy: Some("close something".into()),
            seconds: 1.0,
        };
        let text = "FAIL  leak              1.0 MB became 2.0 MB\n      help: close something";
        assert_eq!(shown(&line), text);
        (line.ok, line.remedy) = (true, None);
        assert_eq!(shown(&line), "ok    leak              1.0 MB became 2.0 MB");
    }
}

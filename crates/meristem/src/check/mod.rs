//! `meristem check`: the checks that a machine and this build must pass, one line per check.
//!
//! - `machine`: devices, libraries, instruction sets;
//! - `residency`: the resident copy and its batches;
//! - `streams`: streams and their memory under load;
//! - `collectives`: sums over ranks;
//! - `training`: whole runs, compared and counted.
//!
//! A check measures and judges its measurements; it never passes without measuring.

mod collectives;
mod machine;
mod residency;
mod streams;
mod training;

use std::time::Instant;

use serde::Serialize;

use crate::failure::Failure;

/// Result of a check: a figure if it passes, otherwise a figure and a remedy.
type Verdict = Result<String, Fault>;

/// Failure of a check.
#[derive(Debug)]
struct Fault {
    figure: String,
    remedy: String,
}

impl Fault {
    fn new(figure: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { figure: figure.into(), remedy: remedy.into() }
    }
}

/// Makes a failed operation a failed check.
impl<E: Into<Failure>> From<E> for Fault {
    fn from(error: E) -> Self {
        let failure: Failure = error.into();
        let remedy = failure.remedy().unwrap_or(REPORT).to_owned();
        Self { figure: failure.message().to_owned(), remedy }
    }
}

/// Remedy of a failure that is a bug in meristem.
const REPORT: &str = "this is a bug in meristem; please report it with this line and your machine";

/// Returns `fault` unless `holds`.
fn ensure(holds: bool, fault: impl FnOnce() -> Fault) -> Result<(), Fault> {
    if holds { Ok(()) } else { Err(fault()) }
}

/// Line of the report.
#[derive(Debug, Serialize)]
pub(crate) struct Line {
    pub(crate) name: &'static str,
    pub(crate) ok: bool,
    /// Measurement, or description of the failure.
    pub(crate) figure: String,
    /// Remedy of a failure.
    pub(crate) remedy: Option<String>,
    pub(crate) seconds: f64,
}

/// Name and function of a check.
type Check = (&'static str, fn() -> Verdict);

/// All checks, in the order of the report.
const CHECKS: &[Check] = &[
    ("devices", machine::devices),
    ("libraries", machine::libraries),
    ("instruction sets", machine::instruction_sets),
    ("residency", residency::residency),
    ("format", residency::format),
    ("aliasing", residency::aliasing),
    ("stream stress", streams::stress),
    ("races", streams::races),
    ("dense sum", collectives::dense),
    ("sparse sum", collectives::sparse),
    ("sum's memory", collectives::memory),
    #[cfg(feature = "mpi")]
    ("exchange over MPI", collectives::over_mpi),
    ("leak", training::leak),
    ("determinism", training::determinism),
    ("hot scopes", training::hot_scopes),
];

/// Runs all checks. Calls `begin` with the name of each check before it runs, and `each` with its
/// line afterwards. Returns all lines.
pub(crate) fn run(begin: impl FnMut(&str), each: impl FnMut(&Line)) -> Vec<Line> {
    run_all(CHECKS, begin, each)
}

fn run_all(
    checks: &[Check],
    mut begin: impl FnMut(&str),
    mut each: impl FnMut(&Line),
) -> Vec<Line> {
    let look = |&(name, check): &Check| {
        begin(name);
        let started = Instant::now();
        let verdict = check();
        let seconds = started.elapsed().as_secs_f64();
        let line = match verdict {
            Ok(figure) => Line { name, ok: true, figure, remedy: None, seconds },
            Err(Fault { figure, remedy }) => {
                Line { name, ok: false, figure, remedy: Some(remedy), seconds }
            }
        };
        each(&line);
        line
    };
    checks.iter().map(look).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_does_not_hide_what_comes_after_it() {
        let checks: &[Check] = &[
            ("good", || Ok("7 of 7".into())),
            ("bad", || Err(Fault::new("6 of 7", "do the seventh"))),
            ("late", || Ok("done".into())),
        ];
        let told = std::cell::RefCell::new(vec![]);
        let begin = |name: &str| told.borrow_mut().push(format!("{name} begins"));
        let lines = run_all(checks, begin, |line| told.borrow_mut().push(line.name.into()));
        let expected = ["good begins", "good", "bad begins", "bad", "late begins", "late"];
        assert_eq!(told.into_inner(), expected);
        assert_eq!(lines.iter().map(|line| line.ok).collect::<Vec<_>>(), [true, false, true]);
        assert_eq!(lines[1].remedy.as_deref(), Some("do the seventh"));
    }

    #[test]
    fn an_error_becomes_a_fault_with_its_remedy() {
        let error = meristem::train::Error::value("batch", 0, "1 to 65536");
        let fault = Fault::from(error);
        assert_eq!(fault.figure, "`batch`: got 0, expected 1 to 65536");
        assert!(!fault.remedy.is_empty());
    }
}

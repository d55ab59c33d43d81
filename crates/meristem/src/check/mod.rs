//! `meristem check` (V5): the checklist that a machine and this build have to pass, one line a check.
//!
//! - `machine`: what there is to run on;
//! - `residency`: the resident copy and what is gathered from it;
//! - `streams`: streams and their memory under load;
//! - `collectives`: sums over ranks;
//! - `training`: real runs, compared and counted.
//!
//! A check measures, and judges what it measured; it never passes without having looked.

mod collectives;
mod machine;
mod residency;
mod streams;
mod training;

use std::time::Instant;

use serde::Serialize;

use crate::failure::Failure;

/// What a check found: a figure when it holds, a figure and what to do when it does not.
type Verdict = Result<String, Fault>;

/// Why a check does not hold.
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

/// An operation that failed where it must not.
impl<E: Into<Failure>> From<E> for Fault {
    fn from(error: E) -> Self {
        let failure: Failure = error.into();
        let remedy = failure.remedy().unwrap_or(REPORT).to_owned();
        Self { figure: failure.message().to_owned(), remedy }
    }
}

/// What to do where the fault can only be ours.
const REPORT: &str =
    "this is a fault of Meristem: please report it with this line and your machine";

/// Holds, or is the given fault.
fn ensure(holds: bool, fault: impl FnOnce() -> Fault) -> Result<(), Fault> {
    if holds { Ok(()) } else { Err(fault()) }
}

/// A line of the list.
#[derive(Debug, Serialize)]
pub(crate) struct Line {
    pub(crate) name: &'static str,
    pub(crate) ok: bool,
    /// What was measured, or what went wrong.
    pub(crate) figure: String,
    /// What to do, where it does not hold.
    pub(crate) remedy: Option<String>,
    pub(crate) seconds: f64,
}

/// A check: its name, and what looks.
type Check = (&'static str, fn() -> Verdict);

/// Every check, in the order of the list.
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

/// Runs every check: tells `begin` its name before, and `each` its line as soon as it is there. All lines.
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

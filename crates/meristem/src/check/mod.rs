//! `meristem check`: the checks that a machine and this build must pass, one line per check.
//!
//! - `machine`: devices, libraries, instruction sets;
//! - `residency`: the resident copy of a dataset and its batches;
//! - `streams`: streams with little memory;
//! - `collectives`: sums over ranks;
//! - `training`: determinism, memory and counts of whole runs.
//!
//! A check passes only if its measurements are within their limits.

mod collectives;
mod machine;
mod residency;
mod streams;
mod training;

use std::time::Instant;

use meristem::device::DeviceId;
use serde::Serialize;

use crate::failure::Failure;

/// Result of a check: the measured figure, or a [`Fault`].
pub(crate) type Verdict = Result<String, Fault>;

/// Failed check: the measured figure and a remedy.
#[derive(Debug)]
pub(crate) struct Fault {
    figure: String,
    remedy: String,
}

impl Fault {
    fn new(figure: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { figure: figure.into(), remedy: remedy.into() }
    }
}

/// Converts the error of an operation to a failed check.
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
pub(crate) struct CheckLine {
    pub(crate) name: &'static str,
    pub(crate) ok: bool,
    /// Measurement, or description of the failure.
    pub(crate) figure: String,
    /// Remedy of a failure.
    pub(crate) remedy: Option<String>,
    pub(crate) seconds: f64,
}

/// Function of a check, with the devices that it applies to.
#[derive(Clone, Copy)]
pub(crate) enum CheckFn {
    /// For any device.
    Device(fn(DeviceId) -> Verdict),
    /// For the CPU, or independent of devices.
    Processor(fn() -> Verdict),
    /// For a GPU.
    Gpu(fn(DeviceId) -> Verdict),
}

/// Name and function of a check.
pub(crate) type Check = (&'static str, CheckFn);

/// All checks, in the order of the report.
const CHECKS: &[Check] = &[
    ("devices", CheckFn::Device(machine::devices)),
    ("libraries", CheckFn::Processor(machine::libraries)),
    ("instruction sets", CheckFn::Processor(machine::instruction_sets)),
    ("kernels", CheckFn::Gpu(machine::kernels)),
    ("residency", CheckFn::Device(residency::residency)),
    ("format", CheckFn::Device(residency::format)),
    ("aliasing", CheckFn::Device(residency::aliasing)),
    ("stream stress", CheckFn::Device(streams::stress)),
    ("races", CheckFn::Device(streams::races)),
    ("dense sum", CheckFn::Device(collectives::dense)),
    ("sparse sum", CheckFn::Device(collectives::sparse)),
    ("sum's memory", CheckFn::Device(collectives::memory)),
    ("NCCL", CheckFn::Gpu(collectives::nccl)),
    #[cfg(feature = "mpi")]
    ("exchange over MPI", CheckFn::Processor(collectives::over_mpi)),
    ("leak", CheckFn::Device(training::leak)),
    ("determinism", CheckFn::Device(training::determinism)),
    ("hot scopes", CheckFn::Device(training::hot_scopes)),
];

/// The checks for a device: all of them, or only the checks in `names`.
///
/// # Errors
/// A name of `names` is unknown, or is of a check that does not apply to `device`.
pub(crate) fn select(device: DeviceId, names: &[String]) -> Result<Vec<Check>, Failure> {
    let on_gpu = matches!(device, DeviceId::Cuda(_));
    let applies = |&(_, check): &Check| match check {
        CheckFn::Device(_) => true,
        CheckFn::Processor(_) => !on_gpu,
        CheckFn::Gpu(_) => on_gpu,
    };
    let all: Vec<Check> = CHECKS.iter().copied().filter(applies).collect();
    if let Some(unknown) = names.iter().find(|name| all.iter().all(|(known, _)| known != name)) {
        let known: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
        return Err(Failure::value("check", unknown, format!("one of {}", known.join(", "))));
    }
    let is_selected = |(name, _): &Check| names.is_empty() || names.iter().any(|n| n == name);
    Ok(all.into_iter().filter(is_selected).collect())
}

/// Runs checks on a device. Calls `begin` with the name of a check before it, and `each` with its
/// line after it. Returns all lines.
pub(crate) fn run(
    device: DeviceId,
    checks: &[Check],
    mut begin: impl FnMut(&str),
    mut each: impl FnMut(&CheckLine),
) -> Vec<CheckLine> {
    let run_one = |&(name, check): &Check| {
        begin(name);
        let started = Instant::now();
        let verdict = match check {
            CheckFn::Device(check) | CheckFn::Gpu(check) => check(device),
            CheckFn::Processor(check) => check(),
        };
        let seconds = started.elapsed().as_secs_f64();
        let line = match verdict {
            Ok(figure) => CheckLine { name, ok: true, figure, remedy: None, seconds },
            Err(Fault { figure, remedy }) => {
                CheckLine { name, ok: false, figure, remedy: Some(remedy), seconds }
            }
        };
        each(&line);
        line
    };
    checks.iter().map(run_one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_check_does_not_stop_later_checks() {
        let checks: &[Check] = &[
            ("good", CheckFn::Processor(|| Ok("7 of 7".into()))),
            ("bad", CheckFn::Processor(|| Err(Fault::new("6 of 7", "do the seventh")))),
            ("late", CheckFn::Device(|device| Ok(format!("{device} done")))),
        ];
        let told = std::cell::RefCell::new(vec![]);
        let begin = |name: &str| told.borrow_mut().push(format!("{name} begins"));
        let each = |line: &CheckLine| told.borrow_mut().push(line.name.into());
        let lines = run(DeviceId::Cpu(0), checks, begin, each);
        let expected = ["good begins", "good", "bad begins", "bad", "late begins", "late"];
        assert_eq!(told.into_inner(), expected);
        assert_eq!(lines.iter().map(|line| line.ok).collect::<Vec<_>>(), [true, false, true]);
        assert_eq!(lines[1].remedy.as_deref(), Some("do the seventh"));
        assert_eq!(lines[2].figure, "cpu done");
    }

    #[test]
    fn checks_are_selected_by_device_and_name() {
        let names = |device, asked: &[&str]| -> Result<Vec<&str>, Failure> {
            let asked: Vec<String> = asked.iter().map(|name| (*name).into()).collect();
            Ok(select(device, &asked)?.into_iter().map(|(name, _)| name).collect())
        };
        let (cpu, gpu) = (DeviceId::Cpu(0), DeviceId::Cuda(0));
        assert_eq!(names(cpu, &["leak", "devices"]).unwrap(), ["devices", "leak"]);
        let all = names(gpu, &[]).unwrap();
        assert!(all.contains(&"kernels") && !all.contains(&"instruction sets"), "{all:?}");
        let error = names(cpu, &["kernels"]).unwrap_err();
        assert!(error.message().starts_with("`check`: got kernels, expected one of devices, "));
    }

    #[test]
    fn an_error_becomes_a_fault_with_its_remedy() {
        let error = meristem::train::Error::value("batch", 0, "1 to 65536");
        let fault = Fault::from(error);
        assert_eq!(fault.figure, "`batch`: got 0, expected 1 to 65536");
        assert!(!fault.remedy.is_empty());
    }
}

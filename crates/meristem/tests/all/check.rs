//! `meristem check` (V5): all checks pass on this machine; failures are reported.

use serde_json::Value;

use crate::common::process::output;
use crate::common::{Meristem, command_output};

#[test]
fn all_checks_pass_on_this_machine() {
    let m = Meristem::new();
    let lines: Vec<Value> = serde_json::from_str(&m.ok("check --json").stdout).unwrap();
    let names: Vec<&str> = lines.iter().map(|line| line["name"].as_str().unwrap()).collect();
    let mut expected = vec![
        "devices",
        "libraries",
        "instruction sets",
        "residency",
        "format",
        "aliasing",
        "stream stress",
        "races",
        "dense sum",
        "sparse sum",
        "sum's memory",
        "leak",
        "determinism",
        "hot scopes",
    ];
    if cfg!(feature = "mpi") {
        expected.insert(expected.len() - 3, "exchange over MPI");
    }
    assert_eq!(names, expected);
    for line in &lines {
        assert_eq!(line["ok"], true, "{line}");
        assert!(!line["figure"].as_str().unwrap().is_empty(), "{line}");
        assert!(line["remedy"].is_null() && line["seconds"].as_f64().unwrap() >= 0.0, "{line}");
    }
}

#[test]
fn a_failed_check_is_reported_with_a_remedy() {
    let m = Meristem::new();
    let mut command = m.command();
    // No check that opens a device can pass in this environment.
    command.env("MERISTEM_LAUNCH_BLOCKING", "perhaps").arg("check");
    let said = command_output(output(&mut command));
    assert_eq!(said.code, Some(1), "{}{}", said.stdout, said.stderr);
    let faults: Vec<&str> = said.stdout.lines().filter(|line| line.starts_with("FAIL")).collect();
    assert!(faults.len() > 5 && faults[0].contains("perhaps"), "{}", said.stdout);
    assert_eq!(said.stdout.matches("      help: ").count(), faults.len(), "{}", said.stdout);
}

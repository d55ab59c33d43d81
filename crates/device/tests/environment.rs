//! Environment variables: honoured, and refused when they mean nothing (S4).
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

use meristem_device::{Device, DeviceId, DeviceOptions, Error};
use std::process::Command;

/// Runs a test of this file in a process of its own, with the variable set.
fn passes_with(test: &str, value: &str) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored"]).env("MERISTEM_LAUNCH_BLOCKING", value);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("1 passed"), "{value}: {text}");
}

#[test]
fn launch_blocking_is_read() {
    passes_with("launches_block", "1");
    for value in ["0", ""] {
        passes_with("launches_do_not_block", value);
    }
    for value in ["2", "yes", "true", " 1"] {
        passes_with("the_value_is_refused", value);
    }
}

fn open() -> Result<Device, Error> {
    Device::open(DeviceId::Cpu, &DeviceOptions { threads: 1, ..DeviceOptions::default() })
}

#[test]
#[ignore = "run by launch_blocking_is_read"]
fn launches_block() {
    let stream = open().unwrap().stream("s");
    stream.launch("nothing").run(|_| {}).unwrap();
    assert!(stream.record().is_done());
}

#[test]
#[ignore = "run by launch_blocking_is_read"]
fn launches_do_not_block() {
    let stream = open().unwrap().stream("s");
    let (open, opened) = std::sync::mpsc::sync_channel::<()>(1);
    stream.launch("gate").run(move |_| assert!(opened.recv().is_err())).unwrap();
    assert!(!stream.record().is_done());
    drop(open);
}

#[test]
#[ignore = "run by launch_blocking_is_read"]
fn the_value_is_refused() {
    let error = open().unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::BadEnvironment { .. }), "{text}");
    assert!(text.contains("MERISTEM_LAUNCH_BLOCKING") && text.contains("0 or 1"), "{text}");
}

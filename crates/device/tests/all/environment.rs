//! Environment variables: honoured, and refused when invalid (S3, S4), and instruction sets.

use std::process::Command;
use std::sync::mpsc::RecvError;

use meristem_device::{DType, Device, DeviceId, DeviceOptions, Error, Isa, Owner, POISON, Tensor};

/// Runs a test of this file in a new process, with the variable set.
fn passes_with(test: &str, variable: &str, value: &str) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("environment::{test}"), "--ignored"]).env(variable, value);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("1 passed"), "{value}: {text}");
}

#[test]
fn launch_blocking_is_read() {
    passes_with("launches_block", "MERISTEM_LAUNCH_BLOCKING", "1");
    for value in ["0", ""] {
        passes_with("launches_do_not_block", "MERISTEM_LAUNCH_BLOCKING", value);
    }
    for value in ["2", "yes", "true", " 1"] {
        passes_with("the_value_is_refused", "MERISTEM_LAUNCH_BLOCKING", value);
    }
}

#[test]
fn sanitize_is_read() {
    passes_with("new_memory_is_poison", "MERISTEM_SANITIZE", "1");
    for value in ["0", ""] {
        passes_with("new_memory_is_zeros", "MERISTEM_SANITIZE", value);
    }
    for value in ["2", "yes", "on"] {
        passes_with("the_value_is_refused", "MERISTEM_SANITIZE", value);
    }
}

#[test]
fn the_instruction_set_is_read() {
    for isa in Isa::available() {
        passes_with("kernels_use_what_is_named", "MERISTEM_ISA", isa.name());
    }
    passes_with("an_unknown_set_is_refused", "MERISTEM_ISA", "avx3");
}

#[test]
#[ignore = "run by the_instruction_set_is_read"]
fn kernels_use_what_is_named() {
    let named = std::env::var("MERISTEM_ISA").unwrap();
    let device = open().unwrap();
    assert_eq!(device.isa().name(), named);
    let stream = device.stream("s");
    stream.launch("look").run(move |args| assert_eq!(args.isa().name(), named)).unwrap();
    stream.synchronize().unwrap();
    let options = DeviceOptions { isa: Some(Isa::portable()), ..DeviceOptions::default() };
    assert_eq!(Device::open(DeviceId::Cpu(0), &options).unwrap().isa(), Isa::portable());
}

#[test]
#[ignore = "run by the_instruction_set_is_read"]
fn an_unknown_set_is_refused() {
    assert!(matches!(open().unwrap_err(), Error::Isa(_)));
}

fn open() -> Result<Device, Error> {
    Device::open(DeviceId::Cpu(0), &DeviceOptions { threads: 1, ..DeviceOptions::default() })
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
    stream.launch("gate").run(move |_| assert_eq!(opened.recv(), Err(RecvError))).unwrap();
    assert!(!stream.record().is_done());
    drop(open);
}

fn new_memory() -> Vec<u32> {
    let device = open().unwrap();
    assert!(device.races().is_empty());
    let x = Tensor::empty(&device.stream("s"), [3], DType::U32, Owner::Other).unwrap();
    x.to_vec().unwrap()
}

#[test]
#[ignore = "run by sanitize_is_read"]
fn new_memory_is_poison() {
    assert!(open().unwrap().is_sanitized());
    assert_eq!(new_memory(), [POISON; 3]);
}

#[test]
#[ignore = "run by sanitize_is_read"]
fn new_memory_is_zeros() {
    assert!(!open().unwrap().is_sanitized());
    assert_eq!(new_memory(), [0; 3]);
}

#[test]
#[ignore = "run by launch_blocking_is_read and sanitize_is_read"]
fn the_value_is_refused() {
    let error = open().unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::BadEnvironment { .. }), "{text}");
    assert!(text.contains("variable MERISTEM_") && text.contains("0 or 1"), "{text}");
}

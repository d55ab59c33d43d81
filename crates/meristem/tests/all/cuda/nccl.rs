//! Processes that exchange over NCCL.

use std::process::Stdio;

use super::port::free_port;
use super::{LOCAL, RANKS, REPLICAS, run};
use crate::common::Meristem;
use crate::common::runs::{Outcome, assert_same, outcome, with_images};

/// Starts processes that exchange over NCCL, as torchrun does, each with a separate GPU or stand-in
/// driver. Returns the output of each.
fn processes(m: &Meristem, arguments: &str) -> Vec<String> {
    let port = free_port();
    let start = |rank: usize| {
        let mut command = m.command();
        command.args(arguments.split_whitespace()).env("RANK", rank.to_string());
        command.env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1");
        command.env("MASTER_PORT", port.to_string());
        command.env("MERISTEM_STANDIN_SEED", (rank + 3).to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let end = |(rank, child): (usize, std::process::Child)| {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments}, rank {rank}: {text}");
        String::from_utf8(output.stdout).unwrap()
    };
    [0, 1].map(start).into_iter().enumerate().map(end).collect()
}

/// Runs on two processes.
fn on_processes(m: &Meristem, arguments: &str, name: &str) -> Outcome {
    processes(m, &format!("{arguments} --comm nccl --devices cuda:0 --run-dir {name}"));
    outcome(m, name)
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn sums_over_nccl_are_measured_and_correct() {
    let m = Meristem::new();
    let sizes = "--min-size 4KiB --max-size 4KiB --density 0.05 --rounds 1 --json";
    let said = processes(&m, &format!("bench comm --comm nccl --device cuda:0 {sizes}"));
    let report: serde_json::Value = serde_json::from_str(&said[0]).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(
        (&report["transport"], &report["ranks"], rows.len()),
        (&"nccl".into(), &2.into(), 5)
    );
    assert!(rows.iter().all(|row| row["wrong"] == 0), "{report}");
    assert_eq!(said[1], "", "rank 1 prints nothing");
}

/// A run over NCCL has the bits of a run over threads.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn processes_over_nccl_give_the_bits_of_threads() {
    for arguments in [REPLICAS, LOCAL, RANKS] {
        let m = with_images();
        let expected = run(&m, arguments, "threads", 1);
        assert_same(&on_processes(&m, arguments, "nccl"), &expected, arguments);
    }
}

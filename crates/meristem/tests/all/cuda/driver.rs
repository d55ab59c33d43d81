//! Calls of the driver, and commands that check and measure a device.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use super::BARE;
use super::port::free_port;
use crate::common::process::output;
use crate::common::runs::with_images;
use crate::common::{Meristem, command_output};

/// Calls of the driver that the last of four steps takes, by function. Empty on a GPU, whose driver
/// keeps no list.
pub(super) fn driver_calls_of_a_step(m: &Meristem, arguments: &str) -> BTreeMap<String, usize> {
    let calls = |steps: usize| {
        let list = m.path(&format!("{steps}.calls"));
        let mut command = m.command();
        command.args(arguments.split_whitespace()).env("MERISTEM_STANDIN_CALLS", &list);
        command.args(["--steps", &steps.to_string(), "--run-dir", &steps.to_string()]);
        let said = command_output(output(command.env("MERISTEM_STANDIN_SEED", "1")));
        assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
        let mut counts = BTreeMap::<String, usize>::new();
        for function in fs::read_to_string(&list).unwrap_or_default().lines() {
            *counts.entry(function.into()).or_default() += 1;
        }
        [list, m.path(&steps.to_string())].iter().for_each(|path| {
            let _ = fs::remove_file(path).or_else(|_| fs::remove_dir_all(path));
        });
        counts
    };
    let [before, mut after] = [3, 4].map(calls);
    after.iter_mut().for_each(|(function, count)| *count -= before.get(function).unwrap_or(&0));
    after
}

/// On a CUDA device a step of all envs has two graphs for each batch, of the gather and of all
/// networks, and a policy's decision is one graph. The other kernels check and empty the
/// metrics: five of each env.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_step_of_all_envs_takes_two_graph_launches_per_batch() {
    let m = with_images();
    let settings = "--dataset arrays --data-root images.safetensors --host minimal --slots r0 \
                    --envs 3 --batch 8 --max-batches 15 --statistics-batches 2 --twin off \
                    --control-split 0.1 --augment crop,flip --checkpoint-every 0 --rounds 1 \
                    --quiet --devices cuda:0";
    let bare = driver_calls_of_a_step(&m, &format!("train {settings} --controller none"));
    let Some(graphs) = bare.get("cuGraphLaunch") else { return };
    // The control split has 50 images.
    let batches = 15 + 2 + 7;
    assert_eq!((*graphs, bare["cuLaunchKernel"]), (2 * batches, 5 * 3), "{bare:?}");
    // The addresses of each batch's samples; permutations of training, statistics and control; the
    // alphas of each env. No graph is built again.
    let copies = bare["cuMemcpyHtoDAsync_v2"];
    assert!(copies <= batches + 3 + 3, "{bare:?}");
    assert_eq!(bare["cuGraphInstantiateWithFlags"], 0, "{bare:?}");

    let policy = "--controller ppo --policy-hidden 16 --steps 3 --run-dir policy";
    m.ok(&format!("train {settings} {policy}"));
    let greedy = "--controller greedy:policy/policy.safetensors";
    let decided = driver_calls_of_a_step(&m, &format!("train {settings} {greedy}"));
    assert_eq!(decided["cuGraphLaunch"], 2 * batches + 1, "{decided:?}");
    assert_eq!(decided["cuGraphInstantiateWithFlags"], 0, "{decided:?}");
}

/// Checks and benchmarks on the device that are fast on the stand-in.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn checks_and_benchmarks_run_on_the_device() {
    let m = Meristem::new();
    let checks = "devices|kernels|residency|format|aliasing|stream stress|races|\
                  dense sum|sparse sum|sum's memory";
    let mut command = m.command();
    command.args(["check", "--device", "cuda:0"]).args(checks.split('|'));
    let said = command_output(output(&mut command));
    assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
    assert_eq!(said.stdout.matches("ok    ").count(), 10, "{}", said.stdout);
    for bench in [
        "host --host minimal --envs 2 --batch 4",
        "host --host minimal --envs 2 --batch 4 --precision bf16",
        "gather --batch 4",
        "counterfactual --host minimal --slots r0c0 --batch 4 --precision tf32",
    ] {
        let command = format!("bench {bench} --device cuda:0 --seconds 0.1 --json");
        let report: serde_json::Value = serde_json::from_str(&m.ok(&command).stdout).unwrap();
        assert_eq!(report["config"]["device"], "cuda:0", "{report}");
    }
    m.ok("bench comm --device cuda:0 --min-size 4KiB --max-size 4KiB --rounds 1 --json");
    m.fails("bench host --device cuda:7", 1, &["there is no CUDA device 7"]);
}

/// The placement log names the device of tensors, and the transport of an exchange.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn the_placement_log_has_the_gpu_and_nccl() {
    let m = with_images();
    let log = |command: &mut Command| {
        command.env("MERISTEM_LOG", "off,meristem::placement=debug");
        let said = command_output(output(command));
        assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
        said.stderr
    };
    let mut command = m.command();
    let run = format!("{BARE} --steps 1 --devices cuda:0 --run-dir run");
    let said = log(command.args(run.split_whitespace()));
    let line = said.lines().find(|line| line.contains("train_step")).unwrap();
    assert!(line.contains("channels last on cuda:0, stream `env 0`"), "{line}");
    let bench = "bench comm --comm nccl --device cuda:0 --min-size 4KiB --max-size 4KiB --rounds 1";
    let port = free_port().to_string();
    let mut command = m.command();
    command.args(bench.split_whitespace()).env("RANK", "0").env("WORLD_SIZE", "1");
    let said = log(command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port));
    let line = said.lines().find(|line| line.contains("all_reduce")).unwrap();
    assert!(line.contains("nccl") && line.contains("cuda:0"), "{line}");
}

/// Without a driver, the command names the missing library before any work.
#[test]
fn a_missing_driver_is_named() {
    let m = with_images();
    let mut command = m.command();
    let arguments = format!("{BARE} --devices cuda:0 --run-dir none");
    command.args(arguments.split_whitespace()).env_remove("LD_LIBRARY_PATH");
    let said = command_output(output(&mut command));
    if said.code == Some(0) {
        return; // a driver is installed on this machine
    }
    assert!(said.stderr.starts_with("error: cuda:0: no CUDA driver was found"), "{}", said.stderr);
    assert!(!m.path("none").exists());
}

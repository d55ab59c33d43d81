//! Runs on a GPU, or on the stand-in driver (`cargo xtask standin cargo test …`).

#![cfg(unix)]

#[path = "../../../comm/tests/all/common/port.rs"]
mod port;

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};

use self::port::free_port;
use crate::common::process::{Process, output, wait_for};
use crate::common::runs::{Outcome, assert_same, outcome, with_images};
use crate::common::{Meristem, command_output, of_kind};
use crate::host::BRANCHES;
use crate::parts::UNEQUAL;

/// A few steps of hosts that do not grow.
const BARE: &str = "train --dataset arrays --data-root images.safetensors --controller none \
                    --host minimal --envs 3 --steps 3 --batch 16 --max-batches 4 \
                    --control-split 0.1 --augment crop,flip --checkpoint-every 1 --quiet";

/// Growing hosts: modules germinate, blend, are evaluated in one pass, and fossilize.
const GROWING: &str = "train --dataset arrays --data-root images.safetensors \
                       --controller heuristic --preset quick --host minimal --slots r0,r1 --envs 2 \
                       --rounds 1 --steps 16 --batch 16 --max-batches 2 --control-split 0.1 \
                       --checkpoint-every 2 --quiet";

/// A policy that learns in two short rounds.
const PPO: &str = "train --dataset arrays --data-root images.safetensors --controller ppo \
                   --policy-hidden 16 --host minimal --slots r0 --envs 2 --rounds 2 --steps 4 \
                   --batch 16 --max-batches 2 --control-split 0.2 --quiet";

/// One host trained by two ranks, which exchange the largest elements of their gradients.
const REPLICAS: &str = "train --dataset arrays --data-root images.safetensors --quiet \
                        --controller heuristic --preset quick --envs 1 --ranks 2 --steps 4 \
                        --host cnn:channels=8,blocks=2,kernel=3,pools=1 --data-parallel \
                        --exchange ok-topk:0.05 --batch 16 --max-batches 3 --control-split 0.2";

/// The same host, with local steps and differences of weights as eight bits.
const LOCAL: &str = "train --dataset arrays --data-root images.safetensors --quiet \
                     --controller heuristic --preset quick --envs 1 --ranks 2 --steps 4 \
                     --host cnn:channels=8,blocks=2,kernel=3,pools=1 --data-parallel \
                     --exchange diloco:2:int8 --batch 16 --max-batches 3 --control-split 0.2";

/// A policy learned by two ranks with one env each.
const RANKS: &str = "train --dataset arrays --data-root images.safetensors --controller ppo \
                     --policy-hidden 16 --host minimal --slots r0 --envs 2 --ranks 2 \
                     --exchange gtopk:0.02 --rounds 2 --steps 3 --batch 16 --max-batches 2 \
                     --control-split 0.2 --quiet";

/// Runs on the GPU. On the stand-in driver, `seed` determines every order that CUDA does not
/// specify.
fn run(m: &Meristem, arguments: &str, name: &str, seed: u32) -> Outcome {
    let mut command = m.command();
    let arguments = format!("{arguments} --devices cuda:0 --run-dir {name}");
    command.args(arguments.split_whitespace()).env("MERISTEM_STANDIN_SEED", seed.to_string());
    let said = command_output(output(&mut command));
    assert_eq!(said.code, Some(0), "{arguments}\n{}{}", said.stdout, said.stderr);
    outcome(m, name)
}

/// Checks that the bits of a run depend neither on the order of independent work nor on the number
/// of streams.
fn assert_independent_of_order(arguments: &str) {
    let m = with_images();
    let expected = run(&m, arguments, "one", 1);
    let other = format!("{arguments} --threads 3");
    assert_same(&run(&m, &other, "three", 2), &expected, "three lanes, another order");
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_bare_host_is_independent_of_the_order_on_the_device() {
    assert_independent_of_order(BARE);
    assert_independent_of_order(&format!("{BARE} --precision bf16"));
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_growing_host_is_independent_of_the_order_on_the_device() {
    assert_independent_of_order(GROWING);
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_growing_host_with_rounded_factors_is_independent_of_the_order() {
    assert_independent_of_order(&format!("{GROWING} --precision tf32"));
}

/// D14: the fifth batch has no part for env 0, and the control splits differ. Streamed samples
/// change no bit, in another order and on another number of streams.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn envs_of_unequal_parts_are_independent_of_the_order_on_the_device() {
    let m = Meristem::new();
    let expected = run(&m, UNEQUAL, "resident", 1);
    let streamed = run(&m, &format!("{UNEQUAL} --data-budget 1KiB --threads 3"), "streamed", 2);
    assert_eq!(streamed.weights, expected.weights);
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_policy_is_independent_of_the_order_on_the_device() {
    assert_independent_of_order(PPO);
}

/// A policy that makes layers wider, with more places in its heads: in another order and killed.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_policy_that_widens_is_independent_of_the_order_and_resumes() {
    let wide = format!("{PPO} --policy-form set-widen --widen-by 0.5 --twin off");
    let wide = wide.replace("minimal --slots r0", "cnn:channels=2,blocks=3,kernel=3");
    assert_independent_of_order(&wide);
    let m = with_images();
    let whole = run(&m, &wide, "wide", 1);
    assert!(!of_kind(&whole.events, "layer_widened").is_empty(), "nothing got wider");
    kill(&wide);
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn replicas_are_independent_of_the_order_on_the_device() {
    assert_independent_of_order(REPLICAS);
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn ranks_are_independent_of_the_order_on_the_device() {
    assert_independent_of_order(RANKS);
}

/// Calls of the driver that the last of four steps takes, by function. Empty on a GPU, whose driver
/// keeps no list.
fn driver_calls_of_a_step(m: &Meristem, arguments: &str) -> BTreeMap<String, usize> {
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
/// networks, and a policy's decision is one graph (004). The other kernels check and empty the
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

/// Envs on a CPU and on a GPU, with the policy on the GPU; and a run that is resumed on other
/// devices.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_run_uses_devices_of_both_kinds() {
    let m = with_images();
    let mixed = "train --dataset arrays --data-root images.safetensors --controller ppo \
                 --policy-hidden 16 --host minimal --slots r0 --envs 3 --rounds 1 --steps 3 \
                 --batch 16 --max-batches 2 --control-split 0.2 --quiet \
                 --devices cpu,cuda:0 --policy-device cuda:0";
    let outcomes = [1, 2].map(|seed| {
        let mut command = m.command();
        let arguments = format!("{mixed} --run-dir mixed-{seed}");
        let seed = seed.to_string();
        command.args(arguments.split_whitespace()).env("MERISTEM_STANDIN_SEED", &seed);
        let said = command_output(output(&mut command));
        assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
        outcome(&m, &format!("mixed-{seed}"))
    });
    assert_same(&outcomes[1], &outcomes[0], "another order of the GPU");
    m.ok(&format!("{BARE} --run-dir moved"));
    fs::remove_file(m.path("moved/summary.json")).unwrap();
    let said = m.ok("train --resume moved --devices cuda:0 --quiet");
    let warning = "warning: the run moves from cpu to cuda:0; another kind of device";
    assert!(said.stderr.contains(warning), "{}", said.stderr);
}

/// Losses of all envs by step on GPUs equal those on the CPU's devices of the same numbers up to
/// rounding, which stays small over a few steps. Three envs are two on the first of two devices and
/// one on the second, and the devices determine which samples an env sees.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn losses_equal_those_on_the_cpu() {
    let m = with_images();
    for (gpus, cpus) in [("cuda:0", "cpu"), ("cuda:0,cuda:1", "cpu,cpu:1")] {
        let losses = |devices: &str| -> Option<Vec<f64>> {
            let mut command = m.command();
            let arguments = format!("{BARE} --devices {devices} --run-dir {devices}");
            command.args(arguments.split_whitespace()).env("MERISTEM_STANDIN_DEVICES", "2");
            let said = command_output(output(&mut command));
            if said.stderr.contains("there is no CUDA device 1") {
                return None;
            }
            assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
            let events = m.events(devices);
            let steps = of_kind(&events, "step_completed");
            Some(steps.iter().map(|step| step["train_loss"].as_f64().unwrap()).collect())
        };
        let (Some(gpu), Some(cpu)) = (losses(gpus), losses(cpus)) else { continue };
        assert_eq!((gpu.len(), cpu.len()), (9, 9));
        for (gpu, cpu) in gpu.iter().zip(&cpu) {
            assert!((gpu - cpu).abs() < 1e-3 * cpu, "{gpus}: {gpu} {cpu}");
        }
    }
}

/// A host with branches grows on the GPU with the losses of the CPU, and resumes after a kill.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_described_host_has_the_losses_of_the_cpu() {
    let m = with_images();
    fs::write(m.path("branches.toml"), BRANCHES).unwrap();
    let bare = BARE.replace("--host minimal", "--host branches.toml");
    let losses = |devices: &str| -> Vec<f64> {
        m.ok(&format!("{bare} --devices {devices} --run-dir {devices}"));
        let events = m.events(devices);
        let steps = of_kind(&events, "step_completed");
        steps.iter().map(|step| step["train_loss"].as_f64().unwrap()).collect()
    };
    let (gpu, cpu) = (losses("cuda:0"), losses("cpu"));
    assert_eq!((gpu.len(), cpu.len()), (9, 9));
    for (gpu, cpu) in gpu.iter().zip(&cpu) {
        assert!((gpu - cpu).abs() < 1e-3 * cpu, "{gpu} {cpu}");
    }
    let growing = GROWING.replace("heuristic", "random");
    kill_in(m, &growing.replace("--host minimal --slots r0,r1", "--host branches.toml"));
}

/// Streamed images, memory that is reused under a limit, launches that wait for their kernels, and
/// the race sanitizer change no bit of growing hosts, whose counterfactuals are one pass.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn storage_memory_and_waits_change_no_bit() {
    let m = with_images();
    let expected = run(&m, GROWING, "plain", 1);
    let reserved = |run: &str| {
        m.json(&format!("{run}/summary.json"))["memory"]["reserved_peak"].as_u64().unwrap()
    };
    // Without the images on the device, a run with ample memory reserves 31,232 bytes less.
    let limit = reserved("plain") - 30_000;
    let limited = format!("{GROWING} --data-budget 1KiB --device-memory {limit}");
    assert_same(&run(&m, &limited, "limited", 2), &expected, "streamed, with little memory");
    assert!(reserved("limited") <= limit);
    let mut command = m.command();
    let checked = format!("{GROWING} --devices cuda:0 --run-dir checked");
    command.args(checked.split_whitespace()).env("MERISTEM_STANDIN_SEED", "3");
    command.env("MERISTEM_LAUNCH_BLOCKING", "1").env("MERISTEM_SANITIZE", "1");
    let said = command_output(output(&mut command));
    assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
    assert_same(&outcome(&m, "checked"), &expected, "blocking, under the sanitizer");
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

/// A killed run resumes with the bits of an uninterrupted run, at every precision.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_killed_run_resumes() {
    for precision in ["f32", "bf16"] {
        kill(&format!("{GROWING} --precision {precision}"));
    }
}

fn kill(arguments: &str) {
    kill_in(with_images(), arguments);
}

fn kill_in(m: Meristem, arguments: &str) {
    let expected = run(&m, arguments, "whole", 1);
    assert!(!of_kind(&expected.events, "module_germinated").is_empty(), "nothing grew");
    let start = format!("{arguments} --devices cuda:0 --run-dir killed");
    let mut command = m.command();
    command.args(start.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = Process::start(&mut command);
    let events = || fs::read_to_string(m.path("killed/events.jsonl")).unwrap_or_default();
    wait_for("some steps", || events().matches("step_completed").count() >= 5);
    child.kill().unwrap();
    child.wait().unwrap();
    m.ok("train --resume killed --quiet");
    assert_same(&outcome(&m, "killed"), &expected, "killed");
}

/// A run that was resumed at another precision keeps it when it is killed and resumed again.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_resumed_run_keeps_its_last_precision() {
    let m = with_images();
    let killed_after = |arguments: &str, steps: usize| {
        let mut command = m.command();
        command.args(arguments.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = Process::start(&mut command);
        let events = || fs::read_to_string(m.path("moved/events.jsonl")).unwrap_or_default();
        wait_for("some steps", || events().matches("step_completed").count() >= steps);
        child.kill().unwrap();
        child.wait().unwrap();
    };
    killed_after(&format!("{BARE} --steps 12 --devices cuda:0 --run-dir moved"), 6);
    killed_after("train --resume moved --precision bf16 --quiet", 18);
    let said = m.ok("train --resume moved --quiet");
    assert!(!said.stderr.contains("warning"), "{}", said.stderr);
    let text = fs::read_to_string(m.path("moved/summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&text).unwrap();
    let stretches = summary["computed"].as_array().unwrap();
    let precisions: Vec<_> = stretches.iter().map(|of| of["precision"].as_str().unwrap()).collect();
    assert_eq!(precisions, ["f32", "bf16"], "{summary}");
    assert!(stretches[1]["step"].as_u64().unwrap() >= 1, "{summary}");
}

/// Training works at every precision, with different results; a resumed run may change its
/// precision.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn hosts_train_at_every_precision() {
    let m = with_images();
    let mut weights = vec![];
    for precision in ["f32", "tf32", "bf16"] {
        let of = run(&m, &format!("{BARE} --steps 5 --precision {precision}"), precision, 1);
        let started = of_kind(&of.events, "run_started")[0];
        let said = (precision != "f32").then_some(precision);
        assert_eq!(started.get("precision").and_then(|of| of.as_str()), said);
        let steps = of_kind(&of.events, "step_completed");
        let loss = |step: &&serde_json::Value| step["train_loss"].as_f64().unwrap();
        let [first, last] =
            [&steps[..3], &steps[steps.len() - 3..]].map(|envs| envs.iter().map(loss).sum::<f64>());
        assert!(last < first, "{precision}: {first} {last}");
        weights.push(of.weights);
    }
    assert!(weights[0] != weights[1] && weights[1] != weights[2] && weights[0] != weights[2]);
    let accuracy = |precision: &str| {
        let file = "--weights f32/weights/env-0.safetensors";
        let data = "--dataset arrays --data-root images.safetensors --device cuda:0 --json";
        let report = m.ok(&format!("eval {file} {data} --precision {precision}")).stdout;
        serde_json::from_str::<serde_json::Value>(&report).unwrap()["loss"].as_f64().unwrap()
    };
    assert_ne!(accuracy("f32"), accuracy("bf16"));
    fs::remove_file(m.path("f32/summary.json")).unwrap();
    let said = m.ok("train --resume f32 --precision tf32 --quiet");
    let warning = "warning: the run changes from precision f32 to tf32;";
    assert!(said.stderr.contains(warning), "{}", said.stderr);
    fs::remove_file(m.path("bf16/summary.json")).unwrap();
    let words = ["got bf16, expected f32 on cpu"];
    m.fails("train --resume bf16 --devices cpu --quiet", 2, &words);
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

/// Growing hosts on two GPUs, with the policy on the second; then the run is resumed on CPUs. On
/// the stand-in every process has two GPUs.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_run_uses_several_gpus() {
    let m = with_images();
    let of = |arguments: &str, seed: &str| {
        let mut command = m.command();
        command.args(arguments.split_whitespace());
        command.env("MERISTEM_STANDIN_DEVICES", "2").env("MERISTEM_STANDIN_SEED", seed);
        command_output(output(&mut command))
    };
    let two = format!("{PPO} --devices cuda:0,cuda:1 --policy-device cuda:1 --checkpoint-every 1");
    let outcomes = ["1", "2"].map(|seed| {
        let said = of(&format!("{two} --run-dir two-{seed}"), seed);
        // A machine with one GPU.
        let lacks = said.stderr.contains("there is no CUDA device 1");
        assert!(lacks || said.code == Some(0), "{}{}", said.stdout, said.stderr);
        (!lacks).then(|| outcome(&m, &format!("two-{seed}")))
    });
    let [Some(one), Some(other)] = outcomes else { return };
    assert_same(&other, &one, "another order of the GPUs");
    assert!(!of_kind(&one.events, "module_germinated").is_empty(), "nothing grew");
    fs::remove_file(m.path("two-1/summary.json")).unwrap();
    let said = of("train --resume two-1 --devices cpu,cpu:1 --policy-device cpu:1 --quiet", "3");
    assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
    assert!(m.path("two-1/summary.json").exists());
}

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

/// Without a limit, the members that fit are counted once the device refuses memory. Only the
/// stand-in can have so little.
#[test]
#[ignore = "needs the stand-in"]
fn more_members_than_the_memory_of_a_device_are_counted() {
    if std::path::Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let m = with_images();
    let members = "train --dataset arrays --data-root images.safetensors --controller none \
                   --host mlp:512,512 --steps 2 --batch 16 --control-split 0.2 --samples 99 \
                   --space lr=uniform:0.01,0.1 --devices cuda:0 --run-dir run";
    let mut command = m.command();
    command.args(members.split_whitespace()).env("MERISTEM_STANDIN_MEMORY", "67108864");
    let said = command_output(output(&mut command));
    assert_eq!(said.code, Some(2), "{}", said.stderr);
    let flat = said.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in ["99 in training at a time", "expected at most", "with --places"] {
        assert!(flat.contains(words), "{flat}");
    }
}

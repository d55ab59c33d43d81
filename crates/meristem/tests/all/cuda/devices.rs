//! Devices of several kinds, several GPUs, and the results of a GPU beside those of the CPU.

use std::fs;

use super::resume::kill_in;
use super::{BARE, GROWING, LOCAL, PPO, REPLICAS, run};
use crate::common::process::output;
use crate::common::runs::{assert_same, outcome, with_images};
use crate::common::{CommandOutput, Meristem, command_output, of_kind};
use crate::host::BRANCHES;

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

/// Runs a command where the stand-in has two GPUs, in the order of a seed.
fn on_two_gpus(m: &Meristem, arguments: &str, seed: &str) -> CommandOutput {
    let mut command = m.command();
    command.args(arguments.split_whitespace()).env("MERISTEM_STANDIN_SEED", seed);
    command_output(output(command.env("MERISTEM_STANDIN_DEVICES", "2")))
}

/// Growing hosts on two GPUs, with the policy on the second; then the run is resumed on CPUs. On
/// the stand-in every process has two GPUs.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_run_uses_several_gpus() {
    let m = with_images();
    let of = |arguments: &str, seed: &str| on_two_gpus(&m, arguments, seed);
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

/// The policies of two ranks, each on a GPU, have the bits of policies on one GPU, in any order of
/// the GPUs, also in a run that was stopped and resumed. Their exchange passes through host memory,
/// which a warning says.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn policies_of_ranks_are_on_several_gpus() {
    let m = with_images();
    let of = |arguments: &str, seed: &str| on_two_gpus(&m, arguments, seed);
    let two = format!("{PPO} --devices cuda:0,cuda:1 --ranks 2 --checkpoint-every 1");
    let said = of(&format!("{two} --run-dir one"), "1");
    // A machine with one GPU.
    if said.stderr.contains("there is no CUDA device 1") {
        return;
    }
    assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
    let expected = outcome(&m, "one");
    for seed in ["1", "2"] {
        let apart = format!("{two} --policy-device cuda:1,cuda:0 --run-dir apart-{seed}");
        let said = of(&format!("{apart} --stop-after 4"), seed);
        assert_eq!(said.code, Some(3), "{}{}", said.stdout, said.stderr);
        let flat = said.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains("threads on several devices"), "{}", said.stderr);
        let said = of(&format!("train --resume apart-{seed} --quiet"), seed);
        assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
        assert_same(&outcome(&m, &format!("apart-{seed}")), &expected, "a GPU for each policy");
    }
}

/// Ranks that are threads, each on a GPU, have the bits of ranks on one GPU, in any order of the
/// GPUs. What they exchange passes through host memory, which a warning says.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn replicas_are_on_several_gpus() {
    let m = with_images();
    for (number, settings) in [REPLICAS, LOCAL].into_iter().enumerate() {
        let expected = run(&m, settings, &format!("one-{number}"), 1);
        for seed in ["1", "2"] {
            let name = format!("two-{number}-{seed}");
            let arguments = format!("{settings} --devices cuda:0,cuda:1 --run-dir {name}");
            let said = on_two_gpus(&m, &arguments, seed);
            // A machine with one GPU.
            if said.stderr.contains("there is no CUDA device 1") {
                return;
            }
            assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
            let words = ["threads on several devices", "copies 1.00 N bytes from each GPU"];
            let flat = said.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(words.iter().all(|words| flat.contains(words)), "{}", said.stderr);
            let got = outcome(&m, &name);
            assert_eq!((&got.weights, &got.envs), (&expected.weights, &expected.envs), "{name}");
        }
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

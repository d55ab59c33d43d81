//! Runs over several logical devices, and with limited memory (S6, S7).

#![cfg(unix)]

use std::fs;
use std::process::Stdio;

use serde_json::Value;

use crate::common::process::{Process, wait_for};
use crate::common::runs::{assert_same, outcome, with_images};
use crate::common::{Meristem, TINY, of_kind};

/// Settings of growing hosts on a few small images: modules germinate, blend, are evaluated in one
/// pass, and fossilize.
const RUN: &str = "train --dataset arrays --data-root images.safetensors --controller heuristic \
                   --preset quick --host minimal --slots r0,r1 --envs 3 --rounds 2 --steps 24 \
                   --batch 16 --control-split 0.2 --checkpoint-every 2 --quiet \
                   --parameters-per-image 99 --max-gap 99";

/// Settings of a policy that learns in two short rounds.
const PPO: &str = "train --dataset arrays --data-root images.safetensors --controller ppo \
                   --policy-hidden 16 --host minimal --slots r0 --envs 4 --rounds 2 --steps 5 \
                   --batch 16 --control-split 0.2 --quiet";

/// Settings of one growing host that is trained by three ranks.
const REPLICAS: &str = "train --dataset arrays --data-root images.safetensors --data-parallel \
                        --controller heuristic --preset quick --envs 1 --ranks 3 --rounds 1 \
                        --steps 12 --host cnn:channels=8,blocks=2,kernel=3,pools=1 --batch 24 \
                        --max-batches 4 --control-split 0.2 --checkpoint-every 2 --quiet \
                        --parameters-per-image 99 --max-gap 99";

fn grown(events: &[Value]) -> usize {
    of_kind(events, "module_germinated").len()
}

/// Tests both values of `--epoch`. The first device has two envs. With `dealt` the 400 samples of
/// each device are 12 batches of 32 and one of 16; with `full` they are 25 batches of 16.
#[test]
fn two_devices_give_the_same_bits_for_any_threads_and_after_a_kill() {
    let dealt = ("dealt", 13, serde_json::json!([200, 208]));
    let full = ("full", 25, serde_json::json!([400, 400]));
    for (epoch, batches, images) in [dealt, full] {
        let m = with_images();
        let run = format!("{RUN} --devices cpu:0,cpu:1 --epoch {epoch}");
        m.ok(&format!("{run} --threads 1 --run-dir one"));
        let expected = outcome(&m, "one");
        assert!(grown(&expected.events) > 0, "nothing grew, nothing was shown");
        let started = of_kind(&expected.events, "run_started")[0];
        assert_eq!(started["devices"], serde_json::json!(["cpu", "cpu:1"]));
        assert_eq!((&started["epoch"], &started["batches"]), (&epoch.into(), &batches.into()));
        assert_eq!(started["images_per_step"], images);
        m.ok(&format!("{run} --threads 3 --run-dir three"));
        assert_same(&outcome(&m, "three"), &expected, "three threads");

        let start = format!("{run} --threads 2 --run-dir killed");
        for (arguments, steps) in [(start.as_str(), 20), ("train --resume killed --quiet", 90)] {
            let mut command = m.command();
            command.args(arguments.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
            let mut child = Process::start(&mut command);
            let events = || fs::read_to_string(m.path("killed/events.jsonl")).unwrap_or_default();
            wait_for("some steps", || events().matches("step_completed").count() >= steps);
            child.kill().unwrap();
            child.wait().unwrap();
        }
        m.ok("train --resume killed --quiet --threads 1");
        assert_same(&outcome(&m, "killed"), &expected, "killed");
    }
}

/// The envs of the first device have the same bits without the second device. Envs of the second
/// device get samples in that device's order.
#[test]
fn a_further_device_changes_nothing_on_the_first() {
    let m = with_images();
    let plain = RUN.replace("heuristic", "none").replace("--control-split 0.2", "");
    let run = |name: &str, flags: &str| {
        m.ok(&format!(
            "{plain} --steps 3 --rounds 1 --checkpoint-every 0 --run-dir {name} {flags}"
        ));
        outcome(&m, name)
    };
    let alone = run("alone", "--envs 2");
    assert_eq!(alone.weights, run("named", "--envs 2 --devices cpu:0").weights);
    let both = run("both", "--envs 4 --devices cpu,cpu:1");
    assert_eq!(both.weights[..2], alone.weights);
    assert_ne!(both.weights[2], alone.weights[0]);
    let other = run("other", "--envs 2 --devices cpu:1");
    assert_ne!(other.weights, alone.weights);
    // The first of two devices has two of three envs.
    let three = run("three", "--envs 3 --devices cpu,cpu:1");
    assert_eq!(three.weights[..2], alone.weights);
    // With `full`, the order of an env depends only on its device and its index there.
    let full = |name: &str, flags: &str| run(name, &format!("{flags} --epoch full")).weights;
    let (one, five) = (full("one", "--envs 1"), full("five", "--envs 5 --devices cpu,cpu:1"));
    assert_eq!(one, run("dealt", "--envs 1 --epoch dealt").weights);
    assert_eq!(five[..1], one);
    assert_eq!(five[..3], full("first", "--envs 3"));
    assert_ne!(five[..2], alone.weights);
}

/// Ranks that are threads may be on several devices: two of three on the first. They have the bits
/// of ranks on one device with every kind of exchange, with streamed images, and after a kill; a
/// resumed run may be on other devices.
#[test]
fn replicas_on_several_devices_have_the_bits_of_one() {
    let m = with_images();
    for (number, exchange) in ["dense", "ok-topk:0.05", "diloco:2:int8"].into_iter().enumerate() {
        let run = |name: &str, flags: &str| {
            let name = format!("{name}{number}");
            m.ok(&format!("{REPLICAS} --exchange {exchange} --run-dir {name} {flags}"));
            outcome(&m, &name).without_devices()
        };
        let expected = run("one", "--threads 2");
        assert!(grown(&expected.events) > 0, "nothing grew, nothing was shown");
        let two = run("two", "--devices cpu,cpu:1 --threads 1");
        assert_same(&two, &expected, &format!("{exchange} on two devices"));
        let started = &m.events(&format!("two{number}"))[0];
        assert_eq!(started["devices"], serde_json::json!(["cpu", "cpu:1"]));
        let streamed = run("streamed", "--devices cpu,cpu:1,cpu:2 --data-budget 1KiB");
        assert_eq!(streamed.weights, expected.weights);
        // Only exchanges between devices wait in the inner loop.
        let waits = |run: &str| {
            let hot_path = &m.json(&format!("{run}{number}/summary.json"))["hot_path"];
            hot_path["synchronizations"].as_f64().unwrap()
        };
        assert_eq!(waits("one"), 0.0);
        assert!(waits("two") > 0.0);

        let name = format!("killed{number}");
        let start =
            format!("{REPLICAS} --exchange {exchange} --devices cpu,cpu:1 --run-dir {name}");
        let mut command = m.command();
        command.args(start.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = Process::start(&mut command);
        let events = || fs::read_to_string(m.path(&name).join("events.jsonl")).unwrap_or_default();
        wait_for("some steps", || events().matches("step_completed").count() >= 5);
        child.kill().unwrap();
        child.wait().unwrap();
        m.ok(&format!("train --resume {name} --quiet --devices cpu,cpu:2,cpu:1"));
        assert_same(&outcome(&m, &name).without_devices(), &expected, "killed");
    }
    let one = "train --resume two0 --quiet";
    fs::remove_file(m.path("two0/summary.json")).unwrap();
    m.fails(&format!("{one} --devices cpu:1,cpu"), 2, &["devices with the numbers 0"]);
    let words = ["expected at most 3, a device for each rank"];
    m.fails(&format!("{one} --devices cpu,cpu:1,cpu:2,cpu:3"), 2, &words);
    m.ok(&format!("{one} --devices cpu"));
}

/// The policy gives the same results on any device, also with several ranks, whose policies may be
/// on several devices, and may be resumed on others.
#[test]
fn a_policy_is_the_same_on_any_device() {
    let m = with_images();
    let run = |name: &str, flags: &str| {
        m.ok(&format!("{PPO} --devices cpu,cpu:1 --run-dir {name} {flags}"));
        outcome(&m, name)
    };
    let first = run("first", "");
    assert!(!of_kind(&first.events, "policy_updated").is_empty());
    assert_same(&run("second", "--policy-device cpu:1"), &first, "the second device");
    let ranks = run("ranks", "--ranks 2");
    assert_same(&run("ranks-2", "--ranks 2 --policy-device cpu:1"), &ranks, "over ranks");
    let apart = "--ranks 2 --policy-device cpu:1,cpu:0";
    assert_same(&run("apart", apart), &ranks, "each rank on a device");
    let stopped = format!("{PPO} --devices cpu,cpu:1 --run-dir stopped {apart}");
    assert_eq!(m.run(&format!("{stopped} --stop-after 7")).code, Some(3));
    m.ok("train --resume stopped --policy-device cpu:0,cpu:1 --quiet");
    assert_same(&outcome(&m, "stopped"), &ranks, "resumed on the devices in another order");
}

/// `eval` and `control eval` give the same results on any device.
#[test]
fn an_evaluation_is_the_same_on_any_device() {
    let m = with_images();
    m.ok(&format!("{PPO} --devices cpu,cpu:1 --run-dir run"));
    let data = "--dataset arrays --data-root images.safetensors";
    let eval = |device: &str| {
        let weights = "--weights run/weights/env-2.safetensors --split test --json";
        m.ok(&format!("eval {weights} {data} --device {device}")).stdout
    };
    let [first, second]: [Value; 2] =
        ["cpu", "cpu:1"].map(|device| serde_json::from_str(&eval(device)).unwrap());
    assert_eq!((&first["loss"], &first["accuracy"]), (&second["loss"], &second["accuracy"]));
    let study = |devices: &str| {
        let sizes = "--host minimal --envs 2 --steps 2 --batch 16 --seeds 1 --json";
        m.ok(&format!("control eval --controllers none,random {sizes} {data} {devices}")).stdout
    };
    assert!(study("--devices cpu,cpu:1").contains("random"));
}

#[test]
fn invalid_devices_are_refused_before_the_run() {
    let m = Meristem::new();
    let refused = |flags: &str, words: &[&str]| {
        m.fails(&format!("train {TINY} --run-dir run {flags}"), 2, words);
        assert!(!m.path("run").exists(), "{flags}");
    };
    refused("--devices gpu", &["`gpu` is not a device", "cpu:N"]);
    refused("--devices cpu:x", &["`cpu:x` is not a device"]);
    refused("--devices cpu,cpu:0", &["`devices`", "each device once", "cpu is listed twice"]);
    refused("--devices cpu,cpu:1,cpu:2", &["`devices`: got cpu,cpu:1,cpu:2, expected at most 2"]);
    refused(
        "--devices cpu,cpu:1 --policy-device cpu:2",
        &["`policy-device`: got cpu:2", "cpu, cpu:1"],
    );
    refused("--policy-device cpu:1", &["`policy-device`: got cpu:1"]);
    refused(
        "--devices cpu,cpu:1 --policy-device cpu,cpu:1",
        &["`policy-device`: got cpu,cpu:1, expected one device", "several `ranks`"],
    );
    refused("--device-memory 0", &["`device-memory`: got 0, expected at least 1"]);
    refused("--device-memory lots", &["lots", "64MiB"]);
    refused("--device-memory -1", &["--device-memory"]);
    // Too little memory for the data, then for the envs.
    for limit in ["1MiB", "9MiB"] {
        let words =
            ["`device-memory`", "out of memory on cpu", "asks for", "the limit is", "dataset"];
        refused(&format!("--host large --batch 512 --device-memory {limit}"), &words);
    }
    // The last batch is too small for all envs of one device, while the envs of another still have
    // samples.
    let holes = "--devices cpu,cpu:1 --envs 6 --batch 3333 --max-batches all --epoch dealt";
    refused(holes, &["env 1 on cpu has no sample", "another batch size"]);
}

/// [`RUN`] with batches so large that growth causes memory to be reused.
fn larger() -> String {
    RUN.replace("--batch 16", "--batch 32")
}

/// Memory limit in KiB.
fn capped(m: &Meristem, name: &str, kib: usize) -> crate::common::CommandOutput {
    m.run(&format!("{} --device-memory {kib}KiB --run-dir {name}", larger()))
}

/// The smallest sufficient limit gives the bits of ample memory. With a little less the run ends,
/// and resumes with a higher limit and the same bits.
#[test]
fn a_limit_of_memory_is_sufficient_or_ends_a_run_that_resumes() {
    let m = with_images();
    m.ok(&format!("{} --run-dir ample", larger()));
    let ample = outcome(&m, "ample");
    assert!(grown(&ample.events) > 0, "nothing grew, nothing was shown");
    let validated: Vec<u64> = of_kind(&ample.events, "counterfactuals")
        .iter()
        .filter_map(|e| e["rows"].as_u64())
        .collect();
    let taken =
        |run: &str, what: &str| m.json(&format!("{run}/summary.json"))["memory"][what].as_u64();
    let (peak, reserved) =
        (taken("ample", "peak").unwrap(), taken("ample", "reserved_peak").unwrap());
    // Search between a limit that is too small, because tensors are larger, and a limit that
    // suffices.
    let (mut low, mut high) = (peak as usize / 2 / 1024, reserved as usize / 1024 + 1);
    // The largest limit with which a run began and ended early, and its output.
    let mut ended = None;
    while high - low > high / 32 {
        let middle = (low + high) / 2;
        let said = capped(&m, &format!("cap-{middle}"), middle);
        match said.code {
            Some(0) => {
                high = middle;
                continue;
            }
            Some(1) => ended = Some((middle, said)),
            Some(2) => {}
            code => panic!("{code:?} with {middle} KiB: {}", said.stderr),
        }
        low = middle;
    }
    let tight = format!("cap-{high}");
    assert_same(
        &outcome(&m, &tight),
        &ample,
        &format!("{high} KiB of {reserved} bytes, {validated:?}"),
    );
    // The limit forces reuse of memory.
    let reserved_tight = taken(&tight, "reserved_peak").unwrap();
    assert!(reserved_tight <= 1024 * high as u64);
    assert!(reserved_tight < reserved, "{reserved_tight} of {reserved}: nothing had to be reused");

    let (kib, said) = ended.expect("a limit below the smallest sufficient one ends the run");
    let flat = said.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    let limit = format!("the limit is {}", 1024 * kib);
    for words in [
        "out of memory on cpu",
        "asks for",
        "in use (dataset",
        &limit,
        "--device-memory",
        "--resume",
    ] {
        assert!(flat.contains(words), "`{words}` is not in {}", said.stderr);
    }
    let run = format!("cap-{kib}");
    assert_eq!(m.json(&format!("{run}/summary.json"))["status"], "failed");
    assert!(fs::read_dir(m.path(&format!("{run}/checkpoints"))).unwrap().count() > 0);
    m.ok(&format!("train --resume {run} --quiet --device-memory 64MiB"));
    assert_same(&outcome(&m, &run), &ample, "with more memory");
}

/// A precision that a device does not support is refused before any work, with a remedy.
#[test]
fn a_cpu_computes_only_in_f32() {
    let m = with_images();
    for (devices, other) in [("cpu", "cpu"), ("cuda:0,cpu:1", "cpu:1")] {
        let run = format!("{RUN} --devices {devices} --precision tf32 --run-dir none");
        let expected = format!(
            "`precision`: got tf32, expected f32 on {other}; tf32 needs CUDA devices only, such as \
             cuda:0"
        );
        m.fails(&run, 2, &[&expected]);
        assert!(!m.path("none").exists());
    }
    let words = ["`precision`: got bf16, expected f32 on cpu"];
    for command in [
        "bench host --seconds 0.1",
        "bench counterfactual --seconds 0.1",
        "eval --weights none.safetensors",
    ] {
        m.fails(&format!("{command} --precision bf16"), 2, &words);
    }
    m.fails("bench host --precision f16", 2, &["possible values: f32, tf32, bf16"]);
    m.fails("train --precision f16", 2, &["f32 | tf32 | bf16"]);
    let said = m.ok(&format!("{RUN} --precision f32 --print-config"));
    assert!(said.stdout.contains("precision = \"f32\"\n"), "{}", said.stdout);
    m.ok(&format!("{RUN} --steps 1 --rounds 1 --run-dir cut"));
    fs::remove_file(m.path("cut/summary.json")).unwrap();
    m.fails("train --resume cut --precision tf32 --quiet", 2, &["expected f32 on cpu"]);
}

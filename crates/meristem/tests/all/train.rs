//! `meristem train`: files, output and reproducibility.

use crate::common::process::output;
use crate::common::{Meristem, TINY, of_kind};

#[test]
fn a_run_writes_its_events_and_results_to_a_folder() {
    let m = Meristem::new();
    let said = m.ok("train --preset quick --host baseline --controller heuristic --max-gap 99 \
             --parameters-per-image 99 --steps 13 --batch 32 --max-batches 4 --run-dir run");
    assert!(said.stdout.contains("control accuracy"), "{}", said.stdout);
    assert!(said.stdout.contains("run folder: run"), "{}", said.stdout);

    let summary = m.json("run/summary.json");
    assert_eq!(summary["status"], "completed");
    assert_eq!(summary["steps"], 13);
    // Steps of envs and of their twins.
    assert_eq!(summary["training_steps"], 2 * 13 * 4 * 4);
    assert_eq!(summary["images"], 2 * 13 * 4 * 4 * 32);
    assert_eq!(summary["dataset"]["train_samples"], 9000);
    assert_eq!(summary["dataset"]["control_samples"], 1000);
    assert_eq!((&summary["events_dropped"], &summary["rollbacks"]), (&0.into(), &0.into()));
    assert!(summary["images_per_s"].as_f64().unwrap() > 0.0);
    assert!(summary["memory"]["owners"]["dataset"]["peak"].as_u64().unwrap() > 9_000_000);
    // H4, D5: the inner loop makes no copies, waits or allocations.
    let hot = &summary["hot_path"];
    assert_eq!(hot["training_steps"], 2 * 12 * 4 * 4);
    for count in ["copies_to_host", "copies_to_device", "synchronizations", "allocations"] {
        assert_eq!(hot[count], 0.0, "{count}");
    }
    for env in summary["envs"].as_array().unwrap() {
        assert_eq!(env["host_parameters"], 6274);
        assert!(env["test_accuracy"].as_f64().unwrap() > 0.1);
        assert!(m.path("run").join(env["weights"].as_str().unwrap()).is_file());
    }

    let events = m.events("run");
    for (i, event) in events.iter().enumerate() {
        assert_eq!((&event["v"], &event["seq"]), (&2.into(), &i.into()));
    }
    assert_eq!(events[0]["event"], "run_started");
    assert_eq!(events[events.len() - 1]["event"], "run_ended");
    assert_eq!(of_kind(&events, "step_completed").len(), 13 * 4);
    assert_eq!(of_kind(&events, "episode_ended").len(), 4);
    // The quick preset must show growth.
    assert!(!of_kind(&events, "module_germinated").is_empty());
    assert!(!of_kind(&events, "gate_evaluated").is_empty());
    let worth = of_kind(&events, "counterfactuals");
    assert!(!worth.is_empty());
    let mut flops = [0, 0];
    for event in &worth {
        let cost = |key: &str| event["cost"][key].as_u64().unwrap();
        assert_eq!(cost("images"), 1000);
        assert_eq!(event["configurations"].as_array().unwrap().len() as u64, cost("evaluated"));
        assert!(cost("flops") < cost("flops_separate"), "{event}");
        flops[0] += cost("images") * cost("flops");
        flops[1] += cost("images") * cost("flops_separate");
        // Accuracy with all modules on, minus accuracy with none: the sum of the Shapley values.
        let modules = event["modules"].as_array().unwrap();
        let shapley: f64 = modules.iter().map(|m| m["shapley"].as_f64().unwrap()).sum();
        let off = &event["configurations"]
            .as_array()
            .unwrap()
            .iter()
            .find(|c| c["on"] == serde_json::json!([]));
        let gain = event["accuracy"].as_f64().unwrap() - off.unwrap()["accuracy"].as_f64().unwrap();
        assert!((shapley - 100.0 * gain).abs() < 1e-9, "{event}");
    }
    let cost = &summary["counterfactual_cost"];
    assert_eq!((&cost["flops"], &cost["flops_separate"]), (&flops[0].into(), &flops[1].into()));
    let stages: Vec<_> =
        of_kind(&events, "stage_changed").iter().map(|e| e["to"].clone()).collect();
    assert!(["training", "blending", "holding"].iter().all(|s| stages.contains(&(*s).into())));

    // The written configuration starts the same run.
    m.ok("train --config run/config.toml --run-dir again --quiet");
    assert_eq!(
        m.bytes("run/weights/env-2.safetensors"),
        m.bytes("again/weights/env-2.safetensors")
    );
    assert_eq!(m.bytes("run/config.toml"), m.bytes("again/config.toml"));
}

#[test]
fn results_do_not_depend_on_threads_or_process() {
    let m = Meristem::new();
    let run = |name: &str, flags: &str| {
        m.ok(&format!(
            "train --preset quick --controller heuristic --parameters-per-image 99 --max-gap 99 \
             --steps 9 --batch 32 --max-batches 3 --augment crop,flip,cutout \
             --run-dir {name} --quiet {flags}"
        ));
    };
    run("one", "--threads 1");
    run("four", "--threads 4");
    run("again", "--threads 1");
    run("other", "--threads 1 --seed 43");
    for env in 0..4 {
        let weights = |run: &str| m.bytes(&format!("{run}/weights/env-{env}.safetensors"));
        assert_eq!(weights("one"), weights("four"));
        assert_eq!(weights("one"), weights("again"));
        assert_ne!(weights("one"), weights("other"));
    }
    // Events are equal, too, except times and number of threads.
    let told = |run: &str| {
        let mut events = m.events(run);
        for event in &mut events {
            let fields = event.as_object_mut().unwrap();
            for own in
                ["seconds", "step_seconds", "images_per_s", "wall_seconds", "threads", "crc32"]
            {
                fields.remove(own);
            }
        }
        events
    };
    assert_eq!(told("one"), told("four"));
}

/// S4: if every launch waits for its kernel, a run with growth has the same bits.
#[test]
fn launch_blocking_gives_the_same_run() {
    let m = Meristem::new();
    let run = |name: &str, blocking: &str| {
        let flags = "train --preset quick --controller heuristic --parameters-per-image 99 \
                     --max-gap 99 --steps 9 --batch 32 --max-batches 2 --threads 2 --quiet \
                     --augment crop,flip,cutout --run-dir";
        let mut command = m.command();
        command.args(flags.split_whitespace()).arg(name).env("MERISTEM_LAUNCH_BLOCKING", blocking);
        let said = crate::common::command_output(output(&mut command));
        assert_eq!(said.code, Some(0), "{}", said.stderr);
        let germinated = of_kind(&m.events(name), "module_germinated").len();
        assert!(germinated > 0, "the run does not grow");
        (0..4)
            .map(|env| m.bytes(&format!("{name}/weights/env-{env}.safetensors")))
            .collect::<Vec<_>>()
    };
    assert!(run("blocking", "1") == run("asynchronous", "0"));
}

#[test]
fn two_runs_in_one_process_are_equal() {
    use meristem::train::config::{ConfigLayer, TrainConfig};
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str| {
        let flags = ConfigLayer {
            host: Some("minimal".into()),
            envs: Some(2),
            rounds: Some(2),
            steps: Some(2),
            max_batches: Some("2".parse().unwrap()),
            run_dir: Some(Some(folder.path().join(name))),
            ..ConfigLayer::default()
        };
        let config = TrainConfig::resolve(ConfigLayer::default(), flags).unwrap();
        meristem::train::run(&config, &mut meristem::train::Silent).unwrap();
        std::fs::read(folder.path().join(name).join("weights/env-1.safetensors")).unwrap()
    };
    assert_eq!(run("first"), run("second"));
}

#[test]
fn without_a_controller_all_training_images_are_used() {
    let m = Meristem::new();
    m.ok("train --host minimal --envs 1 --steps 1 --controller none --run-dir run --quiet");
    let summary = m.json("run/summary.json");
    assert_eq!(summary["images"], 10_000);
    assert_eq!(summary["dataset"]["control_samples"], 0);
    assert!(summary["envs"][0]["control_accuracy"].is_null());
    assert_eq!(summary["envs"][0]["modules"].as_array().unwrap().len(), 0);
}

/// The first line of output and the events have the number of samples per step of an env.
#[test]
fn an_env_trains_on_all_images_in_a_step_or_on_its_part() {
    let m = Meristem::new();
    let run = "train --host minimal --envs 3 --steps 1 --controller none";
    for (flags, said, images, batches) in [
        ("", "10,000 samples per step (epoch full)", [10_000, 10_000], 79),
        ("--epoch dealt", "3,333 to 3,334 samples per step (epoch dealt)", [3333, 3334], 27),
        ("--max-batches 2", "256 samples per step (epoch full)", [256, 256], 2),
        ("--preset quick", "3,333 to 3,334 samples per step (epoch dealt)", [3333, 3334], 27),
    ] {
        let told = m.ok(&format!("{run} {flags} --run-dir run")).stdout;
        assert!(told.lines().next().unwrap().contains(said), "{told}");
        let started = m.events("run")[0].clone();
        assert_eq!(started["images_per_step"], serde_json::json!(images), "{flags}");
        assert_eq!(started["batches"], batches, "{flags}");
        let all = m.json("run/summary.json")["images"].as_u64().unwrap();
        assert!((3 * images[0]..=3 * images[1]).contains(&all), "{flags}: {all}");
        std::fs::remove_dir_all(m.path("run")).unwrap();
    }
    // With --data-parallel the ranks have the images of the one env.
    let shared = "train --host minimal --data-parallel --ranks 2 --steps 1 --controller none";
    let told = m.ok(&format!("{shared} --run-dir run")).stdout;
    assert!(told.starts_with("1 env of `minimal`") && told.contains("10,000 samples"), "{told}");
    assert_eq!(m.json("run/summary.json")["images"], 10_000);
}

#[test]
fn rounds_begin_with_fresh_hosts() {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --rounds 2 --run-dir run --quiet"));
    let summary = m.json("run/summary.json");
    assert_eq!((&summary["rounds"], &summary["steps"]), (&2.into(), &6.into()));
    let rounds = summary["round_results"].as_array().unwrap();
    assert_eq!(rounds.len(), 2);
    assert_ne!(rounds[0]["test_accuracy"], rounds[1]["test_accuracy"]);
    let events = m.events("run");
    let first_losses: Vec<f64> = of_kind(&events, "step_completed")
        .iter()
        .filter(|e| e["step"] == 0 && e["env"] == 0)
        .map(|e| e["train_loss"].as_f64().unwrap())
        .collect();
    assert_eq!(first_losses.len(), 2, "one of each round: steps count from 0");
    assert!(first_losses.iter().all(|loss| (2.0..2.8).contains(loss)), "{first_losses:?}");
}

#[test]
fn print_config_prints_the_settings_without_a_run() {
    let m = Meristem::new();
    let printed = m.ok(&format!("train {TINY} --print-config --run-dir run")).stdout;
    assert!(!m.path("run").exists(), "it ran: {printed}");
    m.ok(&format!("train {TINY} --run-dir run --quiet"));
    let written = String::from_utf8(m.bytes("run/config.toml")).unwrap();
    let differs =
        printed.lines().zip(written.lines()).find(|(printed, written)| printed != written);
    assert_eq!(differs, None, "printed, and written by the run");
    assert_eq!(printed, written);
    m.fails("train --print-config --batch 0", 2, &["`batch`: got 0, expected 1 to 65536"]);
    m.fails("train --print-config --resume run", 2, &["--print-config", "--resume"]);
    let help = m.ok("train --help").stdout;
    let flat = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        "[default: 128]",
        "quick: Ten seconds",
        "min-contribution 0",
        "policy-hidden 512",
        "[default: no trace]",
    ] {
        assert!(flat.contains(words), "{words}\n{help}");
    }
}

#[test]
fn every_batch_can_be_logged_with_exact_losses() {
    let m = Meristem::new();
    let said = m.ok(&format!("train {TINY} --log-batches --run-dir run"));
    let events = m.events("run");
    let batches = of_kind(&events, "batch_completed");
    assert_eq!(batches.len(), 3 * 3 * 2);
    for event in batches {
        // Printed output counts from 1, except for envs, which have the numbers of the files.
        let number = |key: &str| event[key].as_u64().unwrap() + 1;
        let line = format!(
            "round 1 step {} batch {} env {} loss {:?}",
            number("step"),
            number("batch"),
            event["env"],
            event["loss"].as_f64().unwrap()
        );
        assert!(said.stdout.lines().any(|l| l == line), "{line}\n{}", said.stdout);
    }
}

#[test]
fn json_is_the_only_output_on_stdout_and_quiet_is_silent() {
    let m = Meristem::new();
    let said = m.ok(&format!("train {TINY} --json --run-dir run"));
    let summary: serde_json::Value = serde_json::from_str(&said.stdout).unwrap();
    assert_eq!(summary, m.json("run/summary.json"));
    assert!(said.stderr.contains("step   1/3"), "{}", said.stderr);
    let said = m.ok(&format!("train {TINY} --quiet --run-dir silent"));
    assert_eq!((said.stdout.as_str(), said.stderr.as_str()), ("", ""));
    let said = m.ok(&format!("train {TINY} --quiet --json --run-dir both"));
    assert!(said.stdout.starts_with('{') && said.stderr.is_empty());
}

#[test]
fn the_default_folder_is_named_by_time_and_run() {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --name trial --quiet"));
    m.ok(&format!("train {TINY} --quiet"));
    let names: Vec<String> = std::fs::read_dir(m.path("runs"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    for end in ["-trial", "-minimal-embedded"] {
        assert!(names.iter().any(|name| name.ends_with(end)), "{names:?}");
    }
}

#[test]
fn a_dataset_beyond_the_budget_is_streamed_with_the_same_result() {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --run-dir resident --quiet"));
    m.ok(&format!("train {TINY} --data-budget 1MB --run-dir streamed --quiet"));
    let weights = "weights/env-1.safetensors";
    assert_eq!(m.bytes(&format!("resident/{weights}")), m.bytes(&format!("streamed/{weights}")));
    let dataset = |run: &str| {
        m.json(&format!("{run}/summary.json"))["memory"]["owners"]["dataset"]["peak"]
            .as_u64()
            .unwrap()
    };
    assert!(dataset("streamed") < dataset("resident") / 10);
}

/// No controller grows a host beyond its limits, in parameters or in operations.
#[test]
fn hosts_stay_within_their_limits() {
    let m = Meristem::new();
    let tiny = "train --host minimal --envs 4 --steps 20 --max-batches 2 --batch 32 --twin off \
                --min-training-steps 1 --min-contribution -100 --max-gap 99 \
                --control-split 0.02 --quiet";
    let largest = |run: &str| {
        let size = |event: &&serde_json::Value| event["parameters"].as_u64().unwrap();
        let events = m.events(run);
        let most = of_kind(&events, "module_germinated").iter().map(size).max();
        let grown = |e: &&serde_json::Value| e["grown_parameters"].as_u64().unwrap();
        let total = of_kind(&events, "step_completed").iter().map(grown).max().unwrap();
        (most.unwrap_or(0), total)
    };
    for controller in ["random", "heuristic", "ppo --rounds 1 --policy-hidden 8"] {
        let run = controller.split(' ').next().unwrap();
        let limit = "--max-parameters 420";
        m.ok(&format!("{tiny} --controller {controller} {limit} --run-dir {run}"));
        let (most, total) = largest(run);
        assert!(most > 0 && 160 + total <= 420, "{run}: {most}, {total}");
        m.ok(&format!("{tiny} --controller {controller} --run-dir free-{run}"));
        assert!(160 + largest(&format!("free-{run}")).1 > 420, "{run}: the limit has no effect");
    }
    // The host needs 33,008 multiplications per image; `conv_small` adds 3,136.
    m.ok(&format!("{tiny} --controller random --max-macs 33500 --run-dir macs"));
    let small = ["norm", "attention"];
    let events = m.events("macs");
    for event in of_kind(&events, "module_germinated") {
        assert!(small.contains(&event["blueprint"].as_str().unwrap()), "{event}");
    }
    m.fails(
        &format!("{tiny} --controller random --max-parameters 100 --run-dir no"),
        2,
        &["`max-parameters`: got 100, expected at least 160, the host's parameters"],
    );
    m.fails(&format!("{tiny} --max-macs 9 --run-dir no"), 2, &["`max-macs`: got 9", "MACs"]);
    let text = "{\"step\":0,\"op\":\"GERMINATE\",\"slot\":\"r0c1\",\"blueprint\":\"conv_heavy\"}\n";
    std::fs::write(m.path("a.jsonl"), text).unwrap();
    m.fails(
        &format!("{tiny} --controller fixed:a.jsonl --max-parameters 200 --run-dir script"),
        1,
        &["slot r0c1: with conv_heavy the host has", "and its limit is 200"],
    );
}

/// A closed stderr causes no panic.
#[test]
fn an_error_with_a_closed_stderr_has_its_exit_code() {
    let m = Meristem::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = m.command().args(["train", "--ranks", "0"]).stderr(writer).status().unwrap();
    assert_eq!(status.code(), Some(2));
}

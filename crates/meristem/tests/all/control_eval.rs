//! `meristem control eval`: comparisons, output and errors.

#[cfg(unix)]
use std::io::{BufRead, BufReader, Lines};
#[cfg(unix)]
use std::process::{Child, ChildStderr, Command, Stdio};

use crate::common::process::{Process, output, wait_for};
use crate::common::{CommandOutput, Meristem, assert_documented, command_output, figure};
use serde_json::Value;

/// Settings of two tiny hosts with growing modules, with three batches a step.
const TINY: &str = "--host minimal --envs 2 --steps 4 --max-batches 3 --batch 32 --policy-hidden 8 \
                    --rounds 2 --min-training-steps 1 --control-split 0.02";

/// Runs a command with its temporary files in the test's folder.
fn eval(m: &Meristem, arguments: &str) -> CommandOutput {
    let temporary = m.path("temporary");
    std::fs::create_dir_all(&temporary).unwrap();
    let mut command = m.command();
    command.args(["control", "eval"]).args(arguments.split_whitespace()).env("TMPDIR", &temporary);
    let said = command_output(output(&mut command));
    assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0, "temporary files are left");
    said
}

fn study(said: &CommandOutput) -> Value {
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    let study = serde_json::from_str(&said.stdout).unwrap();
    assert_documented("## study.json", &study);
    study
}

/// Checks the mean, and the standard deviation by a formula without the mean: the sum over all
/// pairs of (xᵢ − xⱼ)² is 2n(n − 1) times the variance.
fn assert_spread(of: &Value, values: &[f64]) {
    let n = values.len() as f64;
    let pairs = values.iter().flat_map(|a| values.iter().map(move |b| (a - b).powi(2)));
    let std = (pairs.sum::<f64>() / (2.0 * n * (n - 1.0))).sqrt();
    let mean = values.iter().sum::<f64>() / n;
    // A few roundings of numbers up to 1000, each of at most 1.1e-13.
    assert!((figure(&of["mean"]) - mean).abs() < 1e-10, "{of} {values:?}");
    assert!((figure(&of["std"]) - std).abs() < 1e-6, "{of} {values:?}");
    assert_eq!(of["count"], values.len());
}

#[test]
fn contenders_get_the_same_hosts_and_results_have_mean_and_spread() {
    let m = Meristem::new();
    let three = format!("{TINY} --controllers none,random,heuristic --seeds 3");
    let flags = format!("{three} --run-dir kept --plot plot.svg --json");
    let told = eval(&m, &flags);
    assert!(told.stderr.contains("run 9 of 9: heuristic with seed 1002"), "{}", told.stderr);
    let found = study(&told);
    assert_eq!(found, m.json("kept/study.json"));
    assert_eq!(
        (&found["status"], &found["seeds"]),
        (&"completed".into(), &vec![1000, 1001, 1002].into())
    );
    let contenders = found["contenders"].as_array().unwrap();
    let names: Vec<&str> = contenders.iter().map(|c| c["contender"].as_str().unwrap()).collect();
    assert_eq!(names, ["none", "random", "heuristic"]);
    let of_first: Vec<f64> = seeds(&contenders[0], "test_accuracy");
    for (place, contender) in contenders.iter().enumerate() {
        for key in ["test_accuracy", "parameters", "points_per_1000_parameters"] {
            assert_spread(&contender[key], &seeds(contender, key));
        }
        let difference = &contender["difference_pp"];
        if place == 0 {
            assert!(difference.is_null());
            continue;
        }
        let own = seeds(contender, "test_accuracy");
        let pairs: Vec<f64> = own.iter().zip(&of_first).map(|(a, b)| 100.0 * (a - b)).collect();
        assert_spread(difference, &pairs);
        assert_eq!(difference["ahead"], pairs.iter().filter(|pp| **pp > 0.0).count());
    }
    // The value of a seed is the mean over its envs, in points per 1000 parameters.
    let run = &contenders[1]["runs"][2];
    let envs = run["envs"].as_array().unwrap();
    let of = |key: &str| envs.iter().map(|env| figure(&env[key])).sum::<f64>() / 2.0;
    assert!((figure(&run["test_accuracy"]) - of("test_accuracy")).abs() < 1e-12);
    let env = &envs[0];
    let points = 100.0 * figure(&env["test_accuracy"]) / (figure(&env["parameters"]) / 1000.0);
    assert!((figure(&env["points_per_1000_parameters"]) - points).abs() < 1e-9);
    let svg = String::from_utf8(m.bytes("plot.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains(">heuristic</text>"), "{svg}");
    assert_eq!(svg.matches("r=\"3\"").count(), 2 * 9, "a dot for each run in both panels");
    // Each run equals a run of `train` with the same settings.
    m.ok(&format!(
        "train {TINY} --controller random --rounds 1 --seed 1002 --run-dir alone --quiet"
    ));
    let weights = "weights/env-1.safetensors";
    assert_eq!(
        m.bytes(&format!("alone/{weights}")),
        m.bytes(&format!("kept/seed-1002/2-random/{weights}"))
    );
    assert_eq!(m.json("alone/summary.json")["envs"][1]["test_accuracy"], envs[1]["test_accuracy"]);
    assert!(
        figure(&contenders[1]["parameters"]["mean"]) > figure(&contenders[0]["parameters"]["mean"])
    );
    // Runs without a controller have a control split, too, so that all contenders train on the same
    // images.
    assert_eq!(m.json("kept/seed-1002/1-none/summary.json")["dataset"]["train_samples"], 9800);
    // Results do not depend on threads, output format or other contenders.
    assert_eq!(study(&eval(&m, &format!("{three} --threads 4 --json --quiet"))), found);
    let alone =
        study(&eval(&m, &format!("{TINY} --controllers random --seeds 1 --seed 1002 --json")));
    assert_eq!(alone["contenders"][0]["runs"][0], contenders[1]["runs"][2]);
}

/// One value for each seed.
fn seeds(contender: &Value, key: &str) -> Vec<f64> {
    contender["runs"].as_array().unwrap().iter().map(|run| figure(&run[key])).collect()
}

#[test]
fn policies_are_compared_from_files_and_by_their_rewards() {
    let m = Meristem::new();
    let learners = "--controllers ppo@shaped,ppo@sparse --seeds 2";
    let learned = eval(&m, &format!("{TINY} {learners} --run-dir kept --plot plot.png"));
    assert_eq!(learned.code, Some(0), "{}", learned.stderr);
    assert!(
        learned.stderr.contains("run 4 of 4: ppo@sparse training for seed 1001"),
        "{}",
        learned.stderr
    );
    assert!(learned.stdout.contains("points above"), "{}", learned.stdout);
    assert!(learned.stdout.contains("mean ± 95 % interval over seeds"), "{}", learned.stdout);
    let plot = image::load_from_memory(&m.bytes("plot.png")).unwrap();
    assert_eq!((plot.width(), plot.height()), (1200, 520));
    let kept = m.json("kept/study.json");
    let run = &kept["contenders"][1]["runs"][1];
    assert_eq!(run["training"].as_array().unwrap().len(), 2, "two rounds");
    let config = |name: &str| {
        std::fs::read_to_string(m.path("kept/seed-1001").join(name).join("config.toml")).unwrap()
    };
    // Twins are trained for the reward `shaped`, but not in the evaluation.
    for (name, reward, twin) in [
        ("1-ppo-shaped-learning", "shaped", "on"),
        ("1-ppo-shaped", "contribution", "off"),
        ("2-ppo-sparse-learning", "sparse", "off"),
    ] {
        let config = config(name);
        assert!(config.contains(&format!("reward = \"{reward}\"\n")), "{config}");
        assert!(config.contains(&format!("twin = \"{twin}\"\n")), "{config}");
    }
    let seed =
        |text: &str| text.lines().find(|line| line.starts_with("seed =")).unwrap().to_string();
    assert_ne!(
        seed(&config("2-ppo-sparse-learning")),
        seed(&config("1-ppo-shaped")),
        "other hosts"
    );
    // The saved policy repeats the run, and gives another run as `greedy`.
    let file = "kept/seed-1001/2-ppo-sparse-learning/policy.safetensors";
    let before = m.bytes(file);
    let flags = format!(
        "{TINY} --seeds 1 --seed 1001 --json --controllers none,greedy:{file} --policy {file}"
    );
    let found = study(&eval(&m, &flags));
    let [greedy, drawing] = [1, 2].map(|place| &found["contenders"][place]["runs"][0]);
    assert_eq!(drawing["envs"], run["envs"]);
    assert_ne!(greedy["envs"], run["envs"]);
    assert_eq!(m.bytes(file), before, "it learns nothing");
    // `train` accepts these controllers, too.
    m.ok(&format!(
        "train {TINY} --controller ppo:{file} --rounds 1 --seed 1001 --run-dir alone --quiet"
    ));
    let absolute = format!("ppo:{}", m.path(file).display());
    assert_eq!(m.json("alone/summary.json")["controller"], absolute);
    assert!(!m.path("alone/policy.safetensors").exists());
    let trained = &m.json("alone/summary.json")["envs"][0]["parameters"];
    assert_eq!(trained, &drawing["envs"][0]["parameters"]);
}

#[test]
fn invalid_comparisons_are_refused_before_the_first_run() {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --controller ppo --slots r0 --run-dir learned --quiet"));
    std::fs::write(m.path("bad.jsonl"), "{\"step\": 1, \"op\": \"JUMP\"}\n").unwrap();
    std::fs::write(m.path("there.svg"), "<svg/>").unwrap();
    std::fs::write(m.path("comm.toml"), "comm = \"mpi\"").unwrap();
    let policy = "ppo:learned/policy.safetensors";
    for (flags, code, words) in [
        ("--seeds 0", 2, "`seeds`: got 0"),
        ("--controllers none,random,none", 2, "none twice"),
        (
            "--controllers static@random,random",
            2,
            "`controllers`: got static@random, expected random before it",
        ),
        (
            "--controllers random,static-compute@random",
            2,
            "expected static@random before it, which it is compared with",
        ),
        ("--controllers none,static@none --init x", 2, "expected no --init"),
        (
            "--plot missing/plot.svg",
            2,
            "`plot`: got missing/plot.svg, expected a file in an existing folder",
        ),
        ("--plot there.svg", 2, "would be overwritten"),
        ("--run-dir learned", 2, "the run folder learned exists"),
        (&format!("--controllers none,{policy} --slots r0c0"), 2, "for 3 slots"),
        ("--controllers none,ppo:missing.safetensors", 2, "missing.safetensors"),
        ("--controllers none,fixed:missing.jsonl", 2, "missing.jsonl"),
        ("--controllers none,fixed:bad.jsonl", 2, "JUMP"),
        ("--policy learned/weights/env-0.safetensors", 2, "not a policy file"),
        ("--seed 9223372036854775806", 2, "`seed`"),
        ("--dataset cifar10", 2, "cifar10"),
        ("--config comm.toml", 2, "`comm`: got mpi, expected threads"),
    ] {
        let context = format!("{flags} {words}");
        let usual = [("--seeds", "--seeds 3"), ("--run-dir", "--run-dir no")];
        let usual: Vec<&str> =
            usual.iter().filter(|(flag, _)| !flags.contains(flag)).map(|(_, all)| *all).collect();
        let told = eval(&m, &format!("{TINY} {flags} {}", usual.join(" ")));
        assert_eq!(told.code, Some(code), "{context}\n{}", told.stderr);
        let flat = told.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.starts_with("error: ") && flat.contains(words), "{context}\n{flat}");
        assert!(!flat.contains("train --help"), "{context}\n{flat}");
        assert!(!flat.contains("run 1 of") && !flat.contains("panicked"), "{context}\n{flat}");
        assert!(!m.path("no").exists(), "{context}");
    }
    // Errors of clap.
    for (flags, words) in [
        ("--plot plot.pdf", ".svg or .png"),
        ("--controllers heuristics", "did you mean `heuristic`?"),
        ("--controllers nobody", "ppo@REWARD"),
        ("--controllers ppo@spares", "did you mean `sparse`?"),
        ("--controllers greedy:", "a file after the colon"),
        ("--controllers static@static@none", "a controller after the @"),
    ] {
        let told = eval(&m, flags);
        assert_eq!(told.code, Some(2), "{flags}\n{}", told.stderr);
        assert!(told.stderr.contains(words), "{flags}\n{}", told.stderr);
    }
}

/// A fixed network has exactly the final topology of another contender, env by env. At equal
/// compute, the number of steps is chosen so that the cost is equal.
#[test]
fn grown_networks_are_compared_with_fixed_ones() {
    let m = Meristem::new();
    let script = r#"
{"step":0, "env":0, "op": "GERMINATE", "slot":"r0c1", "blueprint":"conv_heavy", "then":"FOSSILIZE"}
{"step": 0, "env": 1, "op": "GERMINATE", "slot": "r0c0", "blueprint": "norm", "then": "FOSSILIZE"}
"#;
    std::fs::write(m.path("script"), script).unwrap();
    let flags = "--controllers none,fixed:script,static@fixed:script,static-compute@fixed:script \
                 --seeds 1 --steps 20 --min-contribution 0 --run-dir kept --json";
    let tiny = TINY.replace("--steps 4 ", "");
    let found = study(&eval(&m, &format!("{tiny} {flags}")));
    let run = |place: usize| &found["contenders"][place]["runs"][0];
    let parameters =
        |place: usize| [0, 1].map(|env| figure(&run(place)["envs"][env]["parameters"]));
    assert!(parameters(1)[0] > parameters(1)[1], "the envs differ");
    assert!(parameters(1)[1] > parameters(0)[1], "both have grown");
    for place in [2, 3] {
        assert_eq!(parameters(place), parameters(1), "{place}");
        let envs = run(place)["envs"].as_array().unwrap();
        assert!(envs.iter().all(|env| env["modules"]["germinated"] == 0), "{place}");
    }
    let [bare, grown, fixed, brief] = [0, 1, 2, 3].map(|place| figure(&run(place)["flops"]));
    // Growing costs counterfactual evaluations, here of far more images than are trained.
    assert!(bare < fixed && fixed < grown, "{bare} {grown} {fixed}");
    let summary = m.json("kept/seed-1000/4-static-compute-fixed/summary.json");
    let steps = (20.0 * grown / fixed).round();
    assert_eq!(summary["steps"], steps);
    assert!(steps > 20.0, "{steps}");
    // All steps have the same cost, and the number of steps is rounded.
    assert!((brief - grown).abs() <= 0.5001 * fixed / 20.0, "{brief} {grown}");
    let spread = &found["contenders"][1]["flops"];
    assert_eq!((&spread["mean"], &spread["ci95"]), (&run(1)["flops"], &Value::Null));
}

/// A policy file lists the seeds of its training.
#[test]
fn a_policy_compared_on_seeds_of_its_training_causes_a_warning() {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --controller ppo --seed 1001 --run-dir learned --quiet"));
    let file = "learned/policy.safetensors";
    m.ok(&format!(
        "train {TINY} --controller ppo --policy {file} --seed 2001 --run-dir on --quiet"
    ));
    let compare = |policy: &str, flags: &str| {
        let told = eval(
            &m,
            &format!("{TINY} --controllers none,{policy} --seeds 2 --json --quiet {flags}"),
        );
        (study(&told)["contenders"].clone(), told.stderr)
    };
    let (contenders, stderr) = compare(&format!("ppo:{file}"), "");
    assert!(stderr.starts_with(
        "warning: the policy of ppo:learned/policy.safetensors was trained with seed 1001,"
    ));
    let known = [0, 1].map(|place| &contenders[place]["known_seeds"]);
    assert_eq!(known, [&serde_json::json!([]), &serde_json::json!([1001])]);
    // Its seeds include the seed of its run, and the seeds of its initial policy.
    for (policy, flags, seed) in [
        ("greedy:learned/policy.safetensors", "--config learned/config.toml", 1001),
        ("ppo:on/policy.safetensors", "--seed 1000", 1001),
        ("ppo:on/policy.safetensors", "--config on/config.toml", 2001),
    ] {
        let (contenders, stderr) = compare(policy, flags);
        assert!(stderr.contains(&format!("trained with seed {seed},")), "{flags}: {stderr}");
        assert_eq!(contenders[1]["known_seeds"], serde_json::json!([seed]), "{flags}");
    }
    assert_eq!(compare("ppo:on/policy.safetensors", "--seed 3000").1, "");
}

/// Starts a comparison, and reads stderr up to a line that begins with `until`.
#[cfg(unix)]
fn started(m: &Meristem, flags: &str, until: &str) -> (Process, Lines<BufReader<ChildStderr>>) {
    std::fs::create_dir_all(m.path("temporary")).unwrap();
    let mut command = m.command();
    command.args(["control", "eval"]).args(flags.split_whitespace());
    command.env("TMPDIR", m.path("temporary")).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Process::start(&mut command);
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().starts_with(until)), "{until}");
    (child, lines)
}

#[cfg(unix)]
fn interrupt(child: &Child) {
    let kill = ["-INT", &child.id().to_string()];
    assert!(Command::new("kill").args(kill).status().unwrap().success());
}

#[cfg(unix)]
#[test]
fn ctrl_c_before_the_first_complete_run_is_reported() {
    let m = Meristem::new();
    let flags = "--host minimal --envs 1 --steps 2000 --max-batches 2 --batch 32 --seeds 2";
    let (child, lines) = started(&m, flags, "step ");
    interrupt(&child);
    assert!(lines.map(Result::unwrap).any(|line| line.contains("stopping after this step")));
    let told = command_output(child.output());
    let expected = "stopped in run 1 (none with seed 1000); 0 of 6 runs are complete; \
                    there is nothing to compare\n";
    assert_eq!((told.code, &*told.stdout), (Some(3), expected));
    assert_eq!(std::fs::read_dir(m.path("temporary")).unwrap().count(), 0);
}

/// The second signal does not wait for a long step, and leaves no files.
#[cfg(unix)]
#[test]
fn ctrl_c_twice_ends_at_once_without_files() {
    let m = Meristem::new();
    let flags = "--host large --envs 4 --steps 2 --batch 128 --seeds 1 --controllers random";
    let (child, mut lines) = started(&m, flags, "run 1 of 1");
    interrupt(&child);
    assert!(lines.any(|line| line.unwrap().contains("stopping after this step")));
    assert_eq!(std::fs::read_dir(m.path("temporary")).unwrap().count(), 1);
    // Within a second, a signal counts as part of the first request.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    interrupt(&child);
    let told = command_output(child.output());
    assert_eq!((told.code, &*told.stdout), (Some(130), ""));
    assert_eq!(std::fs::read_dir(m.path("temporary")).unwrap().count(), 0);
}

#[cfg(unix)]
#[test]
fn ctrl_c_keeps_complete_runs() {
    let m = Meristem::new();
    let flags = "--host minimal --envs 1 --steps 2 --max-batches 2 --batch 32 --seeds 10000 \
                 --controllers none,random --plot plot.svg";
    let (child, lines) = started(&m, flags, "run 4 of 20000");
    interrupt(&child);
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    let told = command_output(child.output());
    assert_eq!(told.code, Some(3), "{rest:?}");
    assert!(
        rest.iter()
            .any(|line| line.contains("stopping after this step, with the results of complete"))
    );
    assert!(
        told.stdout.contains("of 20000 runs are complete; others are left out"),
        "{}",
        told.stdout
    );
    assert!(told.stdout.lines().all(|line| line.chars().count() <= 100), "{}", told.stdout);
    assert!(String::from_utf8(m.bytes("plot.svg")).unwrap().contains("stopped early"));
}

/// A killed study continues: complete runs are not repeated, a partial run is resumed, and the
/// results equal those of an uninterrupted study.
#[cfg(unix)]
#[test]
fn a_killed_study_continues() {
    let m = Meristem::new();
    let flags = format!("{TINY} --controllers none,random,ppo --seeds 2 --json --run-dir");
    let whole = study(&eval(&m, &format!("{flags} whole")));
    let mut command = m.command();
    command.args(["control", "eval"]).args(flags.split_whitespace()).arg("cut");
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = Process::start(&mut command);
    wait_for("a run that learns", || m.path("cut/seed-1000/3-ppo-learning/checkpoints").is_dir());
    child.kill().unwrap();
    child.wait().unwrap();
    let complete = ["seed-1000/1-none", "seed-1000/2-random"];
    let events = |cell: &str| {
        let file = m.path("cut").join(cell).join("events.jsonl");
        (std::fs::read(&file).unwrap(), file.metadata().unwrap().modified().unwrap())
    };
    let before = complete.map(events);
    // A run that was killed before its settings were written.
    std::fs::create_dir_all(m.path("cut/seed-1001/1-none/weights")).unwrap();
    std::fs::write(m.path("cut/seed-1001/1-none/.lock"), "").unwrap();
    // A change of a setting that affects results is refused by name, and nothing is changed.
    let other = flags.replace("--steps 4", "--steps 5");
    let refused = eval(&m, &format!("{other} cut"));
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    let flat = refused.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in ["seed-1000/1-none", "`steps = 4`", "`steps = 5`", "another --run-dir"] {
        assert!(flat.contains(words), "{flat}");
    }
    let told = eval(&m, &format!("{flags} cut"));
    assert!(told.stderr.contains("run 2 of 6: random with seed 1000, complete"), "{}", told.stderr);
    assert_eq!(complete.map(events), before);
    assert_eq!(study(&told), whole);
    assert_eq!(m.json("cut/study.json"), whole);
    // More seeds and controllers.
    let more = flags.replace("none,random,ppo --seeds 2", "none,random,ppo,heuristic --seeds 3");
    let longer = study(&eval(&m, &format!("{more} cut")));
    // In a moved study, the learned policies are at other paths.
    std::fs::rename(m.path("whole"), m.path("moved")).unwrap();
    assert_eq!(study(&eval(&m, &format!("{flags} moved"))), whole);
    assert_eq!(study(&eval(&m, &format!("{more} moved"))), longer);
    assert_eq!(complete.map(events), before);
    assert_eq!(longer["contenders"][1]["runs"][1], whole["contenders"][1]["runs"][1]);
    assert_eq!(longer["contenders"][3]["runs"].as_array().unwrap().len(), 3);
    // Runs of a build whose kernels round differently are kept, with a warning.
    let (warning, file) = ("round differently", "cut/seed-1000/1-none/summary.json");
    assert!(!told.stderr.contains(warning), "{}", told.stderr);
    let mut older = m.json(file);
    assert!(older["computed"][0]["rounding"].take().is_u64());
    older["computed"][0]["rounding"] = 0.into();
    older["v"] = 1.into();
    std::fs::write(m.path(file), older.to_string()).unwrap();
    let warned = eval(&m, &format!("{flags} cut"));
    assert_eq!(warned.stderr.matches(warning).count(), 1, "{}", warned.stderr);
    assert_eq!(study(&warned), whole);
    // Another instruction set would round differently.
    let mut portable = m.command();
    portable.args(["control", "eval"]).args(flags.split_whitespace()).arg("cut");
    let refused = command_output(output(portable.env("MERISTEM_ISA", "portable")));
    let flat = refused.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    let was = m.json("cut/seed-1000/1-none/summary.json")["instruction_set"].clone();
    if was == "portable" {
        assert_eq!(refused.code, Some(0), "{flat}");
    } else {
        let expected = "cannot resume cut/seed-1000/1-none: the instruction set";
        assert!(flat.contains(expected), "{flat}");
    }
}

/// A comparison continues only with the script of its complete runs.
#[test]
fn a_study_with_another_script_is_refused() {
    let m = Meristem::new();
    let script = m.path("s.jsonl");
    std::fs::write(&script, "{\"step\":0,\"op\":\"WAIT\"}\n").unwrap();
    let command = "control eval --controllers none,fixed:s.jsonl --run-dir st --preset quick \
                   --envs 1 --steps 1 --max-batches 1 --host minimal --quiet --seeds";
    m.ok(&format!("{command} 1"));
    let begun = std::fs::read(&script).unwrap();
    let line = "{\"step\":0,\"op\":\"GERMINATE\",\"slot\":\"r0c1\",\"blueprint\":\"norm\"}\n";
    std::fs::write(&script, line).unwrap();
    m.fails(&format!("{command} 2"), 2, &["s.jsonl", "checksum"]);
    std::fs::write(&script, begun).unwrap();
    m.ok(&format!("{command} 2"));
}

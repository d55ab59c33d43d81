//! `meristem growth bench`: the table, its continuation after kills, filters and errors.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::Value;

use crate::common::process::Process;
use crate::common::{Meristem, assert_documented, figure};

/// A bench of one task with two rates, of which the heuristic's runs grow modules.
const SPIRALS: &str = "growth bench --suite quick --tasks spirals --rates 0.1,0.3 --seeds 2";

/// The table without seconds, the only numbers that differ between two benches.
fn without_seconds(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let kept = map.iter().filter(|(key, _)| *key != "seconds" && *key != "crc32");
            kept.map(|(key, value)| (key.clone(), without_seconds(value))).collect()
        }
        Value::Array(items) => items.iter().map(without_seconds).collect(),
        other => other.clone(),
    }
}

/// The report of a method on the first task.
fn method<'a>(table: &'a Value, name: &str) -> &'a Value {
    let methods = table["tasks"][0]["methods"].as_array().unwrap();
    methods.iter().find(|own| own["method"] == name).unwrap()
}

/// Rates are chosen by the control score on the tuning seeds, the table has the runs with these
/// rates, and every number is that of a run of `train`.
#[test]
fn each_method_has_its_best_rate_on_other_seeds_than_those_of_the_table() {
    let m = Meristem::new();
    let told = m.ok(&format!("{SPIRALS} --run-dir bench --json --quiet"));
    let table: Value = serde_json::from_str(&told.stdout).unwrap();
    assert_documented("## growth.json", &table);
    assert_eq!(without_seconds(&table), without_seconds(&m.json("bench/growth.json")));
    assert_eq!((&table["status"], &table["suite"]), (&"completed".into(), &"quick".into()));
    let seeds = |key: &str| table[key].as_array().unwrap().clone();
    assert!(seeds("seeds").iter().all(|seed| !seeds("tuning_seeds").contains(seed)));
    for own in table["tasks"][0]["methods"].as_array().unwrap() {
        let name = own["method"].as_str().unwrap();
        let summary = |lr: &Value, seed: &Value| {
            m.json(&format!("bench/spirals/seed-{seed}/{name}-lr{lr}/summary.json"))
        };
        let mut best = f64::NEG_INFINITY;
        for rate in own["tuning"].as_array().unwrap() {
            let env = &summary(&rate["lr"], &500.into())["envs"][0];
            assert_eq!(rate["control_score"], env["control_accuracy"], "{name}");
            best = best.max(figure(&rate["control_score"]));
        }
        let is_best = |rate: &&Value| figure(&rate["control_score"]) == best;
        let chosen = own["tuning"].as_array().unwrap().iter().find(is_best).unwrap();
        assert_eq!(chosen["lr"], own["lr"], "{name}");
        let runs = own["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 2, "{name}");
        for run in runs {
            let summary = summary(&own["lr"], &run["seed"]);
            assert_eq!(run["test_score"], summary["envs"][0]["test_accuracy"], "{name}");
            let parameters = figure(&summary["envs"][0]["parameters"]);
            assert_eq!(figure(&run["parameters"]), parameters, "{name}");
            let of_training = figure(&summary["training_flops"]);
            let flops = of_training + figure(&summary["counterfactual_cost"]["flops"]);
            assert_eq!(figure(&run["macs"]), flops / 2.0, "{name}");
        }
        let difference = own["difference_pp"].get("none");
        let mean = difference.map_or(0.0, |difference| figure(&difference["mean"]));
        let [score, bare] =
            [own, method(&table, "none")].map(|own| figure(&own["test_score"]["mean"]));
        // Percentages of a few roundings of 1.1e-16 each.
        assert!((mean - 100.0 * (score - bare)).abs() < 1e-10, "{name}");
    }
    // The fixed network has the modules of the heuristic's with the same seed.
    let of_run =
        |name: &str, place: usize, key: &str| method(&table, name)["runs"][place][key].clone();
    let mut grown = 0;
    for place in [0, 1] {
        for name in ["static", "static-compute"] {
            assert_eq!(
                of_run(name, place, "modules"),
                of_run("heuristic", place, "modules"),
                "{name}"
            );
        }
        grown += of_run("heuristic", place, "modules")[0].as_array().unwrap().len();
        let [grown, fixed, brief] = ["heuristic", "static", "static-compute"]
            .map(|name| figure(&of_run(name, place, "macs")));
        // A step of the fixed network costs a twelfth of its twelve steps, and steps are rounded.
        assert!((brief - grown).abs() <= 0.5001 * fixed / 12.0, "{brief} {grown} {fixed}");
    }
    assert!(grown > 0, "nothing has grown");
    for place in [0, 1] {
        let [wide, fixed, bare] = ["width", "static-width", "none"]
            .map(|name| figure(&of_run(name, place, "parameters")));
        assert!(wide == fixed && fixed > bare, "{wide} {fixed} {bare}");
    }
    // A run equals a run of `train` with the same settings.
    let heuristic = method(&table, "heuristic");
    let rate = &heuristic["lr"];
    let run = format!("bench/spirals/seed-1001/heuristic-lr{rate}");
    m.ok(&format!("train --config {run}/config.toml --run-dir alone --quiet"));
    let weights = "weights/env-0.safetensors";
    assert_eq!(m.bytes(&format!("alone/{weights}")), m.bytes(&format!("{run}/{weights}")));
    let config = String::from_utf8(m.bytes("alone/config.toml")).unwrap();
    assert!(config.contains("module_lr = \"host\""), "modules have the rate, too");
    let page = String::from_utf8(m.bytes("bench/growth.md")).unwrap();
    assert!(page.contains("| method | rate | seeds | test accuracy, % | over none |"), "{page}");
    let plot = String::from_utf8(m.bytes("bench/spirals.svg")).unwrap();
    assert_eq!(
        plot.matches("r=\"3\"").count(),
        3 * 12 * 2,
        "three panels, twelve methods, two seeds"
    );
}

/// Whatever the moment of a kill, the same command continues to the same table, with any number of
/// threads. Methods may be added, and the folder may be moved.
#[test]
fn a_killed_bench_continues_to_the_same_table() {
    let m = Meristem::new();
    m.ok(&format!("{SPIRALS} --run-dir whole --quiet --threads 1"));
    let whole = m.json("whole/growth.json");
    let filtered = format!("{SPIRALS} --methods random-order --run-dir parts");
    // Two methods, each with two rates on one seed, and two seeds of the table.
    for until in ["run 2 of 8", "run 5 of 8", "run 8 of 8"] {
        let mut command = m.command();
        command.args(filtered.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = Process::start(&mut command);
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().starts_with(until)), "{until}");
        child.kill().unwrap();
        child.output();
    }
    m.ok(&filtered);
    let few = m.json("parts/growth.json");
    assert_eq!(few["status"], "completed");
    assert_eq!(few["tasks"][0]["methods"].as_array().unwrap().len(), 2, "with the heuristic");
    std::fs::rename(m.path("parts"), m.path("moved")).unwrap();
    let told = m.ok(&format!("{SPIRALS} --run-dir moved --threads 2"));
    assert!(told.stderr.contains("heuristic, lr 0.1 with seed 500, complete"), "{}", told.stderr);
    assert_eq!(without_seconds(&m.json("moved/growth.json")), without_seconds(&whole));
    // A bench with more seeds has the runs of the first.
    m.ok(&format!("{} --run-dir moved --quiet", SPIRALS.replace("--seeds 2", "--seeds 3")));
    let more = m.json("moved/growth.json");
    for name in ["none", "static-compute"] {
        let runs = |table: &Value| method(&without_seconds(table), name)["runs"].clone();
        assert_eq!(
            runs(&more).as_array().unwrap()[..2],
            runs(&whole).as_array().unwrap()[..],
            "{name}"
        );
    }
}

#[test]
fn rates_are_chosen_on_as_many_seeds_as_wanted() {
    let m = Meristem::new();
    let run = SPIRALS.replace("--seeds 2", "--seeds 1 --methods none --quiet --run-dir");
    m.ok(&format!("{run} one"));
    m.ok(&format!("{run} three --tuning-seeds 3"));
    let (one, three) = (m.json("one/growth.json"), m.json("three/growth.json"));
    assert_eq!(one["tuning_seeds"], serde_json::json!([500]));
    assert_eq!(three["tuning_seeds"], serde_json::json!([500, 501, 502]));
    let score = |seed: u64| {
        let summary = m.json(&format!("three/spirals/seed-{seed}/none-lr0.1/summary.json"));
        figure(&summary["envs"][0]["control_accuracy"])
    };
    let mean = (score(500) + score(501) + score(502)) / 3.0;
    let told = figure(&method(&three, "none")["tuning"][0]["control_score"]);
    assert!((told - mean).abs() < 1e-12, "{told} {mean}");
}

/// Training with an absurd rate fails, which costs the method this rate and nothing else.
#[test]
fn a_rate_with_which_training_fails_is_not_chosen() {
    let m = Meristem::new();
    let flags = "growth bench --suite quick --tasks spirals --methods static --seeds 1 --quiet \
                 --set clip-norm=off --set governor_failures_max=1";
    m.ok(&format!("{flags} --rates 0.1,1000000 --run-dir both"));
    let table = m.json("both/growth.json");
    for name in ["heuristic", "static"] {
        let own = method(&table, name);
        assert_eq!(own["tuning"][1]["control_score"], Value::Null, "{name}");
        assert_eq!(own["lr"], 0.1, "{name}");
    }
    assert_eq!(table["settings"]["clip_norm"], "off");
    m.ok(&format!("{flags} --rates 0.1,1000000 --run-dir both"));
    assert_eq!(without_seconds(&m.json("both/growth.json")), without_seconds(&table), "again");
    m.ok(&format!("{flags} --rates 100000,1000000 --run-dir none"));
    let table = m.json("none/growth.json");
    assert_eq!(method(&table, "heuristic")["lr"], Value::Null);
    assert_eq!(method(&table, "static")["runs"], Value::Array(vec![]));
    let page = String::from_utf8(m.bytes("none/growth.md")).unwrap();
    assert!(page.contains("- heuristic: training failed with all rates."), "{page}");
}

/// Errors in the request are found before the folder is made, and a folder of something else stays
/// as it is.
#[test]
fn invalid_benches_are_refused_before_the_first_run() {
    let m = Meristem::new();
    std::fs::create_dir(m.path("mine")).unwrap();
    std::fs::write(m.path("mine/thesis.tex"), "mine").unwrap();
    for (flags, words) in [
        ("--suite smal", "did you mean `small`?"),
        ("--tasks cifar10", "one of spirals | mnist1d"),
        ("--tasks spirals,spirals", "each name once"),
        ("--methods heuristics", "did you mean `heuristic`?"),
        ("--methods dropout", "one of none | large | script"),
        ("--seeds 0", "`seeds`: got 0, expected 1 to 10000"),
        ("--tuning-seeds 0", "`tuning_seeds`: got 0, expected 1 to 500"),
        ("--tuning-seeds 501", "`tuning_seeds`: got 501, expected 1 to 500"),
        ("--rates 0.3,0.1", "in increasing order"),
        ("--rates 0,1", "above 0"),
        ("--rates nan", "above 0"),
        ("--set steps", "KEY=VALUE"),
        ("--set stepz=3", "did you mean `steps`?"),
        ("--set steps=0", "`steps`: got 0"),
        ("--set lr=0.1", "does not decide"),
        ("--set seed=1", "does not decide"),
        ("--set folds=3", "does not decide"),
        ("--set comm=mpi", "does not decide"),
        ("--data-root x", "no task of the bench reads files"),
        ("--suite full", "`data-root`: got none, expected the folder of cifar10"),
        ("--suite full --data-root nowhere", "nowhere"),
        ("--run-dir mine", "the run folder mine exists"),
    ] {
        let suite = if flags.contains("--suite") { "" } else { "--suite quick" };
        let folder = if flags.contains("--run-dir") { "" } else { "--run-dir new" };
        let told = m.run(&format!("growth bench {suite} {folder} {flags}"));
        assert_ne!(told.code, Some(0), "{flags}");
        let flat = told.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.starts_with("error: ") && flat.contains(words), "{flags}\n{flat}");
        assert!(!flat.contains("run 1 of") && !flat.contains("panicked"), "{flags}\n{flat}");
        assert!(!m.path("new/spirals").exists(), "{flags}");
    }
    let few =
        "growth bench --tasks spirals --methods none --seeds 1 --rates 0.1 --run-dir bench --quiet";
    // As a bench that was killed when it began may leave its folder.
    std::fs::create_dir(m.path("bench")).unwrap();
    m.ok(&format!("{few} --suite quick"));
    let before = m.bytes("bench/growth.json");
    m.ok("runs verify bench");
    let changed = String::from_utf8(before.clone()).unwrap().replace("completed", "interrupted");
    std::fs::write(m.path("bench/growth.json"), changed).unwrap();
    let told = m.run("runs verify bench");
    assert!(told.code == Some(1) && told.stdout.contains("growth.json"), "{}", told.stdout);
    std::fs::write(m.path("bench/growth.json"), &before).unwrap();
    m.fails(
        &format!("{few} --suite small"),
        2,
        &["it has the suite quick, but small was requested"],
    );
    m.fails(
        &format!("{few} --suite quick --set momentum=0.5"),
        2,
        &["momentum = 0.9", "momentum = 0.5"],
    );
    assert_eq!(m.bytes("bench/growth.json"), before);
    std::fs::write(m.path("bench/growth.json"), "{").unwrap();
    m.fails(&format!("{few} --suite quick"), 2, &["growth.json cannot be read"]);
    assert_eq!(m.bytes("bench/growth.json"), b"{");
}

/// Ctrl-C ends the bench with the complete runs.
#[cfg(unix)]
#[test]
fn ctrl_c_keeps_complete_runs() {
    let m = Meristem::new();
    let mut command = m.command();
    command.args("growth bench --suite quick --tasks mnist1d --rates 0.1 --seeds 9000".split(' '));
    command.args(["--methods", "none,large"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Process::start(&mut command);
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().starts_with("run 6 of")));
    let kill = ["-INT", &child.id().to_string()];
    assert!(std::process::Command::new("kill").args(kill).status().unwrap().success());
    assert!(lines.map(Result::unwrap).any(|line| line.contains("stopping after this step")));
    let told = crate::common::command_output(child.output());
    assert_eq!(told.code, Some(3));
    assert!(told.stdout.contains("Not complete"), "{}", told.stdout);
    let table = m.json("growth-quick/growth.json");
    assert_eq!(table["status"], "interrupted");
    assert!(method(&table, "none")["test_score"]["count"].as_u64().unwrap() >= 1);
}

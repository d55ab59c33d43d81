//! Bad input: error, remedy and exit code (U6). No case leaves a run folder.

use meristem::nn::safetensors::load;

use crate::common::process::output;
use crate::common::runs::save;
use crate::common::{Meristem, TINY};

#[test]
fn an_unknown_flag_is_an_error_with_the_nearest_name() {
    let m = Meristem::new();
    m.fails("train --bacth 3", 2, &["--bacth", "--batch"]);
    m.fails("trian", 2, &["trian", "train"]);
    m.fails("data paln", 2, &["paln", "plan"]);
    m.fails("train --preset quik", 2, &["quik", "did you mean `quick`"]);
    m.fails("train --controller heuristics", 2, &["did you mean `heuristic`"]);
    m.fails("train --augment flop", 2, &["did you mean `flip`"]);
    m.fails("train --dataset cifar-10", 2, &["did you mean `cifar10`"]);
    m.fails("train --host basline", 2, &["did you mean `baseline`"]);
    m.fails("train --host cnn:chanels=4", 2, &["chanels", "channels"]);
    m.fails("train --slots r0c9", 2, &["r0c9", "r0c2"]);
    m.fails("train --devices gpu", 2, &["gpu", "cpu"]);
    m.fails("eval --weights x --split tset", 2, &["tset", "train or test"]);
    assert_eq!(std::fs::read_dir(m.folder.path()).unwrap().count(), 0);
}

#[test]
fn zero_and_huge_sizes_are_errors_with_the_valid_range() {
    let m = Meristem::new();
    for flag in ["batch", "envs", "steps", "rounds", "max-batches"] {
        m.fails(&format!("train --{flag} 0"), 2, &[&format!("`{flag}`: got 0, expected 1")]);
    }
    m.fails("train --batch 99999999", 2, &["`batch`", "65536"]);
    m.fails("train --envs -1", 2, &["--envs"]);
    m.fails("train --lr nan", 2, &["`lr`: got NaN"]);
    m.fails("train --lr -0.1", 2, &["-0.1"]);
    m.fails("train --momentum 1", 2, &["`momentum`"]);
    m.fails("train --control-split 1.5", 2, &["`control-split`", "0.9"]);
    m.fails("train --control-split 0", 2, &["`control-split`", "controller"]);
    m.fails("train --control-split 0.00001", 2, &["`control-split`"]);
    m.fails("train --envs 1 --devices cpu,cpu:1", 2, &["`devices`", "at most 1"]);
    m.fails("train --threads 1000000", 2, &["`threads`"]);
    m.fails("train --data-budget lots", 2, &["lots", "64MiB"]);
    m.fails("train --host cnn:channels=0", 2, &["channels"]);
    m.fails("train --host cnn:channels=4000,blocks=12", 2, &["channels"]);
    m.fails("train --export gone/w.safetensors", 2, &["`export`", "existing folder"]);
    m.fails(
        "data plan --len 50 --batch 0 --devices cpu",
        2,
        &["`batch`: got 0, expected at least 1"],
    );
    let plan = "data plan --len 50 --batch 5 --devices cpu --max-batches 0";
    m.fails(plan, 2, &["`max-batches`: got 0, expected at least 1"]);
    m.fails("data plan --len 50 --batch 5 --devices cuda:x", 2, &["cuda:x"]);
    m.fails("bench host --envs 0", 2, &["`envs`: got 0, expected 1"]);
    m.fails("bench gather --batch 0", 2, &["`batch`: got 0, expected 1"]);
    assert_eq!(std::fs::read_dir(m.folder.path()).unwrap().count(), 0);
}

#[test]
fn the_error_for_a_host_too_deep_for_the_image_has_the_limit() {
    let m = Meristem::new();
    let what = ["too deep", "1×28×28", "try `--host cnn:channels=8,blocks=5,kernel=3,pools=4`"];
    m.fails("train --host deep --run-dir run", 2, &what);
    assert!(!m.path("run").exists());
}

#[test]
fn configuration_files_are_strict() {
    let m = Meristem::new();
    let file = |name: &str, text: &str| std::fs::write(m.path(name), text).unwrap();
    file("key.toml", "bacth = 3\n");
    m.fails("train --config key.toml", 2, &["key.toml", "`bacth`", "did you mean `batch`"]);
    file("key.json", r#"{"learning_rate": 0.1}"#);
    m.fails("train --config key.json", 2, &["key.json", "`learning_rate`", "known keys"]);
    file("type.toml", "batch = \"big\"\n");
    m.fails("train --config type.toml", 2, &["type.toml", "line 1", "batch"]);
    file("value.toml", "batch = 0\n");
    m.fails("train --config value.toml", 2, &["`batch`: got 0"]);
    file("broken.json", "{\"batch\": 3");
    m.fails("train --config broken.json", 2, &["broken.json"]);
    m.fails("train --config gone.toml", 2, &["gone.toml", "cannot be read"]);
    // A flag overrides the file.
    file("good.json", r#"{"batch": 0, "host": "minimal", "controller": "none"}"#);
    m.ok("train --config good.json --batch 16 --max-batches 1 --steps 1 --run-dir run --quiet");
}

/// Arguments without an effect are errors or notes.
#[test]
fn arguments_without_effect_are_reported() {
    let m = Meristem::new();
    m.fails("train --config a.toml --config b.toml", 2, &["--config", "multiple times"]);
    m.fails("train --resume a --resume b", 2, &["--resume", "multiple times"]);
    let twice = m.ok("train --batch 8 --batch 16 --seed 3 --seed 3 --print-config");
    assert_eq!(twice.stderr, "note: --batch was given more than once; the value 16 is used\n");
    assert!(twice.stdout.contains("\nbatch = 16\n"), "{}", twice.stdout);
    let lines = [
        r#"{"step": 99, "op": "WAIT"}"#,
        r#"{"step": 0, "env": 7, "op": "WAIT"}"#,
        r#"{"step": 2, "env": 0, "op": "WAIT"}"#,
        r#"{"step":3,"op":"GERMINATE","slot":"r0c0","blueprint":"norm","then":"FOSSILIZE"}"#,
    ];
    std::fs::write(m.path("script.jsonl"), lines.join("\n")).unwrap();
    let run = "train --host minimal --envs 1 --max-batches 1 --batch 8 --controller \
               fixed:script.jsonl --lr-warmup 4";
    let said = m.ok(&format!("{run} --steps 3 --run-dir short"));
    for words in [
        "warning: lines of the action script of controller fixed:script.jsonl never act: 1, 2, 4; \
         steps count from 0 to 2, the envs with this controller are 0\n",
        "warning: --lr-warmup 4 is longer than the 3 steps of an episode",
    ] {
        assert!(said.stderr.contains(words), "{}", said.stderr);
    }
    std::fs::write(m.path("script.jsonl"), lines[2]).unwrap();
    let said = m.ok(&format!("{run} --steps 4 --run-dir long"));
    assert!(!said.stderr.contains("warning"), "{}", said.stderr);
}

#[test]
fn run_folders_are_never_overwritten() {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --run-dir run --quiet"));
    let before = m.bytes("run/summary.json");
    m.fails(&format!("train {TINY} --run-dir run"), 2, &["run", "exists", "--run-dir"]);
    assert_eq!(before, m.bytes("run/summary.json"));
    std::fs::write(m.path("file"), "x").unwrap();
    m.fails(&format!("train {TINY} --run-dir file"), 2, &["exists"]);
    m.fails(&format!("train {TINY} --run-dir file/run"), 1, &["file/run", "cannot create"]);
    if std::path::Path::new("/proc/self").exists() {
        // Not writable for anyone, including root.
        m.fails(&format!("train {TINY} --run-dir /proc/run"), 1, &["/proc/run", "cannot create"]);
    }
}

#[test]
fn errors_of_missing_and_damaged_datasets_have_the_expected_contents() {
    let m = Meristem::new();
    m.fails("train --dataset cifar10", 2, &["--data-root", "data_batch_1.bin", "cs.toronto.edu"]);
    let train = |flags: &str| format!("train {TINY} --run-dir run --data-root data {flags}");
    m.fails(&train("--dataset cifar10"), 1, &["not in data", "data_batch_1.bin"]);
    let folder = m.path("data");
    std::fs::create_dir(&folder).unwrap();
    m.fails(&train("--dataset cifar10"), 1, &["data_batch_1.bin", "cs.toronto.edu"]);
    m.fails(&train("--dataset folder"), 1, &["train/CLASS"]);

    let record = |label: u8| [vec![label], vec![100; 3072]].concat();
    let batch: Vec<u8> = (0..10).flat_map(record).collect();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.join(name), bytes).unwrap();
    for name in 1..=5 {
        write(&format!("data_batch_{name}.bin"), &batch);
    }
    write("test_batch.bin", &batch);
    m.ok(&format!("{} --quiet --batch 8", train("--dataset cifar10")));
    std::fs::remove_dir_all(m.path("run")).unwrap();
    write("data_batch_3.bin", &batch[..batch.len() - 5]);
    m.fails(&train("--dataset cifar10"), 1, &["data_batch_3.bin", "byte 30725"]);
    let mut wrong = batch.clone();
    wrong[3073 * 4] = 10;
    write("data_batch_3.bin", &wrong);
    m.fails(&train("--dataset cifar10"), 1, &["data_batch_3.bin", "byte 12292", "got 10"]);
    let said = m.run("data verify --dataset cifar10 --data-root data");
    assert_eq!(said.code, Some(1), "{}{}", said.stdout, said.stderr);
    assert!(!m.path("run").exists());
}

/// A `--data-root` that no dataset uses is an error.
#[test]
fn a_data_root_without_its_dataset_is_refused() {
    let m = Meristem::new();
    std::fs::create_dir(m.path("data")).unwrap();
    let record = [vec![3], vec![100; 3072]].concat();
    for name in ["1", "2", "3", "4", "5"] {
        std::fs::write(m.path(&format!("data/data_batch_{name}.bin")), &record).unwrap();
    }
    std::fs::write(m.path("data/test_batch.bin"), &record).unwrap();
    m.ok(&format!("train {TINY} --run-dir run --quiet"));
    let words = ["`data-root`: got data", "`--dataset cifar10` fits the files there"];
    for command in ["data verify", "eval --weights run/weights/env-0.safetensors"] {
        m.fails(&format!("{command} --data-root data"), 2, &words);
    }
    m.fails(&format!("train {TINY} --data-root data --run-dir other"), 2, &words);
    assert!(!m.path("other").exists());
    m.fails("data verify --data-root run", 2, &["no dataset fits the files there"]);
    // Without --dataset, `data info` searches for all datasets.
    let known: serde_json::Value =
        serde_json::from_str(&m.ok("data info --data-root data --json").stdout).unwrap();
    assert_eq!((&known[2]["dataset"], &known[2]["found"]), (&"cifar10".into(), &true.into()));
}

#[test]
fn messages_match_their_causes() {
    let m = Meristem::new();
    let words = ["`init`: got gone.safetensors", "an existing weights file"];
    m.fails(&format!("train {TINY} --init gone.safetensors --run-dir run"), 2, &words);
    std::fs::write(m.path("long.toml"), format!("host = \"{}", "x".repeat(100_000))).unwrap();
    let said =
        m.fails("train --config long.toml --run-dir run", 2, &["long.toml", "more characters)"]);
    assert!(said.stderr.len() < 10_000, "{}", said.stderr.len());
    assert!(!m.path("run").exists());
    let told = m.ok(&format!("train {TINY} --devices cpu:1 --threads 1 --run-dir run")).stdout;
    assert!(told.contains("on cpu:1 with 1 thread,"), "{told}");
    assert_eq!(m.ok("help train").stdout, m.ok("train --help").stdout);
}

/// The width in a policy file is compared with the tensors before memory is allocated for it.
#[test]
fn a_policy_file_of_a_huge_width_is_an_error() {
    let m = Meristem::new();
    let learn = format!("train {TINY} --controller ppo --rounds 1 --policy-hidden 8 --quiet");
    m.ok(&format!("{learn} --run-dir run"));
    let (state, mut metadata) = load(&m.path("run/policy.safetensors")).unwrap();
    metadata.insert("hidden".into(), "1000000000".into());
    save(&m.path("wide.safetensors"), &state, &metadata);
    let run = format!("train {TINY} --controller ppo --policy wide.safetensors --run-dir other");
    m.fails(&run, 2, &["wide.safetensors", "`hidden` of 1000000000"]);
    // A policy that needs too much memory for any machine: the remedy is a smaller policy.
    let run = format!("{learn} --device-memory 40MiB --policy-hidden 4096 --run-dir other");
    let said = m.run(&run);
    assert!(said.code == Some(1) || said.code == Some(2), "{}", said.stderr);
    assert!(!said.stderr.contains("fewer --envs"), "{}", said.stderr);
}

#[test]
fn an_env_that_diverges_ends_the_run_with_a_readable_folder() {
    let m = Meristem::new();
    m.fails(
        &format!("train {TINY} --lr 1000000 --momentum 0.99 --weight-decay 1000 --run-dir run"),
        1,
        &["diverged", "lower --lr"],
    );
    let summary = m.json("run/summary.json");
    assert_eq!(summary["status"], "failed");
    assert!(summary["error"].as_str().unwrap().contains("diverged"));
    let events = m.events("run");
    assert_eq!(events[events.len() - 1]["status"], "failed");
    assert!(!crate::common::of_kind(&events, "anomaly").is_empty());
}

/// Runs a command with an environment variable set.
fn with_variable(
    m: &Meristem,
    name: &str,
    value: &str,
    arguments: &str,
) -> crate::common::CommandOutput {
    let arguments: Vec<&str> = arguments.split_whitespace().collect();
    crate::common::command_output(output(m.command().env(name, value).args(arguments)))
}

#[test]
fn environment_variables_are_strict() {
    let m = Meristem::new();
    let run = format!("train {TINY} --run-dir run --quiet");
    for (name, value, words) in [
        ("MERISTEM_LOG", "meristem=loud", "got `meristem=loud`"),
        ("MERISTEM_LOG", "dbug", "got `dbug`, expected a level"),
        ("MERISTEM_LOG", "meristem[run]=debug", "expected a level"),
        ("MERISTEM_ISA", "avx3", "`avx3` is not an instruction set; this machine has portable"),
        ("MERISTEM_LAUNCH_BLOCKING", "yes", "expected 0 or 1, got `yes`"),
        ("MERISTEM_LGO", "debug", "did you mean MERISTEM_LOG?"),
        ("MERISTEM_ZZZZZZZZZZZZZZZZZZZ", "1", "the known variables are MERISTEM_CACHE"),
    ] {
        let said = with_variable(&m, name, value, &run);
        let flat = said.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.code == Some(2) && flat.starts_with("error: "), "{name}: {}", said.stderr);
        assert!(flat.contains(words), "{name}: {}", said.stderr);
        assert!(!m.path("run").exists(), "{name}");
    }
}

#[test]
fn exit_codes_are_the_same_in_help_and_documents() {
    let help = Meristem::new().ok("--help").stdout;
    let page = include_str!("../../../../docs/commands.md");
    let listed = help.split("Exit codes:").nth(1).unwrap();
    for code in ["0", "1", "2", "3", "129, 130, 143"] {
        let line = listed.lines().find(|line| line.starts_with(&format!("  {code} ")));
        assert!(line.is_some(), "{code}: {listed}");
        assert!(page.contains(&format!("| {code} | ")), "{code}");
    }
}

/// All variables that the program reads are in its help and accepted, except those of the stand-in
/// for the CUDA driver.
#[test]
fn every_variable_that_is_read_is_documented() {
    let m = Meristem::new();
    let help = m.ok("--help").stdout;
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = std::collections::BTreeSet::new();
    let mut folders: Vec<_> =
        std::fs::read_dir(crates).unwrap().map(|e| e.unwrap().path().join("src")).collect();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.extend(variables(&std::fs::read_to_string(path).unwrap()));
            }
        }
    }
    assert!(found.len() >= 3, "{found:?}");
    for name in found.into_iter().filter(|name| !name.starts_with("MERISTEM_STANDIN_")) {
        assert!(help.contains(&name), "{name} is not in --help");
        let said = with_variable(&m, &name, "", "data info");
        assert_eq!(said.code, Some(0), "{name}: {}", said.stderr);
    }
}

/// Names of variables among the string literals of a source.
fn variables(source: &str) -> Vec<String> {
    let names = source.split('"').filter(|text| text.strip_prefix("MERISTEM_").is_some());
    let plain = |c: char| c.is_ascii_uppercase() || c == '_';
    names
        .filter(|n| n.len() > "MERISTEM_".len() && n.chars().all(plain))
        .map(String::from)
        .collect()
}

#[test]
fn the_placement_log_has_the_devices_of_tensors() {
    let m = Meristem::new();
    let run = format!("train {TINY} --steps 1 --run-dir run --quiet");
    let said = with_variable(&m, "MERISTEM_LOG", "off, meristem::placement=debug,", &run);
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    let line = said.stderr.lines().find(|line| line.contains("train_step")).unwrap();
    for words in
        ["DEBUG", "meristem::placement", "f32 [32, 1, 28, 28] channels last on cpu, stream `env 0`"]
    {
        assert!(line.contains(words), "`{words}` is not in:\n{line}");
    }
    assert!(said.stderr.lines().all(|line| line.contains("meristem::placement")));
    assert!(said.stderr.contains("operation=\"read_back\""));
}

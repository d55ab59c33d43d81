//! `meristem runs`: lists, comparisons and reports of runs, sound and damaged.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

use crate::common::process::{Process, wait_for};
use crate::common::runs::without_checksums;
use crate::common::{Meristem, TINY, command_output, on_a_terminal};

const GROWN: &str = "train --host minimal --envs 2 --steps 8 --max-batches 4 --batch 32 \
                     --controller fixed:grow.jsonl --quiet";

const SCRIPT: &str = r#"{"step": 0, "op": "GERMINATE", "slot": "r0c1", "blueprint": "conv_light"}
{"step": 1, "op": "ADVANCE", "slot": "r0c1"}
"#;

/// Trains `runs/grown`, with a module in slot r0c1.
fn grown(m: &Meristem, flags: &str) {
    fs::write(m.path("grow.jsonl"), SCRIPT).unwrap();
    m.ok(&format!("{GROWN} {flags} --run-dir runs/grown"));
}

/// Two complete runs, `runs/none` and `runs/grown`.
fn two_runs() -> Meristem {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --control-split 0.1 --quiet --run-dir runs/none"));
    grown(&m, "");
    m
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to.join("weights")).unwrap();
    for name in ["config.toml", "events.jsonl"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
}

fn row<'a>(listed: &'a Value, name: &str) -> &'a Value {
    let rows = listed["runs"].as_array().unwrap();
    let found = rows.iter().find(|row| row["run"].as_str().unwrap().ends_with(name));
    found.unwrap_or_else(|| panic!("{name}: {listed}"))
}

#[test]
fn runs_in_every_state_are_listed() {
    let m = two_runs();
    let [none, grown] = ["runs/none", "runs/grown"].map(|name| m.path(name));
    // Killed in the middle of a line.
    copy(&grown, &m.path("runs/torn"));
    let events = fs::read(grown.join("events.jsonl")).unwrap();
    fs::write(m.path("runs/torn/events.jsonl"), &events[..events.len() / 2]).unwrap();
    // Damaged, foreign, from a newer version, empty.
    copy(&none, &m.path("runs/zeros"));
    fs::write(m.path("runs/zeros/events.jsonl"), [0; 5000]).unwrap();
    fs::write(m.path("runs/zeros/summary.json"), "{\"v\": 1").unwrap();
    copy(&none, &m.path("runs/newer"));
    let summary = fs::read_to_string(none.join("summary.json")).unwrap();
    let newer = without_checksums(&summary).replacen("\"v\": 1", "\"v\": 9", 1);
    fs::write(m.path("runs/newer/summary.json"), newer).unwrap();
    fs::create_dir_all(m.path("runs/foreign/deep")).unwrap();
    fs::write(m.path("runs/foreign/deep/events.jsonl"), "hello\n\u{1b}[31m\n").unwrap();
    fs::write(m.path("runs/foreign/deep/config.toml"), "controller = \"\\u001b[2J\"").unwrap();
    fs::create_dir(m.path("runs/empty")).unwrap();
    fs::write(m.path("runs/note.txt"), "x").unwrap();

    let listed: Value = serde_json::from_str(&m.ok("runs --json").stdout).unwrap();
    assert_eq!(listed["runs"].as_array().unwrap().len(), 6, "{listed}");
    let complete = row(&listed, "grown");
    assert_eq!(
        (&complete["state"], &complete["steps"]),
        (&"complete".into(), &[8, 8].as_slice().into())
    );
    assert!(complete["test_accuracy"].as_f64().unwrap() > 0.0);
    let torn = row(&listed, "torn");
    assert_eq!(torn["state"], "killed");
    assert!(torn["controller"].as_str().unwrap().ends_with("grow.jsonl"), "{torn}");
    assert!(
        torn["control_accuracy"].as_f64().unwrap() > 0.0 && torn["problem"].is_null(),
        "{torn}"
    );
    let problem = |name: &str| row(&listed, name)["problem"].as_str().unwrap().to_string();
    assert!(problem("zeros").contains("summary.json: EOF while parsing"), "{listed}");
    assert!(problem("newer").contains("its format has version 9, this program reads version 2"));

    let text = m.ok("runs").stdout;
    for words in ["grown", "complete", "grow.jsonl", "8/8", "killed", "foreign/deep"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains('\u{1b}'), "a run steers the terminal: {text:?}");
    // For a run folder the list has one entry.
    assert!(m.ok("runs runs/grown").stdout.contains("runs/grown"));
    assert_eq!(m.ok("runs runs/empty").stdout, "no runs in runs/empty\n");
    m.fails("runs nowhere", 1, &["cannot read nowhere: there is no such folder", "help:"]);
}

#[test]
fn a_run_in_progress_is_running_and_can_still_be_resumed() {
    let m = Meristem::new();
    let long = "train --host minimal --envs 2 --steps 100000 --max-batches 2 --batch 8 \
                --controller none --control-split 0.1 --quiet --run-dir runs/long";
    let mut child = Process::start(m.command().args(long.split_whitespace()));
    wait_for("steps", || {
        let events = fs::read_to_string(m.path("runs/long/events.jsonl"));
        events.is_ok_and(|text| text.contains("step_completed"))
    });
    let state = || {
        let listed: Value = serde_json::from_str(&m.ok("runs --json").stdout).unwrap();
        row(&listed, "long")["state"].as_str().unwrap().to_string()
    };
    assert_eq!(state(), "running");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(state(), "killed");
}

#[test]
fn two_runs_are_compared() {
    let m = two_runs();
    // Names of folders in runs/ are accepted.
    let text = m.ok("runs compare none grown --plot curves.svg").stdout;
    for words in ["settings that differ", "controller", "grow.jsonl", "results", "8/8", "▁", "█"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    let svg = String::from_utf8(m.bytes("curves.svg")).unwrap();
    assert!(svg.matches("<polyline").count() >= 4 && svg.contains("1 none"), "{svg}");
    let compared = m.ok("runs compare none runs/grown --json").stdout;
    let compared: Value = serde_json::from_str(&compared).unwrap();
    assert_eq!(compared["settings"]["controller"][0], "none");
    assert!(compared["settings"]["host"].is_null(), "both have the same: {compared}");
    assert_eq!(compared["control_accuracy"][1].as_array().unwrap().len(), 8);
    m.fails("runs compare none", 2, &["2 values required"]);
    m.fails("runs compare none nowhere", 2, &["nowhere is not the folder of a run: there is no"]);
    m.fails("runs compare none grown --plot curves.svg", 2, &["would be overwritten"]);
}

#[test]
fn a_report_is_one_page_without_scripts() {
    let m = two_runs();
    let evil = "<script>alert(1)</script><img src=x onerror=alert(2)>";
    let copied = m.path("runs/<img src=x onerror=alert(3)>");
    copy(&m.path("runs/grown"), &copied);
    for name in ["config.toml", "events.jsonl"] {
        let text = without_checksums(&fs::read_to_string(copied.join(name)).unwrap());
        fs::write(copied.join(name), text.replace("r0c1", evil).replace("conv_light", evil))
            .unwrap();
    }
    let mut events = fs::OpenOptions::new().append(true).open(copied.join("events.jsonl")).unwrap();
    events
        .write_all(b"{\"v\":1,\"seq\":9999,\"seconds\":1,\"event\":\"comet_seen\"}\n{\"torn\":")
        .unwrap();
    let mut command = m.command();
    command.args(["runs", "report", "grown", "none", "--out", "page.html"]).arg(&copied);
    assert!(command.output().unwrap().status.success());
    let page = String::from_utf8(m.bytes("page.html")).unwrap();
    for words in [
        "Settings that differ",
        "Contributions of modules",
        "Stages over steps",
        "Network of env 0",
        "Chart: control accuracy",
        "1 of kinds that this version does not know",
        "&lt;script&gt;alert(1)",
        "prefers-color-scheme:dark",
        "default-src 'none'",
    ] {
        assert!(page.contains(words), "{words}");
    }
    for forbidden in ["<script", "<img", "<link", "http://", "https://", "src=\"", "url("] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    m.fails("runs report grown --out page.html", 2, &["`out`", "would be overwritten"]);
    m.fails(
        "runs report runs --out b.html",
        2,
        &["runs is not the folder of a run", "meristem runs"],
    );
    assert!(!m.path("b.html").exists());
    // Only events, without settings and summary.
    fs::create_dir(m.path("bare")).unwrap();
    fs::copy(m.path("runs/grown/events.jsonl"), m.path("bare/events.jsonl")).unwrap();
    m.ok("runs report bare --out bare.html");
}

/// Names, sizes and times of all files of a run.
fn files(folder: &Path) -> Vec<(std::path::PathBuf, u64, std::time::SystemTime)> {
    let mut found = vec![];
    let mut open = vec![folder.to_path_buf()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let (path, there) = entry.map(|e| (e.path(), e.metadata().unwrap())).unwrap();
            if there.is_dir() {
                open.push(path.clone());
            }
            found.push((path, there.len(), there.modified().unwrap()));
        }
    }
    found.sort();
    found
}

#[cfg(unix)]
#[test]
fn watching_a_run_does_not_change_its_folder() {
    let m = Meristem::new();
    grown(&m, "");
    let before = files(&m.path("runs"));
    for (size, line, words) in [
        ("rows 24 cols 80", "watch", ["grown", "complete", "fixed:", "conv_light", "incidents"]),
        ("rows 24 cols 80", "watch grown", ["8/8", "envs", "memory", "accuracy,", "loss"]),
        ("rows 5 cols 20", "watch grown", ["20×5", "small", "watch", "needs", "60×20"]),
    ] {
        let mut child = on_a_terminal(&m, size, line, Stdio::piped());
        child.stdin.as_mut().unwrap().write_all(b"jsr]q").unwrap();
        let said = command_output(child.output());
        assert_eq!(said.code, Some(0), "{}", said.stdout);
        for word in words {
            assert!(said.stdout.contains(word), "{word}: {:?}", said.stdout);
        }
        let [enters, leaves] =
            ["\u{1b}[?1049h", "\u{1b}[?1049l"].map(|code| said.stdout.contains(code));
        assert!(enters && leaves, "the screen of before is restored: {:?}", said.stdout);
    }
    assert_eq!(files(&m.path("runs")), before);
    m.fails("watch grown", 2, &["watch needs a terminal", "meristem runs"]);
}

#[test]
fn a_run_is_exported_as_csv() {
    let m = Meristem::new();
    grown(&m, "--log-batches");
    let table = |name: &str| -> Vec<Vec<String>> {
        let text = m.ok(&format!("export csv grown --table {name}")).stdout;
        text.lines().map(|line| line.split(',').map(String::from).collect()).collect()
    };
    let events = m.events("runs/grown");
    for (name, kind) in [("steps", "step_completed"), ("batches", "batch_completed")] {
        let (rows, events) = (table(name), crate::common::of_kind(&events, kind));
        assert_eq!(rows.len(), events.len() + 1, "{name}");
        for (row, event) in rows[1..].iter().zip(&events) {
            for (key, cell) in rows[0].iter().zip(row).filter(|(key, _)| *key != "reward") {
                let expected = match &event[key.as_str()] {
                    Value::Null => String::new(),
                    Value::String(text) => text.clone(),
                    Value::Number(n) => n.to_string(),
                    other => panic!("{key}: {other}"),
                };
                let equal = cell.parse::<f64>().ok() == expected.parse::<f64>().ok();
                let in_twin = key.starts_with("twin_");
                assert!(in_twin || *cell == expected || equal, "{key}: {cell}, {expected}");
            }
        }
    }
    let slots = table("slots");
    assert!(slots.iter().any(|row| row.iter().any(|cell| cell == "training")), "{slots:?}");
    assert_eq!(table("policy").len(), 1, "no policy learned: only the header");
    m.ok("export csv runs/grown --out steps.csv");
    assert!(m.bytes("steps.csv").starts_with(b"seconds,env,"));
    m.fails("export csv grown --out steps.csv", 2, &["`out`", "would be overwritten"]);
    m.fails("export csv nowhere", 2, &["nowhere is not the folder of a run"]);
}

#[test]
fn a_run_is_exported_as_parquet() {
    let m = Meristem::new();
    grown(&m, "");
    let export = "export parquet grown --out steps.parquet";
    let rows = m.ok("export csv grown").stdout.lines().count() - 1;
    let said = m.ok(export).stdout;
    assert!(said.contains(&format!("steps.parquet: {rows} rows")), "{said}");
    let file = m.bytes("steps.parquet");
    assert!(file.starts_with(b"PAR1") && file.ends_with(b"PAR1"), "{} bytes", file.len());
    m.ok("export parquet grown --table policy --out policy.parquet");
    m.fails(export, 2, &["`out`", "would be overwritten"]);
    m.fails("export parquet nowhere --out x", 2, &["nowhere is not the folder of a run"]);
}

#[test]
fn completions_and_manual_pages_have_every_command() {
    let m = Meristem::new();
    for (shell, words) in [("bash", "complete -F"), ("zsh", "#compdef"), ("fish", "complete -c")] {
        let script = m.ok(&format!("completions {shell}")).stdout;
        assert!(script.contains(words) && script.contains("max-batches"), "{script}");
    }
    m.fails("completions tcsh", 2, &["invalid value 'tcsh'"]);
    m.ok("man pages");
    let page = String::from_utf8(m.bytes("pages/meristem-runs-compare.1")).unwrap();
    assert!(page.contains("settings that differ"), "{page}");
    m.fails("man pages", 2, &["would be overwritten"]);
}

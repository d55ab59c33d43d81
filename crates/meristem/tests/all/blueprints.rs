//! Blueprints from files: `--blueprints`.

use std::collections::BTreeSet;
use std::fs;

use crate::common::runs::{assert_same, outcome, with_images};
use crate::common::{Meristem, of_kind};
use crate::resume::{Moment, killed_at};

const RUN: &str = "train --dataset arrays --data-root images.safetensors --controller random \
                   --preset quick --host minimal --slots r0,r1 --envs 3 --steps 16 --batch 16 \
                   --control-split 0.2 --checkpoint-every 2 --quiet --blueprints";

/// Keys of a depthwise layer that needs slots of at least 8 channels; the host of these runs has 2.
const EIGHT: &str = "{ divided = { by = 1, at_least = 8 } }, kernel = 5";

const PLAIN: &str = r#"{"blueprints": [{
    "name": "plain", "layers": [{"group_norm": {"zero": true}}], "join": "residual"
}]}"#;

/// The block of docs/growth.md after `<!-- test: NAME -->`.
fn example(name: &str) -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/growth.md");
    let page = fs::read_to_string(page).unwrap();
    let block = page.split(&format!("<!-- test: {name} -->\n")).nth(1).unwrap();
    block.split("```").nth(1).unwrap().split_once('\n').unwrap().1.into()
}

fn with_files() -> Meristem {
    let m = with_images();
    fs::write(m.path("own.toml"), example("own.toml")).unwrap();
    fs::write(m.path("plain.json"), PLAIN).unwrap();
    m
}

fn grown(m: &Meristem, run: &str) -> BTreeSet<String> {
    let events = m.events(run);
    let grown = of_kind(&events, "module_germinated");
    grown.iter().map(|event| event["blueprint"].as_str().unwrap().to_string()).collect()
}

#[test]
fn the_example_of_the_documentation_trains() {
    let m = with_files();
    let command = example("command");
    let arguments = command.trim().strip_prefix("meristem ").unwrap();
    let small = "--steps 2 --envs 2 --max-batches 1 --batch 16 --host minimal --quiet";
    m.ok(&format!("{arguments} {small} --run-dir run"));
}

#[test]
fn modules_grow_from_the_files_in_the_order_of_the_list() {
    let m = with_files();
    m.ok(&format!("{RUN} own.toml --blueprints plain.json --run-dir run"));
    let names = ["plain", "squeeze", "wide_depthwise"].map(String::from);
    assert_eq!(grown(&m, "run"), BTreeSet::from(names));
    // A weights file contains its blueprints.
    m.ok("eval --weights run/weights/env-0.safetensors --dataset arrays \
          --data-root images.safetensors");
    let config = fs::read_to_string(m.path("run/config.toml")).unwrap();
    let path = |name: &str| format!("\"{}\"", m.path(name).canonicalize().unwrap().display());
    let line = format!("blueprints = [{}, {}]", path("own.toml"), path("plain.json"));
    assert!(config.lines().any(|own| own == line), "{line} is not in\n{config}");
    // The written settings start the same run again.
    m.ok("train --config run/config.toml --run-dir again --quiet");
    assert_eq!(outcome(&m, "again").weights, outcome(&m, "run").weights);
    let files = &m.json("run/summary.json")["input_files"];
    assert_eq!(files.as_array().unwrap().len(), 2, "{files}");
    assert_eq!(files[0]["setting"], "blueprints");
    m.ok(&format!("{RUN} standard,own.toml --run-dir both"));
    assert!(grown(&m, "both").len() > 3, "{:?}", grown(&m, "both"));
}

#[test]
fn a_killed_run_resumes_with_the_same_bits() {
    let m = with_files();
    m.ok(&format!("{RUN} own.toml --run-dir whole"));
    let lines = m.events("whole").len();
    assert!(killed_at(
        &m,
        &format!("{RUN} own.toml --run-dir run"),
        "run",
        Moment::Events(lines / 2)
    ));
    m.ok("train --resume run --quiet");
    assert_same(&outcome(&m, "run"), &outcome(&m, "whole"), "killed and resumed");
}

#[test]
fn a_run_does_not_resume_with_a_changed_or_missing_file() {
    let m = with_files();
    assert!(killed_at(&m, &format!("{RUN} own.toml --run-dir run"), "run", Moment::Events(30)));
    let events = m.bytes("run/events.jsonl");
    fs::write(m.path("own.toml"), example("own.toml").replace("kernel = 5", "kernel = 3")).unwrap();
    m.fails("train --resume run", 2, &["own.toml, which --blueprints names", "checksum"]);
    fs::remove_file(m.path("own.toml")).unwrap();
    m.fails("train --resume run", 2, &["own.toml: cannot be read"]);
    assert_eq!(m.bytes("run/events.jsonl"), events);
    fs::write(m.path("own.toml"), example("own.toml")).unwrap();
    m.ok("train --resume run --quiet");
}

#[test]
fn a_comparison_uses_files_and_continues_only_with_the_same() {
    let m = with_files();
    let study = "control eval --controllers none,random --host minimal --envs 2 --steps 3 \
                 --max-batches 2 --batch 16 --blueprints own.toml --run-dir study --seeds";
    m.ok(&format!("{study} 1"));
    let config = m.path("study/seed-1000/2-random/config.toml");
    assert!(fs::read_to_string(&config).unwrap().contains("own.toml"), "{}", config.display());
    fs::write(m.path("own.toml"), PLAIN.replace("plain", "other")).unwrap();
    fs::write(m.path("own.toml"), example("own.toml") + "# changed\n").unwrap();
    m.fails(&format!("{study} 2"), 2, &["own.toml, which --blueprints names", "checksum"]);
}

#[test]
fn an_invalid_file_is_refused_with_the_position_of_the_problem() {
    let m = with_files();
    let own = example("own.toml");
    for (name, text, words) in [
        ("gone.toml", None, &["gone.toml: cannot be read"][..]),
        ("a.yaml", Some(own.clone()), &["a.yaml", ".toml or .json"]),
        ("a.toml", Some(own.replace("conv =", "convv =")), &["line 4", "unknown variant `convv`"]),
        (
            "a.toml",
            Some(own.replace("kernel", "kernle")),
            &["line 4", "unexpected keys in table: kernle"],
        ),
        (
            "a.toml",
            Some(own.replace("kernel = 5", "kernel = 4")),
            &["blueprint 1", "layer 0", "odd"],
        ),
        ("a.toml", Some(own.replace("squeeze", "wide_depthwise")), &["blueprint 2", "already"]),
        ("a.toml", Some(own.replace("2.0", "1.0")), &["blueprint 2: blueprint `squeeze`"]),
        (
            "a.toml",
            Some(own.replace("\"same\", kernel = 5", "{ times = { by = 2 } }, kernel = 5")),
            &["blueprint 1", "at 8 channels: layer 0: a depthwise"],
        ),
        (
            "a.toml",
            Some(own.replace("\"same\", kernel = 5", EIGHT)),
            &["at 2 channels", "depthwise"],
        ),
        ("a.toml", Some("blueprints = []".into()), &["a.toml: it has no blueprints"]),
        ("a.toml", Some("#".repeat(70_000)), &["more than 65536 bytes"]),
        (
            "a.json",
            Some(PLAIN.replace("zero", "zreo")),
            &["a.json", "line 2", "unknown field `zreo`"],
        ),
        ("a.json", Some(PLAIN.replace("plain", "Plain")), &["blueprint 1", "letters a-z"]),
        ("own.toml,own.toml", None, &["own.toml: blueprint 1: there is already"]),
        ("own.toml,", None, &["standard, vectors, or the path of a file"]),
    ] {
        if let Some(text) = text {
            fs::write(m.path(name), text).unwrap();
        }
        m.fails(&format!("{RUN} {name} --run-dir run"), 2, words);
        assert!(!m.path("run").exists(), "{name}");
    }
}

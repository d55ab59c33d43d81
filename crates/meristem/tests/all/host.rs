//! Hosts from files, and `meristem host show`.

use std::fs;

use crate::common::runs::{assert_same, outcome, with_images};
use crate::common::{Meristem, of_kind};
use crate::resume::{Moment, killed_at};

/// A small host with slots in branches, for the images of [`with_images`].
pub(crate) const BRANCHES: &str = r#"
layers = [
  { conv2d = { out = 8, kernel = 3, stride = 2, name = "stem" } },
  "batch_norm",
  "relu",
  { residual = { body = [
      { conv2d = { out = 12, kernel = 3, groups = 4 } },
      { slot = { name = "inner" } },
      { group_norm = { groups = 3 } },
      "tanh",
  ], shortcut = [{ conv2d = { out = 12, kernel = 1, bias = true } }] } },
  { slot = { name = "outer" } },
  { branches = { join = "add", branches = [
      [],
      ["sigmoid"],
      [{ conv2d = { out = 12, kernel = [1, 3] } }],
  ] } },
  { max_pool2d = { kernel = 3, stride = 2, padding = 1 } },
  { save = { name = "pooled" } },
  { conv2d = { out = 12, kernel = 3, dilation = 2 } },
  { join = { join = "multiply", from = ["pooled"] } },
  { avg_pool2d = { kernel = [2, 1], stride = 1 } },
  { branches = { join = "concat", branches = [["global_max_pool"], ["flatten"]] } },
  { linear = { out = 16 } },
  "relu",
  { linear = { out = "classes", bias = false } },
]
"#;

/// A linear classifier of the mean colour, without slots.
const PLAIN: &str = "layers = [\"global_avg_pool\", { linear = { out = \"classes\" } }]";

const RUN: &str = "train --dataset arrays --data-root images.safetensors --controller random \
                   --preset quick --envs 3 --steps 16 --batch 16 --control-split 0.2 \
                   --checkpoint-every 2 --quiet --host";

/// The block of docs/hosts.md after `<!-- test: NAME -->`.
fn example(name: &str) -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/hosts.md");
    let page = fs::read_to_string(page).unwrap();
    let block = page.split(&format!("<!-- test: {name} -->\n")).nth(1).unwrap();
    block.split("```").nth(1).unwrap().split_once('\n').unwrap().1.into()
}

#[test]
fn the_examples_of_the_documentation_run() {
    let m = Meristem::new();
    fs::write(m.path("own.toml"), example("own.toml")).unwrap();
    let mut number = 0;
    for line in example("command").lines() {
        let command = line.split('#').next().unwrap().trim().strip_prefix("meristem ").unwrap();
        if command.starts_with("train") {
            let small = "--steps 1 --envs 1 --max-batches 1 --batch 8 --controller random --quiet";
            number += 1;
            m.ok(&format!("{command} {small} --run-dir run{number}"));
        } else {
            m.ok(command);
        }
    }
    assert_eq!(number, 3);
    let config = fs::read_to_string(m.path("run3/config.toml")).unwrap();
    assert!(config.contains("name = \"own-embedded\""), "{config}");
}

#[test]
fn a_described_host_grows_and_resumes_without_its_file() {
    let m = with_images();
    fs::write(m.path("branches.toml"), BRANCHES).unwrap();
    m.ok(&format!("{RUN} branches.toml --run-dir whole"));
    let events = m.events("whole");
    let grown = of_kind(&events, "module_germinated");
    for slot in ["inner", "outer"] {
        assert!(grown.iter().any(|event| event["slot"] == slot), "{slot}");
    }
    let start = format!("{RUN} branches.toml --run-dir run");
    assert!(killed_at(&m, &start, "run", Moment::Events(events.len() / 2)));
    // The run has the description; another file of the name changes nothing.
    fs::write(m.path("branches.toml"), "layers = []").unwrap();
    m.ok("train --resume run --quiet");
    assert_same(&outcome(&m, "run"), &outcome(&m, "whole"), "killed and resumed");
    m.ok("train --config whole/config.toml --run-dir again --quiet");
    assert_eq!(outcome(&m, "again").weights, outcome(&m, "whole").weights);
    let listed = m.ok("runs . --json").stdout;
    assert!(listed.contains("\"host\":\"branches\"") && !listed.contains("conv2d"), "{listed}");
}

#[test]
fn weights_of_a_described_host_are_complete() {
    let m = with_images();
    fs::write(m.path("branches.toml"), BRANCHES).unwrap();
    m.ok(&format!("{RUN} branches.toml --run-dir run --max-batches 2"));
    let weights = "run/weights/env-0.safetensors";
    let data = "--dataset arrays --data-root images.safetensors";
    m.ok(&format!("eval --weights {weights} {data}"));
    m.ok(&format!("eval --weights {weights} {data} --host branches.toml"));
    let other = ["made with host `branches`, but `resnet8` was requested"];
    m.fails(&format!("eval --weights {weights} {data} --host resnet8"), 2, &other);
    m.ok(&format!("export onnx {weights} --out model.onnx"));
    m.ok(&format!("{RUN} branches.toml --init {weights} --run-dir further --steps 2"));
    m.ok(&format!("{RUN} branches.toml --start-topology run --run-dir fresh --steps 2"));
    m.ok("runs report run --out report.html");
    let report = fs::read_to_string(m.path("report.html")).unwrap();
    for drawn in ["stem", "conv 3×3", "inner", "outer", "sum"] {
        assert!(report.contains(drawn), "{drawn}");
    }
}

#[test]
fn a_file_that_is_no_host_is_refused() {
    let m = Meristem::new();
    let files = [
        ("a.toml", "layers = [\"rellu\"]", "layers.0: unknown layer `rellu`; did you mean `relu`?"),
        ("a.toml", "layers = [", "TOML parse error"),
        ("a.json", "{\"layers\": 3}", "invalid type"),
        ("a.json", "{\"version\": 9, \"layers\": []}", "it has version 9"),
        ("a.json", "{\"layers\": [], \"layers\": [\"relu\"]}", "the key `layers` is there twice"),
    ];
    for (name, text, words) in files {
        fs::write(m.path(name), text).unwrap();
        m.fails(&format!("train --host {name} --run-dir run"), 2, &[words]);
        m.fails(&format!("host show {name}"), 2, &[words]);
        assert!(!m.path("run").exists());
    }
    fs::write(m.path("a.toml"), "layers = [\"global_avg_pool\"]").unwrap();
    m.fails("train --host a.toml --controller none", 2, &["its last layer gives 1×1×1"]);
    fs::write(m.path("a.toml"), PLAIN).unwrap();
    m.fails("train --host a.toml", 2, &["a host with slots", "--controller none"]);
    let bare = "--controller none --steps 1 --envs 1 --max-batches 1 --batch 8 --quiet";
    m.ok(&format!("train --host a.toml {bare} --run-dir run"));
    m.fails("train --host gone.toml", 2, &["host gone.toml: cannot be read", "docs/hosts.md"]);
    m.fails("host show own.yaml", 2, &["unknown host `own.yaml`", ".toml or .json"]);
}

#[test]
fn a_host_is_shown_as_a_table_and_as_json() {
    let m = Meristem::new();
    let said = m.ok("host show baseline --input 3x32x32").stdout;
    for words in [
        "cnn:channels=8,blocks=3,kernel=3,pools=3",
        "images of 3×32×32, 10 classes: 6,418 parameters, 811,328 multiply-accumulate operations \
         per image, 6 slots",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let row = said.lines().find(|line| line.contains("blocks.1.conv")).unwrap();
    let cells: Vec<&str> = row.split(['│', '┆']).map(str::trim).collect();
    assert_eq!(cells[1..6], ["blocks.1.conv", "conv 3×3", "16×16×16", "1,152", "294,912"]);

    let printed = m.ok("host show baseline --input 3x32x32 --json").stdout;
    let json: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!((&json["parameters"], &json["macs"]), (&6418.into(), &811_328.into()));
    let slot = &json["layers"][3];
    assert_eq!((&slot["name"], &slot["layer"]), (&"r0c0".into(), &"slot".into()));
    assert_eq!(slot["output"], serde_json::json!([8, 32, 32]));
}

#[test]
fn a_host_is_drawn() {
    let m = Meristem::new();
    fs::write(m.path("branches.toml"), BRANCHES).unwrap();
    m.ok("host show branches.toml --input 3x32x32 --plot host.svg");
    let svg = fs::read_to_string(m.path("host.svg")).unwrap();
    for words in ["<svg ", "conv 3×3", "inner", "outer", "sum"] {
        assert!(svg.contains(words), "{words}");
    }
    m.ok("host show resnet20 --input 3x32x32 --plot host.png --json");
    assert!(fs::read(m.path("host.png")).unwrap().starts_with(b"\x89PNG"));
    // An existing file is kept, and so is the place of a plot of no host.
    m.fails("host show baseline --plot host.svg", 2, &["host.svg", "would be overwritten"]);
    assert_eq!(fs::read_to_string(m.path("host.svg")).unwrap(), svg);
    m.fails("host show deep --input 3x4x4 --plot none.svg", 2, &["too deep"]);
    assert!(!m.path("none.svg").exists());
    m.fails("host show baseline --plot host.jpg", 2, &["ends in .svg or .png"]);
}

#[test]
fn a_host_that_cannot_be_is_refused() {
    let m = Meristem::new();
    m.fails("host show basline", 2, &["unknown host `basline`", "did you mean `baseline`"]);
    m.fails("host show deep --input 3x4x4", 2, &["too deep for 3×4×4 images"]);
    m.fails("host show deep --input 3x32", 2, &["too deep for 3×1×32 images"]);
    m.fails("host show deep --input 3x32xa", 2, &["expected channels, rows and columns"]);
    m.fails("host show deep --classes 0", 2, &["`classes` must be"]);
}
